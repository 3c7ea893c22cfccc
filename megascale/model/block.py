"""One pre-norm transformer block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class TransformerBlock(nn.Module):
    """x [s, b, h] -> x + dropout(attention(norm(x))), then + dropout(mlp(norm(..))); all replicated over tp.

    Both dropouts lie outside the tensor-parallel regions and draw from the shared stream (torch's default generator).

    Args:
        attention, mlp: Modules [s, b, h] -> [s, b, h].
        attention_norm, mlp_norm: The normalisation before each.
        dropout: Probability of dropping an element of either branch.
    """

    def __init__(
        self, attention_norm: nn.Module, attention: nn.Module, mlp_norm: nn.Module, mlp: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attention(self.attention_norm(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)
