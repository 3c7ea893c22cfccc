"""Show, prove, recut and average checkpoints. Nothing in a checkpoint is executed.

python tools/convert_checkpoint.py show runs/mine
python tools/convert_checkpoint.py verify runs/mine
python tools/convert_checkpoint.py reshard runs/mine runs/mine-tp2 --tensor-model-parallel-size 2
python tools/convert_checkpoint.py average runs/mine runs/mine-mean --num-checkpoints 10

A path is one checkpoint or a run directory, of which the newest complete checkpoint is taken (verify: all of them).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megascale.checkpoint.describe import describe_checkpoint, describe_run_checkpoints
from megascale.checkpoint.manifest import MANIFEST_NAME, find_latest, list_checkpoints, read_manifest, verify
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError, exit_with


def main(argv: list[str] | None = None) -> None:
    flags = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        {"show": show, "verify": prove, "reshard": recut, "average": take_mean}[flags.command](flags)
    except UserError as error:
        exit_with(error, LaunchEnvironment())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("show", help="what a checkpoint holds, or which ones a run has")
    command.add_argument("path", type=Path)
    command.add_argument("--tensors", action="store_true", help="list every tensor of the (newest) checkpoint")
    command = commands.add_parser("verify", help="hash every file; exit code 2 if one is not what was saved")
    command.add_argument("paths", type=Path, nargs="+", metavar="path")
    command = commands.add_parser("reshard", help="write the same tensors as ranks of another layout would")
    command.add_argument("path", type=Path)
    command.add_argument("output", type=Path, help="new run directory")
    command.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N", help="default: 1")
    command.add_argument(
        "--num-files", type=int, metavar="N", help="files of tensors, a multiple of it (default: one for each)"
    )
    command = commands.add_parser("average", help="write the mean of the weights of several checkpoints")
    command.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="path",
        help="checkpoints, or one run with --num-checkpoints; then output",
    )
    command.add_argument("output", type=Path, help="new run directory")
    command.add_argument("--num-checkpoints", type=int, metavar="N", help="the newest complete ones of the run")
    return parser


def show(flags: argparse.Namespace) -> None:
    """Print one checkpoint, or all of a run."""
    if flags.tensors or (flags.path / MANIFEST_NAME).exists():
        path = _one(flags.path)
        print(describe_checkpoint(path, read_manifest(path), flags.tensors))
        return
    entries = list_checkpoints(flags.path)
    if not entries:
        raise UserError(f"{flags.path} holds no checkpoint")
    print(describe_run_checkpoints(entries))


def prove(flags: argparse.Namespace) -> None:
    """Verify checkpoints one after the other; all are looked at before the first problem ends the program."""
    problems = []
    for given in flags.paths:
        several = not (given / MANIFEST_NAME).exists() and list_checkpoints(given)
        for path in [entry.path for entry in several] if several else [given]:
            try:
                manifest = verify(path)
            except UserError as error:
                problems.append(str(error))
            else:
                print(f"{path}: step {manifest.step}, {len(manifest.files)} files are what was saved")
    if problems:
        raise UserError("\n".join(problems))


def recut(flags: argparse.Namespace) -> None:
    """Write a checkpoint in other files."""
    from megascale.checkpoint.convert import reshard
    from megascale.checkpoint.splits import split_dims

    source, num_tp = _one(flags.path), flags.tensor_model_parallel_size
    num_files = num_tp if flags.num_files is None else flags.num_files
    written = reshard(source, flags.output, num_tp, num_files, split_dims(read_manifest(source)))
    print(f"{written}: {source} in {num_files} files, cut for tensor-parallel size {num_tp}; values unchanged")


def take_mean(flags: argparse.Namespace) -> None:
    """Write the mean of checkpoints."""
    from megascale.checkpoint.convert import average, newest_complete

    paths = flags.paths
    if flags.num_checkpoints is not None:
        if len(paths) > 1:
            raise UserError(f"--num-checkpoints takes the newest of one run, {len(paths)} paths are given: drop it")
        paths = newest_complete(paths[0], flags.num_checkpoints)
    written, copied = average(paths, flags.output)
    manifest = read_manifest(written)
    steps = ", ".join(map(str, manifest.state["averaged_steps"]))
    print(f"{written}: the mean of the {len(manifest.tensors) - len(copied)} weights of steps {steps}")
    print(
        f"copied from step {manifest.step}, not averaged: {len(copied)} tensors (moments of the optimizer), counters, "
        "configuration. Training can go on from it, but the moments are those of the newest checkpoint's weights."
    )


def _one(path: Path) -> Path:
    found = find_latest(path)
    if found is None:
        raise UserError(f"{path} holds no checkpoint: give a run directory that does, or one checkpoint")
    return found


if __name__ == "__main__":
    main()
