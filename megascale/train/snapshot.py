"""A run's state as a checkpoint holds it: weights and moments as logical tensors, everything else as plain numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megascale.checkpoint.load import load_tensors
from megascale.checkpoint.save import save_checkpoint
from megascale.checkpoint.tensors import TensorSlice
from megascale.config.schema import RunConfig
from megascale.config.serialization import to_dict
from megascale.optim.build import ModelOptimizer
from megascale.parallel.context import ParallelContext
from megascale.parallel.sharding import DeclaredParameter
from megascale.train.state import TrainState


def save_snapshot(
    run_directory: Path | None,
    state: TrainState,
    optimizer: ModelOptimizer,
    config: RunConfig,
    context: ParallelContext,
) -> Path | None:
    """Save a checkpoint of the run; every rank calls this. Returns its path, None for a run that keeps nothing.

    Data-parallel rank 0 writes, of a replicated tensor the tensor-parallel rank 0, and of what several pipeline stages
    hold the first: each element once.
    """
    if run_directory is None:
        return None
    return save_checkpoint(
        run_directory / "checkpoints",
        state.step,
        [s for s, d in _slices(optimizer) if _writes(context, d)],
        {"train": state.as_dict(), "optimizer": optimizer.state()},
        to_dict(config),
        context.rank,
        context.world.size,
        context.world.barrier,
    )


def load_snapshot(path: Path, optimizer: ModelOptimizer) -> TrainState:
    """Fill the optimizer's weights, moments and counters from a checkpoint saved at any layout; return its progress."""
    manifest = load_tensors(path, [s for s, _ in _slices(optimizer)])
    state: dict[str, Any] = manifest.state
    optimizer.loaded(state["optimizer"])
    return TrainState.from_dict(state["train"])


def _writes(context: ParallelContext, d: DeclaredParameter) -> bool:
    """Whether this is the one rank that writes its part of a parameter."""
    return context.dp.rank == 0 and (d.is_split or context.tp.rank == 0) and d.is_first_copy


def _slices(optimizer: ModelOptimizer) -> list[tuple[TensorSlice, DeclaredParameter]]:
    """This rank's part of every tensor, and the parameter that it belongs to."""
    return [
        (TensorSlice(name, d.spec.shape, d.spec.offset(d.axis), tensor), d) for name, tensor, d in optimizer.tensors()
    ]
