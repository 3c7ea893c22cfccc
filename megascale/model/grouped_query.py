"""Grouped-query attention: groups of heads share one key and one value (Ainslie et al. 2023, arXiv:2305.13245).

Legend: s sequence, b batch, h hidden, a attention heads, g groups, d head dim (h/a), t tensor-parallel ranks.

With g = a this is multi-head attention, with g = 1 multi-query attention. Head k is of group k // (a/g).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megascale.model.attention import AttentionCore, CausalSelfAttention


class GroupedQueryCore(AttentionCore):
    """query [b, a/t, s, d], key and value [b, g/t, s, d] -> [b, a/t, s, d]."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=True)


class GroupedQueryAttention(CausalSelfAttention):
    """As `CausalSelfAttention`, with the fused projection's rows laid out [g, a/g + 2, d].

    That is, for each group, its queries, its key and its value; so that a rank's contiguous slice is whole groups at
    any t that divides g. With g = a it is the layout of multi-head attention.

    Args:
        num_local_groups: g/t.
    """

    def __init__(
        self,
        qkv: nn.Module,
        core: nn.Module,
        output: nn.Module,
        num_local_heads: int,
        num_local_groups: int,
        head_dim: int,
    ) -> None:
        super().__init__(qkv, core, output, num_local_heads, head_dim)
        self.num_local_groups = num_local_groups

    def heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return query [b, a/t, s, d], key and value [b, g/t, s, d] out of a rank's projection."""
        s, b, _ = qkv.shape
        queries = self.num_local_heads // self.num_local_groups
        groups = qkv.view(s, b, self.num_local_groups, queries + 2, self.head_dim)
        parts = groups.split((queries, 1, 1), dim=3)
        return tuple(part.flatten(2, 3).permute(1, 2, 0, 3) for part in parts)
