"""One pre-norm transformer block."""

from __future__ import annotations

import torch
from torch import nn


class TransformerBlock(nn.Module):
    """x [s, b, h] -> x + dropout(attention(norm(x))), then + dropout(mlp(norm(..))), all outside the parallel regions.

    Args:
        attention, mlp: Modules [s, b, h] -> [s, b, h].
        attention_norm, mlp_norm: The normalisation before each.
        dropout: Of the elements of either branch (`Boundary.dropout`).
    """

    def __init__(
        self, attention_norm: nn.Module, attention: nn.Module, mlp_norm: nn.Module, mlp: nn.Module, dropout: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))
