"""A transformer block, with its norms before the branches or after the residual sums."""

from __future__ import annotations

import torch
from torch import nn


class TransformerBlock(nn.Module):
    """x [s, b, h] -> x + dropout(attention(norm(x))), then + dropout(mlp(norm(..))), all outside the parallel regions.

    Args:
        attention, mlp: Modules [s, b, h] -> [s, b, h].
        attention_norm, mlp_norm: The normalisation of each.
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


class PostNormBlock(TransformerBlock):
    """x [s, b, h] -> norm(x + dropout(attention(x))), then norm(.. + dropout(mlp(..))), all outside the regions.

    The original transformer's order (Vaswani et al. 2017, section 3.1). What leaves the last block is normed already.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))
