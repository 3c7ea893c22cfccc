"""The forward and backward passes of one step on one pipeline stage.

A rank follows its schedule (`config.pipeline`) task by task: a forward task receives the previous stage's states, runs
this stage's layers and sends its own; a backward task receives the gradient of what was sent, runs backward and sends
the gradient of what was received. The last stage computes the losses and starts the backward passes.

Deadlock-free: a receive blocks until its message is there; a send blocks only until the message before it on the same
link was read. `tests/config/test_pipeline.py` runs every schedule under these rules, and shows that each link's
messages are read in the order in which they are sent, so that none needs a tag.

Per boundary between stages and micro-batch, one message of s b h elements each way (s/t of the sequence with
--sequence-parallel); tensor-parallel rank i of a stage talks to rank i of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megascale.config.pipeline import Pass, PipelineStage, forward_schedule, schedule
from megascale.data.loader import MicroBatch
from megascale.model.gpt import GPT
from megascale.parallel.context import Axis, ParallelContext, Pending
from megascale.parallel.random import RandomStreams
from megascale.train.micro_batches import MicroBatchRunner, to_device


@dataclass(frozen=True)
class _Kept:
    """What a forward task leaves for its backward task: what the stage read (None: tokens) and what it put out."""

    received: torch.Tensor | None
    output: torch.Tensor


class _Outbox:
    """Sends on one link, with at most one message unread when the next is sent: then that one's memory is free."""

    def __init__(self, link: Axis) -> None:
        self._link, self._last = link, Pending()

    def send(self, x: torch.Tensor) -> None:
        self.flush()
        self._last = self._link.start_send(x)

    def flush(self) -> None:
        """Wait until everything was read."""
        self._last.wait()
        self._last = Pending()


def build_runner(
    model: nn.Module, streams: RandomStreams, context: ParallelContext
) -> MicroBatchRunner | PipelineRunner:
    """Return what runs the micro-batches of a step on this rank: alone, or as a stage of a pipeline."""
    if context.pp.size == 1:
        return MicroBatchRunner(model, streams, context.device)
    assert isinstance(model, GPT), "a model in stages"
    return PipelineRunner(model, streams, context)


class PipelineRunner:
    """Runs micro-batches through the stages of one rank; their gradients add up in the model's parameters.

    Args:
        model: The rank's stages.
        streams: Re-seeded at the start of each micro-batch.
        context: Where this rank stands.
    """

    def __init__(self, model: GPT, streams: RandomStreams, context: ParallelContext) -> None:
        assert context.links is not None, "there is a pipeline"
        self._model, self._streams, self._device = model, streams, context.device
        self._pp, self._links = context.pp, context.links
        self._to_next, self._to_previous = _Outbox(context.links.to_next), _Outbox(context.links.to_previous)

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        step: int,
        gradient_scale: float,
        before_last: Callable[[], None],
    ) -> float:
        """Return the sum of the losses in nats on the last stage, 0 on others; gradients as `MicroBatchRunner.run`.

        Args:
            step: The training step, for the random streams.
            before_last: Called before the last backward task, after which gradients are final.
        """
        tasks = schedule(self._pp.size, len(self._model.stages), len(micro_batches), self._pp.rank)
        kept: dict[tuple[int, int], _Kept] = {}
        losses: list[torch.Tensor] = []
        for number, task in enumerate(tasks, start=1):
            key = (task.chunk, task.micro_batch)
            micro_batch, stage = micro_batches[task.micro_batch], self._model.stages[task.chunk]
            if task.direction is Pass.FORWARD:
                self._streams.start(step, micro_batch.index)
                kept[key] = self._forward(stage, micro_batch, gradient_scale)
                if stage.is_last:
                    losses.append(kept[key].output.detach())
            else:
                if number == len(tasks):
                    before_last()
                self._backward(stage, kept.pop(key), gradient_scale)
        self._flush()
        return float(sum(loss.item() for loss in losses))

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return the sum of the losses in nats without learning, on the last stage, 0 on others."""
        sum_loss = 0.0
        for task in forward_schedule(self._pp.size, len(self._model.stages), len(micro_batches)):
            stage = self._model.stages[task.chunk]
            output = self._forward(stage, micro_batches[task.micro_batch], gradient_scale=1.0).output
            if stage.is_last:
                sum_loss += output.item()
        self._flush()
        return sum_loss

    def _forward(self, stage: PipelineStage, micro_batch: MicroBatch, gradient_scale: float) -> _Kept:
        model = self._model
        tokens, targets, loss_weights = to_device(micro_batch, self._device)
        if stage.is_first:
            received, states = None, model.embed(tokens)
        else:
            dtype = next(model.parameters()).dtype
            received = self._links.from_previous.receive(model.states_shape(*tokens.shape), dtype)
            states = received.requires_grad_(torch.is_grad_enabled())
        states = model.run_layers(states, stage.layers)
        if stage.is_last:
            return _Kept(received, model.loss(states, targets, loss_weights, gradient_scale))
        self._to_next.send(states.detach())
        return _Kept(received, states)

    def _backward(self, stage: PipelineStage, kept: _Kept, gradient_scale: float) -> None:
        if stage.is_last:
            (kept.output * gradient_scale).backward()
        else:
            kept.output.backward(self._links.from_next.receive(kept.output.shape, kept.output.dtype))
        if kept.received is not None:
            assert kept.received.grad is not None, "the layers read what was received"
            self._to_previous.send(kept.received.grad)

    def _flush(self) -> None:
        self._to_next.flush()
        self._to_previous.flush()
