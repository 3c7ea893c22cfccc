"""Back to the newest checkpoint of the run, within the same processes."""

from __future__ import annotations

from pathlib import Path

from megascale.checkpoint.manifest import find_latest, published_path, read_manifest
from megascale.optim.build import ModelOptimizer
from megascale.parallel.context import ParallelContext
from megascale.train.failures import RunStopped
from megascale.train.snapshot import load_snapshot
from megascale.train.state import TrainState


def restore_newest(run_directory: Path | None, optimizer: ModelOptimizer, context: ParallelContext) -> TrainState:
    """Load the run's newest complete checkpoint, the one that rank 0 finds, and return its progress.

    Raises:
        RunStopped: The run has written none yet.
    """
    latest = find_latest(run_directory) if context.speaks and run_directory is not None else None
    (step,) = context.world.sum_floats([float(read_manifest(latest).step + 1) if latest is not None else 0.0])
    if step == 0 or run_directory is None:
        raise RunStopped("there is no checkpoint to go back to yet: lower --save-interval, or use the policy skip")
    return load_snapshot(published_path(run_directory / "checkpoints", int(step) - 1), optimizer)
