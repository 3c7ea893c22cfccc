"""The conjugate pairs of tensor parallelism: each op is communication in one direction and its transpose in the other.

| op                   | forward                          | backward                         |
|----------------------|----------------------------------|----------------------------------|
| copy_to_ranks (f)    | identity                         | all-reduce of the gradient       |
| reduce_from_ranks (g)| all-reduce                       | identity                         |
| scatter_to_ranks     | keep this rank's slice of `dim`  | all-gather the gradient's slices |
| gather_from_ranks    | all-gather the slices of `dim`   | keep this rank's slice           |
| gather_sequence      | all-gather the slices of dim 0   | reduce-scatter of the gradient   |
| reduce_scatter_sequence | reduce-scatter on dim 0       | all-gather the gradient's slices |

The last pair is f and g for activations split on the sequence (Korthikanti et al. 2022, section 4.2.2, g and g-bar):
gather_sequence is followed by different work on each rank, so its transpose sums the ranks' gradients, where that of
gather_from_ranks, followed by the same work on all, does not.

f and g are Shoeybi et al. 2019, section 3 and figure 3. f is linear, x -> (x, .., x): its transpose sums the ranks'
gradients. g is the transpose of f. All are out of place: an in-place all-reduce would change a tensor that the producer
saved for its own backward pass, and double its gradient.

Legend: tp ranks hold either the same tensor ("replicated") or a slice each ("split on dim d").
"""

from __future__ import annotations

from typing import Any

import torch

from megascale.parallel.context import Axis


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.axis.all_reduce(gradients[0]), None


class _ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return axis.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _ScatterToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.shard(x, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.axis.all_gather(gradients[0], ctx.dim), None, None


class _GatherFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.axis.shard(gradients[0], ctx.dim).contiguous(), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return axis.all_gather(x, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.axis.reduce_scatter(gradients[0]), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return axis.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.axis.all_gather(gradients[0], 0), None


def copy_to_ranks(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """f: enter a parallel region. x [..] replicated -> the same; the ranks' gradients are summed on the way back."""
    return x if axis.size == 1 else _CopyToRanks.apply(x, axis)


def reduce_from_ranks(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """g: leave a parallel region. x [..] a partial sum per rank -> the sum, replicated; the gradient passes through."""
    return x if axis.size == 1 else _ReduceFromRanks.apply(x, axis)


def scatter_to_ranks(x: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    """x [.., n, ..] replicated -> [.., n/size, ..] split on `dim`.

    Raises:
        ValueError: `dim` does not divide by the axis.
    """
    _check_divides(x, axis, dim)
    return x if axis.size == 1 else _ScatterToRanks.apply(x, axis, dim)


def gather_from_ranks(x: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    """x [.., n, ..] split on `dim` -> [.., n*size, ..] replicated."""
    return x if axis.size == 1 else _GatherFromRanks.apply(x, axis, dim)


def gather_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """x [n, ..] split on dim 0 -> [n*size, ..] replicated; the ranks' gradients are summed and split again."""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)


def reduce_scatter_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """x [n, ..] a partial sum per rank -> [n/size, ..] the sum, split on dim 0; the gradient is gathered.

    Raises:
        ValueError: dim 0 does not divide by the axis.
    """
    _check_divides(x, axis, 0)
    return x if axis.size == 1 else _ReduceScatterSequence.apply(x, axis)


def _check_divides(x: torch.Tensor, axis: Axis, dim: int) -> None:
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"dim {dim} of size {x.shape[dim]} does not divide over the {axis.size} ranks of axis {axis.name}"
        )
