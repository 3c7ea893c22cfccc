"""What an MLP does with its inner features, per rank and per feature: no communication.

Legend: f inner features, t tensor-parallel ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GeLU in the tanh approximation that GPT-2 was trained with. x [.., f/t] -> [.., f/t]."""
    return F.gelu(x, approximate="tanh")


def relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0), the original transformer's. x [.., f/t] -> [.., f/t]."""
    return F.relu(x)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * value (Shazeer 2020, arXiv:2002.05202). x [.., 2f/t], gates first -> [.., f/t]."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value
