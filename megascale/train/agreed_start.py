"""All ranks start from one checkpoint: the one that rank 0 finds, proven first where the policy asks for it.

Under `newest-intact` each rank hashes its share of the files, so that proving a checkpoint takes as long as reading it
once, however many ranks there are. What any rank finds wrong, all ranks know.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megascale.checkpoint.holding import held
from megascale.checkpoint.manifest import read_manifest, verify_files
from megascale.config.schema import CheckpointConfig
from megascale.parallel.context import Axis
from megascale.train.gathering import gather_facts
from megascale.train.prepare import PreparedRun
from megascale.train.start import NEWEST_INTACT, Start
from megascale.utils.errors import UserError


def agree_on_start(
    run: PreparedRun,
    world: Axis,
    start_without: Callable[[dict[Path, str]], Start],
    prepare_again: Callable[[Start], PreparedRun],
) -> PreparedRun:
    """Return the run as all ranks start it; all ranks call this.

    Args:
        run: As this rank prepared it by itself.
        world: All ranks.
        start_without: Finds the start when some checkpoints, given with what is wrong with them, are not to be taken.
        prepare_again: Prepares the run for another start.

    Raises:
        UserError: on every rank, when there is nothing (or nothing intact) to start from.
    """
    own = Start(run.start, run.passed_over)
    damaged: dict[Path, str] = {}
    while True:
        start = _as_rank_0(own, world)
        problem = _problem(start.path, run.config.checkpoint, world)
        if problem is None or start.path is None:
            return run if start == Start(run.start, run.passed_over) else prepare_again(start)
        damaged[start.path] = problem
        own = _together(lambda: start_without(damaged), world)


def _as_rank_0(own: Start, world: Axis) -> Start:
    """Rank 0's start, on every rank: another host may see what was saved last, or removed, a little later."""
    path, passed_over = gather_facts(world, [str(own.path) if own.path is not None else None, list(own.passed_over)])[0]
    return Start(Path(path) if path is not None else None, tuple(passed_over))


def _problem(path: Path | None, config: CheckpointConfig, world: Axis) -> str | None:
    """What is wrong with the content of a checkpoint that the policy wants proven, the same on every rank; or None."""
    if path is None or config.load_policy != NEWEST_INTACT:
        return None
    problem = None
    try:
        with held(path):
            manifest = read_manifest(path)
            verify_files(path, manifest, sorted(manifest.files)[world.rank :: world.size])
    except UserError as error:
        problem = str(error)
    return next((found for found in gather_facts(world, problem) if found is not None), None)


def _together(find: Callable[[], Start], world: Axis) -> Start:
    """What `find` returns; when it fails on rank 0 it fails on every rank, and what others find is rank 0's to say."""
    start, message = Start(None), None
    try:
        start = find()
    except UserError as error:
        message = str(error)
    message = gather_facts(world, message)[0]
    if message is not None:
        raise UserError(message)
    return start
