"""The boundary of the tensor-parallel regions: how activations cross it, and how they lie outside.

A region is what happens between a column-parallel and a row-parallel product; norms, dropout, residual sums and the
embeddings lie outside. Two boundaries, chosen once when a model is built:

| boundary | outside                        | enter (forward / backward)   | leave (forward / backward)   |
|----------|--------------------------------|------------------------------|------------------------------|
| replicated | [s, b, h] on every rank      | f: identity / all-reduce     | g: all-reduce / identity     |
| sequence   | [s/t, b, h], split on s      | all-gather / reduce-scatter  | reduce-scatter / all-gather  |

The second is sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). An all-reduce is a
reduce-scatter followed by an all-gather, so it moves the same bytes, but what lies outside is 1/t of the work and of
the memory. The product that enters a region keeps its input's slice only and gathers it again in its backward pass.

What a rank computes outside from its own tokens gives replicated parameters only a part of their gradient: they are
declared so (`gradient_is_partial`), and their gradients are summed over the ranks once per update.

Legend: s sequence, b batch, h hidden, t tensor-parallel ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megascale.config.schema import ParallelConfig
from megascale.parallel.collectives import copy_to_ranks, gather_sequence, reduce_from_ranks, reduce_scatter_sequence
from megascale.parallel.context import Axis
from megascale.parallel.linear import copying_linear, gathering_linear
from megascale.parallel.random import RandomStreams


class Boundary:
    """Activations outside are replicated: [s, b, h] on every rank.

    Args:
        axis: The tensor axis.
        overlap: Whether the gradient of an entering product's input is reduced while its weight's is computed.
    """

    # Whether a replicated parameter that is used outside gets only this rank's part of its gradient.
    gradient_is_partial = False

    def __init__(self, axis: Axis, overlap: bool = False) -> None:
        self.axis, self.overlap = axis, overlap

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Take x from outside into a region. -> [s, b, h] replicated; the ranks' gradients are summed."""
        return copy_to_ranks(x, self.axis)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x [s, b, h], a part per rank, and let it lie as things lie outside."""
        return reduce_from_ranks(x, self.axis)

    def enter_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return enter(x) weight^T + bias. weight [o/t, h], bias [o/t] split on dim 0 -> [s, b, o/t] split."""
        if self.overlap and self.axis.size > 1:
            return copying_linear(x, weight, bias, self.axis)
        return F.linear(self.enter(x), weight, bias)

    def local_length(self, num_positions: int) -> int:
        """Return how many of a sequence's positions a rank has outside.

        Raises:
            ValueError: They cannot be split evenly.
        """
        return num_positions

    def outside(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of a replicated x [s, ..] that this rank has outside, as a view."""
        return x

    def dropout(self, probability: float) -> nn.Module:
        """Return a dropout for use outside: here all ranks drop the same elements."""
        return Dropout(probability)


class SequenceBoundary(Boundary):
    """Activations outside are split on the sequence: [s/t, b, h], each rank its own stretch of tokens.

    Args:
        streams: Dropout outside draws from the rank's own stream, since each rank has other elements.
    """

    gradient_is_partial = True

    def __init__(self, axis: Axis, streams: RandomStreams, overlap: bool = False) -> None:
        super().__init__(axis, overlap)
        self._streams = streams

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return gather_sequence(x, self.axis)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_sequence(x, self.axis)

    def enter_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return gathering_linear(x, weight, bias, self.axis, self.overlap)

    def local_length(self, num_positions: int) -> int:
        if num_positions % self.axis.size:
            raise ValueError(
                f"a sequence of {num_positions} tokens cannot be split over the {self.axis.size} ranks of "
                f"--tensor-model-parallel-size by --sequence-parallel"
            )
        return num_positions // self.axis.size

    def outside(self, x: torch.Tensor) -> torch.Tensor:
        self.local_length(x.shape[0])
        return self.axis.shard(x, 0)

    def dropout(self, probability: float) -> nn.Module:
        return OwnStreamDropout(probability, self._streams)


def build_boundary(axis: Axis, streams: RandomStreams, parallel: ParallelConfig) -> Boundary:
    """Return the boundary that a run asks for; on an axis of size 1 there is nothing to split."""
    overlap = parallel.async_tensor_model_parallel_allreduce
    if parallel.sequence_parallel and axis.size > 1:
        return SequenceBoundary(axis, streams, overlap)
    return Boundary(axis, overlap)


class Dropout(nn.Module):
    """Drop elements of x [..] by the shared stream (torch's default generator): the same on all tensor ranks."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.probability, self.training)


class OwnStreamDropout(Dropout):
    """Drop elements of x [..] by the rank's own stream."""

    def __init__(self, probability: float, streams: RandomStreams) -> None:
        super().__init__(probability)
        self._streams = streams

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.probability == 0.0:
            return x
        with self._streams.model_parallel():
            return F.dropout(x, self.probability, training=True)
