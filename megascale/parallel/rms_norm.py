"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megascale.parallel.boundary import Boundary
from megascale.parallel.context import Axis
from megascale.parallel.sharding import Constant, ParallelModule, ParameterSpec


class RMSNorm(ParallelModule):
    """x / sqrt(mean of x^2 + epsilon) * weight over the last dim, outside the regions. x [.., h] -> [.., h].

    No mean is taken off and no bias added. Half-precision x is squared and averaged in float32.
    """

    weight: torch.Tensor

    def __init__(
        self,
        hidden_size: int,
        axis: Axis,
        epsilon: float,
        dtype: torch.dtype,
        device: torch.device,
        boundary: Boundary | None = None,
    ) -> None:
        super().__init__(axis)
        self.epsilon = epsilon
        is_partial = boundary is not None and boundary.gradient_is_partial
        self.declare("weight", ParameterSpec((hidden_size,), None, Constant(1.0), False, is_partial), dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
