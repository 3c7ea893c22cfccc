"""Activation recomputation: keep a stretch's inputs, drop what it saved, run it again in the backward pass.

Full recomputation does so for whole layers, selective recomputation for the attention core only (between the
projections), which keeps most and costs little to repeat (Korthikanti et al. 2022, section 5).

The second run must draw the same dropout masks as the first, from both streams of `RandomStreams`; and, like the
paper's, it repeats all of the block's collectives, so that every rank of the tensor axis enters them in the same order
(Chen et al. 2016; Shoeybi et al. 2019, section 5.1: "activation checkpointing after every transformer layer").
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from megascale.parallel.random import RandomStreams


def recompute(function: Callable[..., torch.Tensor], streams: RandomStreams, *inputs: torch.Tensor) -> torch.Tensor:
    """Return function(*inputs), keeping only the inputs for the backward pass.

    Args:
        function: The stretch; its random draws must come from `streams`.
        streams: The rank's random streams, replayed when the stretch runs again.
        inputs: Of any shapes.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), streams.replaying(streams.states())

    # Early stop would skip the last all-reduce of the second run; the paper counts it (6L + 2 per iteration).
    with set_checkpoint_early_stop(False):
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


class Recomputed(nn.Module):
    """A module without parameters that keeps only its inputs for the backward pass."""

    def __init__(self, module: nn.Module, streams: RandomStreams) -> None:
        super().__init__()
        self.module, self._streams = module, streams

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.module(*inputs)
        return recompute(self.module, self._streams, *inputs)
