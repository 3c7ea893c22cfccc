"""Random streams for dropout: one that tensor-parallel ranks share, one that is each rank's own.

Outside the tensor-parallel regions the ranks of a replica compute the same thing and must drop the same elements;
inside (attention probabilities) each rank holds other heads and must draw its own (Shoeybi et al. 2019, section 3.1).
The shared stream is torch's default generator, seeded with `seed`; the model-parallel one is seeded with `seed + 2718 +
tp rank`.

Both are re-seeded at the start of every micro-batch from (their seed, step, index of the micro-batch in the global
batch), and at every layer from these and the layer's number. So there is no random state to save: a resumed run draws
what the uninterrupted one draws, and a shared-stream mask does not depend on the data-parallel size, on the
accumulation count, nor on the pipeline stage that draws it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megascale.parallel.context import Axis

# Megatron-LM's offset between the two seeds (its model_parallel_cuda_manual_seed).
MODEL_PARALLEL_SEED_OFFSET = 2718


@dataclass(frozen=True)
class StreamStates:
    """The state of both streams at one moment."""

    shared: torch.Tensor
    model_parallel: torch.Tensor


class RandomStreams:
    """The two dropout streams of one rank.

    Args:
        seed: The run's seed, the same on all ranks.
        axis: The tensor axis; its rank sets the model-parallel stream apart.
        device: Where dropout is drawn.
    """

    def __init__(self, seed: int, axis: Axis, device: torch.device) -> None:
        self.shared_seed = seed
        self.model_parallel_seed = seed + MODEL_PARALLEL_SEED_OFFSET + axis.rank
        self._device = device
        self._generator = (
            torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
        )
        self._model_parallel_state = self._generator.get_state()
        self._inside = False
        self.start(step=0, micro_batch=0)

    def start(self, step: int, micro_batch: int) -> None:
        """Re-seed both streams for one micro-batch.

        Args:
            step: The training step, counted from 0.
            micro_batch: The micro-batch's place in the global batch, counted over data-parallel ranks.
        """
        self._seed_with(step, micro_batch)
        self._place = (step, micro_batch)

    def start_layer(self, layer: int) -> None:
        """Re-seed both streams for one layer of the micro-batch that was started last.

        Args:
            layer: Its number in the whole model.
        """
        self._seed_with(*self._place, layer)

    def _seed_with(self, *place: int) -> None:
        self._generator.manual_seed(mix_seed(self.model_parallel_seed, *place))
        self._model_parallel_state = self._generator.get_state()
        self._generator.manual_seed(mix_seed(self.shared_seed, *place))

    @contextmanager
    def model_parallel(self) -> Iterator[None]:
        """Draw from this rank's own stream inside the `with` block; the shared stream stands still."""
        assert not self._inside, "the model-parallel stream is already in use"
        shared = self._generator.get_state()
        self._generator.set_state(self._model_parallel_state)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._model_parallel_state = self._generator.get_state()
            self._generator.set_state(shared)

    def states(self) -> StreamStates:
        """Return both states, so that a stretch of work can be replayed."""
        return StreamStates(self._generator.get_state(), self._model_parallel_state)

    @contextmanager
    def replaying(self, states: StreamStates) -> Iterator[None]:
        """Rewind both streams to `states` inside the `with` block and put them back afterwards."""
        now = self.states()
        self._restore(states)
        try:
            yield
        finally:
            self._restore(now)

    def _restore(self, states: StreamStates) -> None:
        self._generator.set_state(states.shared)
        self._model_parallel_state = states.model_parallel


def mix_seed(seed: int, *place: int) -> int:
    """Hash (seed, step, micro-batch, ..) to 63 bits: SplitMix64's finaliser (Steele et al. 2014) over each in turn."""
    mask = (1 << 64) - 1
    state = 0
    for value in (seed, *place):
        state = (state + value + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1
