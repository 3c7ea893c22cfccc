"""The forward and backward passes of one step on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from megascale.data.loader import MicroBatch
from megascale.parallel.random import RandomStreams


class MicroBatchRunner:
    """Runs micro-batches one after the other; their gradients add up in the model's parameters.

    Args:
        model: Called as model(tokens, targets, loss_weights, gradient_scale) for the weighted sum of losses.
        streams: Re-seeded at the start of each micro-batch.
        device: Where the model computes.
    """

    def __init__(self, model: nn.Module, streams: RandomStreams, device: torch.device) -> None:
        self._model, self._streams, self._device = model, streams, device

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        step: int,
        gradient_scale: float,
        before_last: Callable[[], None],
    ) -> float:
        """Return the sum of the losses in nats; the gradients are those of that sum times `gradient_scale`.

        Args:
            step: The training step, for the random streams.
            before_last: Called before the backward pass of the last micro-batch, after which gradients are final.
        """
        losses = []
        for number, micro_batch in enumerate(micro_batches, start=1):
            self._streams.start(step, micro_batch.index)
            loss = self._model(*to_device(micro_batch, self._device), gradient_scale)
            if number == len(micro_batches):
                before_last()
            (loss * gradient_scale).backward()
            losses.append(loss.detach())
        # Read at the end, so that a GPU is not waited for between micro-batches.
        return float(sum(loss.item() for loss in losses))

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return the sum of the losses in nats, without learning."""
        return sum(self._model(*to_device(micro_batch, self._device)).item() for micro_batch in micro_batches)


def to_device(micro_batch: MicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, targets (int64) and loss weights (float32) [b, s] on the device."""
    arrays = (micro_batch.tokens, micro_batch.targets, micro_batch.loss_weights)
    tokens, targets, loss_weights = (torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)
    return tokens, targets, loss_weights
