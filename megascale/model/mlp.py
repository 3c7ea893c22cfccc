"""The feed-forward block, its inner features split over the tensor axis (Shoeybi et al. 2019, section 3, figure 2a)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megascale.parallel.context import Axis
from megascale.parallel.layers import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """x [s, b, h] replicated -> [s, b, h] replicated, by h -> ffn, GeLU, ffn -> h.

    The first GEMM is split by columns, so that GeLU, which is not linear, sees whole sums; the second by rows.
    Communication: f before, g after, one all-reduce each way. GeLU is the tanh approximation that GPT-2 was trained
    with.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        init_std: float,
        output_init_std: float,
        axis: Axis,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, axis, init_std, dtype, device)
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, axis, output_init_std, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))
