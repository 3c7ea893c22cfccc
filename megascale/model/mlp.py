"""The feed-forward block, its inner features split over the tensor axis (Shoeybi et al. 2019, section 3, figure 2a)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class MLP(nn.Module):
    """x [s, b, h] -> [s, b, h], outside the regions, by h -> ffn, the activation, ffn -> h.

    The first GEMM is split by columns, so that the activation, which is not linear, sees whole sums; the second by
    rows. Communication: entering before and leaving after (f and g: one all-reduce each way).

    Args:
        up: The column-parallel product (for a gated activation, `GatedColumnParallelLinear`).
        down: The row-parallel product.
        activation: What turns the outputs of `up` into the inputs of `down`; one of `model.activations`.
    """

    def __init__(self, up: nn.Module, down: nn.Module, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up = up
        self.down = down
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))
