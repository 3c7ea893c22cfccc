"""Where a bad step comes from, found by running its micro-batches again, one at a time.

Random streams are re-seeded per micro-batch and the weights have not changed, so each rank sees what it saw before. It
notes the first module whose output is not finite, the parameters whose gradients are not, and the loss. Ranks of one
replica work together here as in the step itself, and data-parallel ranks each on their own: nothing is summed over
them, so that the trouble stays on the rank it comes from. The stages of a pipeline run as many micro-batches at a time
as there are stages.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from megascale.data.loader import Batch, MicroBatch
from megascale.optim.build import ModelOptimizer
from megascale.parallel.context import ParallelContext
from megascale.train.gathering import gather_facts

# A record names at most this many parameters and this many micro-batches: enough to see a pattern.
_MOST_NAMES = 8
_MOST_FINDINGS = 8


class MicroBatchRuns(Protocol):
    """What runs micro-batches forward and backward; see `train.micro_batches`."""

    def run(
        self, micro_batches: Sequence[MicroBatch], step: int, gradient_scale: float, before_last: Callable[[], None]
    ) -> float:
        """Return the sum of this rank's losses."""


def diagnose(
    context: ParallelContext,
    model: nn.Module,
    optimizer: ModelOptimizer,
    runner: MicroBatchRuns,
    batch: Batch,
    step: int,
    nominal: float,
    by_loss: bool,
) -> list[dict[str, Any]]:
    """Return what each rank found in its micro-batches, the most telling first; all ranks call this together.

    Args:
        step: As the random streams were seeded with.
        nominal: What the sum of losses is divided by before the backward pass.
        by_loss: Look for the largest losses instead of what is not finite.

    Returns: A list of records of a rank, its host, micro-batches and their samples, with the mean loss (nan on ranks
        that compute none) and the names of what was not finite. Where nothing was, the list is empty, unless `by_loss`.
    """
    found = []
    for start in range(0, len(batch.micro_batches), context.pp.size):
        portion = batch.micro_batches[start : start + context.pp.size]
        found.append(_examine(context, model, optimizer, runner, portion, batch.first_sample, step, nominal))
    optimizer.zero_gradients()
    if by_loss:
        mine = [finding for finding in found if context.counts_loss]
    else:
        mine = [finding for finding in found if finding["nonfinite"]]
    everything = [finding for rank in gather_facts(context.world, mine) for finding in rank]
    if by_loss:
        everything.sort(key=lambda finding: -finding["loss"])
    else:
        # Inside a tensor-parallel region only the rank that the trouble comes from shows it; one module later all do.
        everything.sort(key=lambda finding: (finding["micro_batches"], finding["depth"]))
    hidden = ("nonfinite", "depth")
    return [{k: v for k, v in finding.items() if k not in hidden} for finding in everything[:_MOST_FINDINGS]]


def _examine(
    context: ParallelContext,
    model: nn.Module,
    optimizer: ModelOptimizer,
    runner: MicroBatchRuns,
    portion: Sequence[MicroBatch],
    first_sample: int,
    step: int,
    nominal: float,
) -> dict[str, Any]:
    optimizer.zero_gradients()
    with _first_nonfinite_output(model) as first:
        loss = runner.run(portion, step, optimizer.scaler.scale / nominal, before_last=lambda: None)
    weights = [name for name, parameter in model.named_parameters() if not _is_finite(parameter)]
    named = zip(optimizer.gradients.declared, optimizer.gradients.views, strict=True)
    gradients = [d.name for d, gradient in named if not _is_finite(gradient)]
    counted = sum(float(micro_batch.loss_weights.sum()) for micro_batch in portion)
    indices, size = [micro_batch.index for micro_batch in portion], len(portion[0].tokens)
    return {
        "rank": context.rank,
        "host": socket.gethostname(),
        "micro_batches": indices,
        "samples": [first_sample + indices[0] * size, first_sample + (indices[-1] + 1) * size - 1],
        "loss": loss / max(counted, 1.0) if context.counts_loss else math.nan,
        "nonfinite": bool(weights or gradients or first or not math.isfinite(loss)),
        "depth": first[0][0] if first else math.inf,
        "first_nonfinite_output": first[0][1] if first else None,
        "nonfinite_gradients": gradients[:_MOST_NAMES],
        "num_nonfinite_gradients": len(gradients),
        "nonfinite_weights": weights[:_MOST_NAMES],
    }


@contextmanager
def _first_nonfinite_output(model: nn.Module) -> Iterator[list[tuple[int, str]]]:
    """Yield a list that receives, of the first module whose output is not finite, its place in the order and name."""
    first: list[tuple[int, str]] = []
    num_calls = 0

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if not first and isinstance(output, torch.Tensor) and not _is_finite(output):
                first.append((num_calls, name))

        return look

    handles = [module.register_forward_hook(hook(name or "model")) for name, module in model.named_modules()]
    try:
        yield first
    finally:
        for handle in handles:
            handle.remove()


def _is_finite(x: torch.Tensor) -> bool:
    return not x.is_floating_point() or bool(torch.isfinite(x.detach()).all())
