"""Causal self-attention with its heads split over the tensor axis (Shoeybi et al. 2019, section 3, figure 2b).

Legend: s sequence, b batch, h hidden, a attention heads, d head dim (h/a), t tensor-parallel ranks.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from megascale.parallel.boundary import Boundary
from megascale.parallel.context import Axis
from megascale.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megascale.parallel.random import RandomStreams
from megascale.parallel.recompute import Recomputed


class AttentionCore(nn.Module):
    """Causal attention of a rank's own heads: query, key, value [b, a/t, s, d] -> [b, a/t, s, d].

    It has no parameters and does not communicate. What it saves grows with s^2 where no fused kernel does it.
    """

    def __init__(self, dropout: float, streams: RandomStreams) -> None:
        super().__init__()
        self.dropout = dropout
        self.streams = streams

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        with self.streams.model_parallel() if dropout else nullcontext():
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)


class CausalSelfAttention(nn.Module):
    """x [s, b, h] -> [s, b, h], outside the regions; inside, each rank computes a/t whole heads on its own.

    The fused projection's rows are laid out [a, 3, d], so that a rank's contiguous slice is whole heads (query, key and
    value) at any t. Communication: entering before the projection and leaving after the output (f and g: one all-reduce
    each way).

    Args:
        dropout: Probability of dropping an attention weight, drawn from the rank's own stream.
        boundary: How activations enter and leave; None: replicated ones.
        recompute_core: Whether what the core saves is recomputed in the backward pass.
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
        boundary: Boundary | None = None,
        recompute_core: bool = False,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads or num_heads % axis.size:
            raise ValueError(
                f"hidden size {hidden_size} must divide into {num_heads} heads, and those over {axis.size} ranks"
            )
        self.head_dim = hidden_size // num_heads
        self.num_local_heads = num_heads // axis.size
        self.qkv = ColumnParallelLinear(hidden_size, 3 * hidden_size, axis, init_std, dtype, device, boundary)
        core = AttentionCore(dropout, streams)
        self.core: nn.Module = Recomputed(core, streams) if recompute_core else core
        self.output = RowParallelLinear(hidden_size, hidden_size, axis, output_init_std, dtype, device, boundary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)
        s, b, _ = qkv.shape
        qkv = qkv.view(s, b, self.num_local_heads, 3, self.head_dim)
        # [s, b, a/t, d] -> [b, a/t, s, d]
        query, key, value = (part.permute(1, 2, 0, 3) for part in qkv.unbind(dim=3))
        context = self.core(query, key, value)
        return self.output(context.permute(2, 0, 1, 3).reshape(s, b, self.num_local_heads * self.head_dim))
