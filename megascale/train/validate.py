"""Validation: the mean loss of the same samples every time, each scored once at any data-parallel size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megascale.data.loader import Batch
from megascale.parallel.context import ParallelContext
from megascale.train.micro_batches import to_device


@dataclass(frozen=True)
class ValidationResult:
    """The sum of the scored tokens' losses in nats, and how many there were, over all ranks."""

    sum_loss: float
    num_scored_tokens: int

    @property
    def loss(self) -> float:
        return self.sum_loss / self.num_scored_tokens


@torch.no_grad()
def validate(model: nn.Module, batches: Iterator[Batch], context: ParallelContext) -> ValidationResult:
    """Score this rank's batches without dropout and add up over the data-parallel ranks.

    All ranks must have equally many micro-batches; padded samples carry weight 0.
    """
    model.eval()
    sum_loss, num_scored_tokens = 0.0, 0.0
    for batch in batches:
        for micro_batch in batch.micro_batches:
            tokens, targets, loss_weights = to_device(micro_batch, context.device)
            sum_loss += model(tokens, targets, loss_weights).item()
            num_scored_tokens += float(micro_batch.loss_weights.sum())
    model.train()
    sum_loss, num_scored_tokens = context.dp.sum_floats([sum_loss, num_scored_tokens])
    return ValidationResult(sum_loss, round(num_scored_tokens))
