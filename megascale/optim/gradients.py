"""Flat gradients: one buffer that autograd writes into, reduced over data-parallel ranks in one collective.

Parameters are laid out with those split over the tensor axis first and the replicated ones after, so that each kind is one
contiguous stretch: the gradient norm needs two passes, whatever the number of parameters.
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
        declared: The parameters, in model order; the buffer holds the split ones first.
        dtype: Of the buffer.
    """

    def __init__(self, declared: list[DeclaredParameter], dtype: torch.dtype) -> None:
        self.declared = sorted(declared, key=lambda d: not d.is_split)
        offsets, end, split_end = [], 0, 0
        for d in self.declared:
            offsets.append(end)
            end += -(-d.parameter.numel() // _ALIGNMENT) * _ALIGNMENT
            if d.is_split:
                split_end = end
        device = self.declared[0].parameter.device
        self.flat = torch.zeros(end, dtype=dtype, device=device)
        self.split, self.replicated = self.flat[:split_end], self.flat[split_end:]
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


def global_norm(gradients: GradientBuffer, tp: Axis) -> float:
    """Return the 2-norm of the whole model's gradient, the same on every tensor-parallel rank.

    Split parameters count on every rank, replicated ones once, on tensor-parallel rank 0. It is inf or nan on all ranks if any
    gradient on any of them is. Synchronises with the device.
    """
    wide = torch.float64 if gradients.flat.dtype == torch.float64 else torch.float32
    square = torch.linalg.vector_norm(gradients.split, dtype=wide).double().square()
    if tp.rank == 0:
        square += torch.linalg.vector_norm(gradients.replicated, dtype=wide).double().square()
    tp.all_reduce_(square)
    return square.sqrt().item()
