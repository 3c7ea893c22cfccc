"""Flat gradients: one buffer that autograd writes into, reduced over data-parallel ranks in one collective.

Parameters are laid out with those split over the tensor axis first, the replicated ones after, and of these the ones
with partial gradients last; what another pipeline stage holds a copy of comes before all others. So each kind is one
contiguous stretch: the gradient norm needs a pass over each and the sums of partial and of copies' gradients one
message each, whatever the number of parameters.
"""

from __future__ import annotations

import torch

from megascale.parallel.context import Axis
from megascale.parallel.sharding import DeclaredParameter

# Each parameter starts at a multiple of this many elements, so that vectorised kernels see aligned memory at any dtype.
_ALIGNMENT = 64


class FlatBuffer:
    """One contiguous tensor with a view per parameter.

    Args:
        declared: The parameters, in model order; the buffer holds the shared ones first, then the split ones, those
            with partial gradients last.
        dtype: Of the buffer.
    """

    def __init__(self, declared: list[DeclaredParameter], dtype: torch.dtype) -> None:
        self.declared = sorted(declared, key=lambda d: (d.copies is None, not d.is_split, d.spec.gradient_is_partial))
        offsets, end, shared_end, split_end, whole_end = [], 0, 0, 0, 0
        for d in self.declared:
            offsets.append(end)
            end += -(-d.parameter.numel() // _ALIGNMENT) * _ALIGNMENT
            if d.copies is not None:
                assert d.is_split, f"{d.name}: of shared parameters, only split ones are summed right"
                shared_end = end
            if d.is_split:
                split_end = end
            if not d.spec.gradient_is_partial:
                whole_end = end
        device = self.declared[0].parameter.device
        self.flat = torch.zeros(end, dtype=dtype, device=device)
        self.shared, self.split = self.flat[:shared_end], self.flat[shared_end:split_end]
        self.replicated = self.flat[split_end:]
        self.partial = self.flat[whole_end:]
        self.views = [
            self.flat[offset : offset + d.parameter.numel()].view(d.parameter.shape)
            for offset, d in zip(offsets, self.declared, strict=True)
        ]


class GradientBuffer(FlatBuffer):
    """The gradients of a model; each parameter's `.grad` is a view, into which autograd accumulates."""

    def __init__(self, declared: list[DeclaredParameter], dtype: torch.dtype) -> None:
        super().__init__(declared, dtype)
        for d, view in zip(self.declared, self.views, strict=True):
            d.parameter.grad = view

    def zero_(self) -> None:
        self.flat.zero_()

    def all_reduce_(self, dp: Axis) -> None:
        """Sum the gradients over the data-parallel ranks: one collective per update, however many micro-batches."""
        for d, view in zip(self.declared, self.views, strict=True):
            assert d.parameter.grad is view, f"the gradient of {d.name} was replaced: zero it with GradientBuffer.zero_"
        dp.all_reduce_(self.flat)


def sum_partial_gradients(gradients: FlatBuffer, tp: Axis) -> None:
    """Make the gradients that are declared partial whole, on every tensor-parallel rank: one message per update."""
    if gradients.partial.numel():
        tp.all_reduce_(gradients.partial)


def sum_shared_gradients(gradients: FlatBuffer) -> None:
    """Add up the gradients of what several pipeline stages hold, on each of them: one message per update."""
    if gradients.shared.numel() and (copies := gradients.declared[0].copies) is not None:
        copies.all_reduce_(gradients.shared)


def global_norm(gradients: GradientBuffer, tp: Axis, pp: Axis | None = None) -> float:
    """Return the 2-norm of the whole model's gradient, the same on every rank that holds a part of it.

    Split parameters count on every tensor-parallel rank, replicated ones once, on rank 0; what several pipeline stages
    hold counts on the first of them. It is inf or nan on all ranks if any gradient on any of them is. Synchronises with
    the device.
    """
    # The other ranks' replicated gradients are read as well: 0 * inf is nan, so that no overflow goes unseen.
    counted = 1.0 if tp.rank == 0 else 0.0
    square = _squared_norm(gradients.split) + counted * _squared_norm(gradients.replicated)
    if gradients.shared.numel():
        square += (1.0 if gradients.declared[0].is_first_copy else 0.0) * _squared_norm(gradients.shared)
    tp.all_reduce_(square)
    if pp is not None:
        pp.all_reduce_(square)
    return square.sqrt().item()


def _squared_norm(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a stretch of a flat buffer, float64 scalar.

    By short rows, and those in float64: one float32 sum over 10^8 elements is 4% short on a CPU.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(x.view(-1, _ALIGNMENT), dim=-1, dtype=wide).double().square().sum()
