"""Activation recomputation: keep a block's input, drop what it saved, run it again in the backward pass.

The second run must draw the same dropout masks as the first, from both streams of `RandomStreams`; and, like the
paper's, it repeats all of the block's collectives, so that every rank of the tensor axis enters them in the same order
(Chen et al. 2016; Shoeybi et al. 2019, section 5.1: "activation checkpointing after every transformer layer").
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from megascale.parallel.random import RandomStreams


def recompute(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, streams: RandomStreams
) -> torch.Tensor:
    """Return function(x), keeping only `x` for the backward pass.

    Args:
        function: The block; its random draws must come from `streams`.
        x: Its input, of any shape.
        streams: The rank's random streams, replayed when the block runs again.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), streams.replaying(streams.states())

    # Early stop would skip the last all-reduce of the second run; the paper counts it (6L + 2 per iteration).
    with set_checkpoint_early_stop(False):
        return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
