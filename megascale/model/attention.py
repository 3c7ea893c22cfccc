"""Causal self-attention with its heads split over the tensor axis (Shoeybi et al. 2019, section 3, figure 2b).

Legend: s sequence, b batch, h hidden, a attention heads, d head dim (h/a), t tensor-parallel ranks.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from megascale.parallel.context import Axis
from megascale.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megascale.parallel.random import RandomStreams


class CausalSelfAttention(nn.Module):
    """x [s, b, h] replicated -> [s, b, h] replicated; inside, each rank computes a/t whole heads on its own.

    The fused projection's rows are laid out [a, 3, d], so that a rank's contiguous slice is whole heads (query, key and
    value) at any t. Communication: f before the projection and g after the output, one all-reduce each way.

    Args:
        dropout: Probability of dropping an attention weight, drawn from the rank's own stream.
        init_std, output_init_std: Standard deviations of the projection's and the output's initial weights.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        dropout: float,
        init_std: float,
        output_init_std: float,
        axis: Axis,
        streams: RandomStreams,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads or num_heads % axis.size:
            raise ValueError(
                f"hidden size {hidden_size} must divide into {num_heads} heads, and those over {axis.size} ranks"
            )
        self.head_dim = hidden_size // num_heads
        self.num_local_heads = num_heads // axis.size
        self.dropout = dropout
        self.streams = streams
        self.qkv = ColumnParallelLinear(hidden_size, 3 * hidden_size, axis, init_std, dtype, device)
        self.output = RowParallelLinear(hidden_size, hidden_size, axis, output_init_std, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s, b, _ = x.shape
        qkv = self.qkv(x).view(s, b, self.num_local_heads, 3, self.head_dim)
        # [s, b, a/t, d] -> [b, a/t, s, d]
        query, key, value = (part.permute(1, 2, 0, 3) for part in qkv.unbind(dim=3))
        dropout = self.dropout if self.training else 0.0
        with self.streams.model_parallel() if dropout else nullcontext():
            context = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.output(context.permute(2, 0, 1, 3).reshape(s, b, self.num_local_heads * self.head_dim))
