"""Does a layout train the same model? Runs a configuration for a few steps at several layouts and gives a verdict.

python tools/check_layout.py --layout tp=1 --layout tp=2 --layout "tp=2,dp=2 --sequence-parallel" -- FLAGS OF THE RUN

The first layout is the one that the others are measured by; --global-batch-size keeps the samples of a step the same.
Processes run on this machine. Exit code 0: the same model. 1: not the same. 2: it could not be told.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from megascale.train.check_layout import (
    TOLERANCES,
    compare,
    explain,
    largest_difference,
    parse_layout,
    run_layout,
)
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError, exit_with
from megascale.utils.progress import progress

_PROGRAM = Path(__file__).resolve().parent.parent / "pretrain_gpt.py"


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    own, run_flags = arguments, []
    if "--" in arguments:
        own, run_flags = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--layout", action="append", required=True, metavar="SIZES", help='such as "tp=2,dp=2 --sequence-parallel"'
    )
    parser.add_argument("--steps", type=int, default=4, help="steps to train (default: 4)")
    parser.add_argument("--keep-precision", action="store_true", help="compute as the flags say, not in float64")
    parser.add_argument("--tolerance", type=float, help="relative difference to accept instead of the precision's")
    parser.add_argument("--program", type=Path, default=_PROGRAM, help="what to run instead of pretrain_gpt.py")
    flags = parser.parse_args(own)
    try:
        same, text = check(flags, run_flags)
    except UserError as error:
        exit_with(error, LaunchEnvironment())
    print(text)
    raise SystemExit(0 if same else 1)


def check(flags: argparse.Namespace, run_flags: list[str]) -> tuple[bool, str]:
    """Run every layout; return the verdict and the text that gives it."""
    layouts = [parse_layout(text) for text in flags.layout]
    if len(layouts) < 2:
        raise UserError("one --layout alone says nothing: give a second")
    with tempfile.TemporaryDirectory() as directory, progress(len(layouts), "layout", "training") as bar:
        traces = []
        for layout in layouts:
            traces.append(
                run_layout(layout, run_flags, flags.steps, flags.keep_precision, Path(directory), flags.program)
            )
            bar.update(1)
    precision = traces[0].precision
    tolerance = TOLERANCES[precision] if flags.tolerance is None else flags.tolerance
    lines, same = [explain(tolerance, precision)], True
    for layout, trace in zip(layouts[1:], traces[1:], strict=True):
        found = compare(traces[0], trace, tolerance, weights_count=precision == "float64")
        same = same and not found
        verdict = "NOT THE SAME MODEL" if found else "the same model"
        lines.append(f"{layout.name} against {layouts[0].name}: {verdict}")
        lines += [f"  {difference}" for difference in found]
        if not found:
            lines.append(f"  losses of {flags.steps} steps agree to {largest_difference(traces[0], trace):.1e}")
    return same, "\n".join(lines)


if __name__ == "__main__":
    main()
