"""Replicas that have drifted apart: weights that must be the same on several ranks are compared bit by bit.

All parameters must agree over the data-parallel axis; replicated ones (layer norms and row-parallel biases, which each
rank updates for itself; Shoeybi et al. 2019, section 3) over the tensor axis too, and a tied embedding over the first
and the last pipeline stage. Each update is a function of
equal numbers on each of these ranks, so a difference is a fault: of memory, of a reduction that is not the same on
every rank, or of the program. One fingerprint of 8 bytes per parameter is exchanged.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from megascale.data.loader import Batch
from megascale.optim.build import ModelOptimizer
from megascale.parallel.context import Axis, ParallelContext
from megascale.parallel.sharding import DeclaredParameter, declared_parameters
from megascale.train.failures import RunStopped
from megascale.train.fingerprint import fingerprints
from megascale.train.gathering import gather_facts
from megascale.train.metrics import RunMetrics
from megascale.train.observers import Observer, TrainingStep
from megascale.train.state import TrainState

_MOST_NAMES = 8


class DriftCheck(Observer):
    """Every `interval` steps, ends the run if replicas differ, before such weights reach a checkpoint."""

    def __init__(
        self,
        interval: int,
        context: ParallelContext,
        model: nn.Module,
        optimizer: ModelOptimizer,
        metrics: RunMetrics,
    ) -> None:
        self._interval, self._context, self._optimizer, self._metrics = interval, context, optimizer, metrics
        self._declared = declared_parameters(model)

    def after_step(self, state: TrainState, batch: Batch, step: TrainingStep) -> None:
        if state.step % self._interval:
            return
        self._optimizer.settle()  # weights that are still being gathered are nobody's yet
        differing = differing_replicas(self._declared, self._context)
        if not differing:
            return
        text = f"after step {state.step} replicas have drifted apart: " + "; ".join(
            f"{name} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} is not what it is on rank "
            f"{reference}"
            for name, ranks, reference in differing[:_MOST_NAMES]
        )
        if len(differing) > _MOST_NAMES:
            text += f"; and {len(differing) - _MOST_NAMES} more"
        text += ". Nothing was saved; resume from the last checkpoint, without these ranks' hosts if it comes back"
        names = [{"parameter": name, "ranks": ranks, "as_on_rank": reference} for name, ranks, reference in differing]
        self._metrics.incident({"step": state.step, "kind": "drift", "action": "stop", "differing": names}, text)
        raise RunStopped(text)


def differing_replicas(declared: list[DeclaredParameter], context: ParallelContext) -> list[tuple[str, list[int], int]]:
    """Return (name, ranks that differ, a rank of the majority) of each parameter whose copies are not all the same.

    All ranks call this together and get the same answer.
    """
    every = fingerprints([d.parameter for d in declared])
    found = _differing(every, [d.name for d in declared], context.dp, context.rank)
    # A tied embedding lies on the first and the last pipeline stage.
    for axis, shared in (
        (context.tp, [i for i, d in enumerate(declared) if not d.is_split]),
        (context.pp_ends, [i for i, d in enumerate(declared) if d.copies is not None]),
    ):
        if shared:
            found |= _differing(every[shared], [declared[i].name for i in shared], axis, context.rank)
    if not context.world.any(bool(found)):
        return []
    merged = {
        (name, tuple(ranks), reference)
        for part in gather_facts(context.world, sorted(found))
        for name, ranks, reference in part
    }
    return [(name, list(ranks), reference) for name, ranks, reference in sorted(merged)]


def _differing(prints: torch.Tensor, names: list[str], axis: Axis, rank: int) -> set[tuple[str, tuple[int, ...], int]]:
    """Compare the fingerprints of one axis's ranks."""
    if axis.size == 1:
        return set()
    own = torch.tensor([rank], dtype=torch.int64, device=axis.device)
    table = axis.all_gather(torch.cat([own, prints.to(axis.device)]), dim=0).view(axis.size, -1).cpu()
    found = set()
    for name, column in zip(names, table[:, 1:].t().tolist(), strict=True):
        ((usual, _),) = Counter(column).most_common(1)
        if any(value != usual for value in column):
            ranks = [int(r) for r in table[:, 0]]
            others = tuple(r for r, value in zip(ranks, column, strict=True) if value != usual)
            found.add((name, others, ranks[column.index(usual)]))
    return found
