"""A run's state as a checkpoint holds it: weights and moments as logical tensors, everything else as plain numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megascale.checkpoint.load import load_tensors
from megascale.checkpoint.manifest import DamagedCheckpoint
from megascale.checkpoint.tensors import TensorSlice
from megascale.optim.build import ModelOptimizer, StateSlice
from megascale.train.start import offer_older
from megascale.train.state import TrainState
from megascale.utils.errors import UserError


def saved_slices(optimizer: ModelOptimizer) -> list[TensorSlice]:
    """Return the tensors that this rank saves, as they lie in memory: a step changes them.

    Data-parallel rank 0 saves (with the distributed optimizer: each rank its share), of a replicated tensor the
    tensor-parallel rank 0, and of what several pipeline stages hold the first: each element once.
    """
    return [_as_tensor_slice(s) for s in optimizer.slices() if s.counts]


def saved_state(state: TrainState, optimizer: ModelOptimizer) -> dict[str, Any]:
    """Return the rest of what a checkpoint holds, as plain numbers."""
    return {"train": state.as_dict(), "optimizer": optimizer.state()}


def load_snapshot(path: Path, optimizer: ModelOptimizer) -> TrainState:
    """Fill the optimizer's weights, moments and counters from a checkpoint saved at any layout; return its progress.

    Raises:
        UserError: the checkpoint is damaged (then it tells what to load instead), or of another model.
    """
    try:
        manifest = load_tensors(path, [_as_tensor_slice(s) for s in optimizer.slices()])
    except DamagedCheckpoint as error:
        raise UserError(f"{error}. {offer_older(path)}") from None
    state: dict[str, Any] = manifest.state
    optimizer.loaded(state["optimizer"])
    return TrainState.from_dict(state["train"])


def _as_tensor_slice(s: StateSlice) -> TensorSlice:
    return TensorSlice(s.name, s.global_shape, s.offset, s.data)
