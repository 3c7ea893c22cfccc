"""Validation: the mean loss of the same samples every time, each scored once at any data-parallel size."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

from torch import nn

from megascale.data.loader import Batch
from megascale.parallel.context import ParallelContext
from megascale.train.micro_batches import MicroBatchRunner
from megascale.train.pipeline import PipelineRunner


@dataclass(frozen=True)
class ValidationResult:
    """The sum of the scored tokens' losses in nats, and how many there were, over all ranks."""

    sum_loss: float
    num_scored_tokens: int

    @property
    def loss(self) -> float:
        return self.sum_loss / self.num_scored_tokens


def validate(
    model: nn.Module,
    runner: MicroBatchRunner | PipelineRunner,
    batches: Generator[Batch, None, None],
    context: ParallelContext,
    told_to_stop: Callable[[], bool],
) -> ValidationResult | None:
    """Score this rank's batches without dropout and add up over the data-parallel ranks; all ranks learn the result.

    All ranks must have equally many micro-batches; padded samples carry weight 0. After each batch `told_to_stop`,
    which gives the same answer on every rank, may end it: the result is None then.
    """
    model.eval()
    sum_loss, num_scored_tokens, is_stopped = 0.0, 0.0, False
    with closing(batches):
        for batch in batches:
            sum_loss += runner.score(batch.micro_batches)
            num_scored_tokens += sum(float(micro_batch.loss_weights.sum()) for micro_batch in batch.micro_batches)
            is_stopped = told_to_stop()
            if is_stopped:
                break
    model.train()
    if is_stopped:
        return None
    if context.pp.rank < context.pp.size - 1:
        num_scored_tokens = 0.0  # the last stage counts them
    sum_loss, num_scored_tokens = context.pp.sum_floats(context.dp.sum_floats([sum_loss, num_scored_tokens]))
    return ValidationResult(sum_loss, round(num_scored_tokens))
