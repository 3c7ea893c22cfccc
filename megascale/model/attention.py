"""Causal self-attention with its heads split over the tensor axis (Shoeybi et al. 2019, section 3, figure 2b).

Legend: s sequence, b batch, h hidden, a attention heads, d head dim (h/a), t tensor-parallel ranks.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from megascale.parallel.random import RandomStreams


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
            return self.attend(query, key, value, dropout)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
        """Return the heads' values, averaged by softmax(query key^T / sqrt(d)) over the positions up to each."""
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)


class CausalSelfAttention(nn.Module):
    """x [s, b, h] -> [s, b, h], outside the regions; inside, each rank computes a/t whole heads on its own.

    The fused projection's rows are laid out [a, 3, d], so that a rank's contiguous slice is whole heads (query, key and
    value) at any t. Communication: entering before the projection and leaving after the output (f and g: one all-reduce
    each way).

    Args:
        qkv: The column-parallel projection to queries, keys and values.
        core: What happens between the projections: query, key, value -> [b, a/t, s, d].
        output: The row-parallel projection back to h.
        num_local_heads, head_dim: a/t and d.
    """

    def __init__(self, qkv: nn.Module, core: nn.Module, output: nn.Module, num_local_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_local_heads = num_local_heads
        self.head_dim = head_dim
        self.qkv = qkv
        self.core = core
        self.output = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.heads(self.qkv(x))
        context = self.core(query, key, value).permute(2, 0, 1, 3)
        return self.output(context.reshape(*context.shape[:2], self.num_local_heads * self.head_dim))

    def heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return query, key and value [b, a/t, s, d] out of a rank's projection [s, b, 3 h/t]."""
        s, b, _ = qkv.shape
        qkv = qkv.view(s, b, self.num_local_heads, 3, self.head_dim)
        return tuple(part.permute(1, 2, 0, 3) for part in qkv.unbind(dim=3))
