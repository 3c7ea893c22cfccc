"""The two column-parallel products of a gated MLP as one.

Legend: i input features, f inner features, t tensor-parallel ranks.
"""

from __future__ import annotations

import torch

from megascale.parallel.boundary import Boundary
from megascale.parallel.context import Axis
from megascale.parallel.sharding import Constant, Normal, ParallelModule, ParameterSpec


class GatedColumnParallelLinear(ParallelModule):
    """Two products of one input, each with its inner features split over the axis alike.

    x [.., i] replicated -> [.., 2f/t] split: this rank's f/t gate features, then its f/t features to be gated.
    The weight is declared as [2, f, i] (0 the gate, 1 what it gates) and split on f, so that a rank's slice is the
    same features of both at any t, and lies in memory as one [2f/t, i] matrix: one GEMM and one f.

    Args:
        num_inputs, num_outputs: i and f, global.
        init_std: Standard deviation of both initial weights; biases start at 0.
        boundary: How activations enter; None: replicated ones, without overlap.
        bias: Whether there is one, [2, f].

    Raises:
        ValueError: f does not divide by the axis.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        axis: Axis,
        init_std: float,
        dtype: torch.dtype,
        device: torch.device,
        boundary: Boundary | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(axis)
        self.boundary = boundary or Boundary(axis)
        self.declare("weight", ParameterSpec((2, num_outputs, num_inputs), 1, Normal(init_std), True), dtype, device)
        if bias:
            self.declare("bias", ParameterSpec((2, num_outputs), 1, Constant(0.0), False), dtype, device)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias.flatten() if self.bias is not None else None
        return self.boundary.enter_linear(x, self.weight.flatten(0, 1), bias)
