"""Where do two runs part? The first step, rank and tensor, from the digests of runs with --log-digests.

python tools/compare_runs.py RUN_A RUN_B

Exit code 0: the same. 1: they part. 2: they cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megascale.train.compare import compare_runs
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError, exit_with


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("first", type=Path, metavar="RUN_A", help="a run directory")
    parser.add_argument("second", type=Path, metavar="RUN_B", help="another one")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="relative difference of loss and gradient norm to accept between runs of different layouts "
        "(default: 1e-9 for float64, 1e-4 for float32; runs of one layout are compared bit by bit)",
    )
    flags = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        same, text = compare_runs(flags.first, flags.second, flags.tolerance)
    except UserError as error:
        exit_with(error, LaunchEnvironment())
    print(text)
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
