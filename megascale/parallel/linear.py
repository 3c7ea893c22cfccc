"""The column-parallel product together with its communication, so that one runs while the other computes.

Legend: s sequence, b batch, i input features, o output features, t tensor-parallel ranks.

Backward, in this order, with dy [s, b, o/t] each rank's own:

    copying_linear                                  gathering_linear (sequence parallel)
                                                    start  X = all-gather of the ranks' x
    dx = dy W                                       dX = dy W
    start  all-reduce of dx        |                start  dx = reduce-scatter of dX        |
    dW = dy^T x                    |  meanwhile     dW = dy^T X                             |  meanwhile
    wait                           |                wait                                    |

X is gathered while dX is computed, which does not need it. Without overlap each collective is waited for where it
starts, and the result is the same bit for bit. On CUDA "start" puts the collective into its own stream before the next
product is launched.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megascale.parallel.context import Axis, Pending


class _CopyingLinear(torch.autograd.Function):
    """y = x W^T + c with f folded into the backward pass. x [.., i] replicated -> y [.., o/t] split."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis = axis
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = gradients[0]
        dx, reducing = None, Pending()
        if ctx.needs_input_grad[0]:
            dx = (dy @ weight).contiguous()
            reducing = ctx.axis.start_all_reduce_(dx)
        weight_gradient, bias_gradient = _parameter_gradients(ctx, dy, x)
        reducing.wait()
        return dx, weight_gradient, bias_gradient, None


class _GatheringLinear(torch.autograd.Function):
    """y = X W^T + c, X the ranks' x joined. x [s/t, b, i] split on dim 0 -> y [s, b, o/t] split on the last dim."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis, overlap: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.overlap = axis, overlap
        return F.linear(axis.all_gather(x, 0), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        axis, dy = ctx.axis, gradients[0]
        joined = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
        gathering, scattering = Pending(), Pending()
        if ctx.needs_input_grad[1]:
            gathering = _begun(axis.start_all_gather(x.contiguous(), joined), ctx.overlap)
        dx = None
        if ctx.needs_input_grad[0]:
            # Kept in a variable until the wait: the collective reads it.
            joined_gradient = (dy @ weight).contiguous()
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            scattering = _begun(axis.start_reduce_scatter(joined_gradient, dx), ctx.overlap)
        gathering.wait()
        weight_gradient, bias_gradient = _parameter_gradients(ctx, dy, joined)
        scattering.wait()
        return dx, weight_gradient, bias_gradient, None, None


def copying_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis) -> torch.Tensor:
    """Return x W^T + c; the all-reduce of x's gradient runs while the weight's is computed.

    x [.., i] replicated, weight [o/t, i] and bias [o/t] split on dim 0 -> [.., o/t] split on the last dim
    """
    return _CopyingLinear.apply(x, weight, bias, axis)


def gathering_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis, overlap: bool
) -> torch.Tensor:
    """Return X W^T + c, X being the ranks' x joined on dim 0; only the rank's x is kept for the backward pass.

    x [s/t, b, i] split on dim 0, weight [o/t, i] and bias [o/t] split on dim 0 -> [s, b, o/t] split on the last dim

    Args:
        overlap: Whether the backward pass computes while it communicates.
    """
    return _GatheringLinear.apply(x, weight, bias, axis, overlap)


def _parameter_gradients(
    ctx: Any, dy: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return dW = dy^T x and dc = sum of dy over all but the last dim, as far as they are needed."""
    rows = dy.reshape(-1, dy.shape[-1])
    weight_gradient = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
    return weight_gradient, rows.sum(dim=0) if ctx.needs_input_grad[2] else None


def _begun(collective: Pending, overlap: bool) -> Pending:
    """Return the collective still under way, or, without overlap, done."""
    if overlap:
        return collective
    collective.wait()
    return Pending()
