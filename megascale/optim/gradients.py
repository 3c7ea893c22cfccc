"""Flat gradients: one buffer that backward passes add to, and the norm of the whole model's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megascale.optim.flat import ROW, FlatLayout, Shard
from megascale.parallel.context import Axis
from megascale.parallel.sharding import DeclaredParameter


class GradientBuffer:
    """The gradients of a model in its own precision: each `.grad` is a view, into which autograd accumulates.

    Attributes:
        flat: The buffer; `views` are its parts in the order of `declared`.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype) -> None:
        self.layout, self.declared = layout, layout.declared
        self.flat = layout.zeros(dtype)
        self.views = layout.views(self.flat)
        self._attach()

    def _attach(self) -> None:
        for d, view in zip(self.declared, self.views, strict=True):
            d.parameter.grad = view

    def zero_(self) -> None:
        self.flat.zero_()

    def require_in_place(self) -> None:
        """Check that nobody put other gradients in place of the buffer's."""
        for d, view in zip(self.declared, self.views, strict=True):
            assert d.parameter.grad is view, f"the gradient of {d.name} was replaced: zero it with GradientBuffer.zero_"


class WideGradientBuffer(GradientBuffer):
    """The gradients of a half-precision model added up in float32: each is moved here as soon as autograd made it.

    In bfloat16 the sum of 512 equal gradients is 256 of them: from there on adding one more changes nothing.
    """

    def _attach(self) -> None:
        for d, view in zip(self.declared, self.views, strict=True):
            d.parameter.register_post_accumulate_grad_hook(partial(_move, view))

    def require_in_place(self) -> None:
        for d in self.declared:
            assert d.parameter.grad is None, f"{d.name} has a gradient that no backward pass moved to the float32 sum"


def _move(total: torch.Tensor, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    total.add_(parameter.grad)
    parameter.grad = None


def build_gradients(layout: FlatLayout, dtype: torch.dtype) -> GradientBuffer:
    """Return a buffer of `dtype` for parameters of that dtype or, in float32, of half precision."""
    wide = layout.declared[0].parameter.dtype != dtype
    return WideGradientBuffer(layout, dtype) if wide else GradientBuffer(layout, dtype)


def sum_partial_gradients(gradients: GradientBuffer, tp: Axis) -> None:
    """Make the gradients that are declared partial whole, on every tensor-parallel rank: one message per update."""
    stretch = gradients.layout.partial
    if stretch.start < stretch.stop:
        tp.all_reduce_(gradients.flat[stretch])


def sum_shared_gradients(gradients: GradientBuffer, shard: Shard) -> None:
    """Add up the gradients of what several pipeline stages hold, on each of them, as far as the rank updates them.

    After the data-parallel sum, whose order of additions depends on where in the buffer a gradient lies, and that is
    not the same on two stages: this sum of two has one order only, and copies stay equal bit for bit.
    """
    shared = gradients.layout.shared
    for stretch in shard.stretches:
        start, stop = max(stretch.start, shared.start), min(stretch.stop, shared.stop)
        if start < stop:
            (copies,) = {d.copies for d in gradients.declared if d.copies is not None}
            copies.all_reduce_(gradients.flat[start:stop])


class GradientNorm:
    """The 2-norm of the whole model's gradient, the same on every rank.

    Args:
        shard: Which elements this rank has summed gradients of.
        counts: Whether a parameter counts on this rank: of those that several ranks hold, exactly one must.
        axes: What to sum over.
    """

    def __init__(self, shard: Shard, counts: Callable[[DeclaredParameter], bool], axes: Sequence[Axis]) -> None:
        self._shard, self._axes = shard, list(axes)
        counted = shard.layout.rows(counts)
        self._counted = [counted[s.start // ROW : s.stop // ROW] for s in shard.stretches]

    def __call__(self, flat: torch.Tensor) -> float:
        """Return the norm of a flat buffer: inf or nan on all ranks if any element on any of them is.

        Synchronises with the device.
        """
        square = torch.zeros((), dtype=torch.float64, device=flat.device)
        for part, counted in zip(self._shard.parts(flat), self._counted, strict=True):
            # What does not count is read as well: 0 * inf is nan, so that no overflow goes unseen.
            square += (_squared_row_norms(part) * counted).sum()
        for axis in self._axes:
            axis.all_reduce_(square)
        return square.sqrt().item()


def _squared_row_norms(x: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares of the rows of a stretch of a flat buffer, float64 [rows].

    By short rows, and those in float64: one float32 sum over 10^8 elements is 4% short on a CPU.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(x.view(-1, ROW), dim=-1, dtype=wide).double().square()
