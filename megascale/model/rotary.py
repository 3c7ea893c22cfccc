"""Rotary positions (Su et al. 2021, arXiv:2104.09864): queries and keys are turned by angles that grow with position.

Legend: s sequence, b batch, a attention heads, d head dim, t tensor-parallel ranks.

Features i and i + d/2 of a head are the two coordinates of a plane, turned at position p by p * base^(-2i/d), so that
query times key depends on the distance of their positions alone. Pairs lie d/2 apart, as in Llama checkpoints in
Hugging Face's format, not side by side as in the paper: the two differ by the order of a head's features.
"""

from __future__ import annotations

import torch
from torch import nn


class Rotary(nn.Module):
    """Turn queries or keys by their positions 0 .. s-1. x [.., s, d] -> [.., s, d].

    Inside a tensor-parallel region a rank has the whole sequence, also with the sequence split outside.

    Args:
        head_dim: d, even.
        num_positions: The longest s.
        base: Of the wavelengths, which go from 2 pi to 2 pi * base tokens.
        dtype: Of the model. Tables are float32 or wider, and half-precision x is turned in float32.
    """

    cosines: torch.Tensor
    sines: torch.Tensor

    def __init__(
        self, head_dim: int, num_positions: int, base: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary positions turn pairs of features, but a head has {head_dim} of them")
        # In float64 until the end: p * frequency is off by whole radians of rounding in half precision.
        frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float64, device=device), frequencies)
        table_dtype = torch.promote_types(dtype, torch.float32)
        # Not persistent: a function of the configuration, in no checkpoint.
        self.register_buffer("cosines", angles.cos().to(table_dtype), persistent=False)
        self.register_buffer("sines", angles.sin().to(table_dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cosines, sines = self.cosines[: x.shape[-2]], self.sines[: x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
        return turned.to(x.dtype)


class RotaryCore(nn.Module):
    """An attention core whose queries and keys are turned first. query [b, a/t, s, d] and so on -> [b, a/t, s, d]."""

    def __init__(self, rotary: Rotary, core: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self.core = core

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.core(self.rotary(query), self.rotary(key), value)
