"""Tensor-parallel linear layers, embeddings and norm (Shoeybi et al. 2019, section 3).

Legend: s sequence, b batch, i input features, o output features, v padded vocabulary, h hidden, t tensor-parallel
ranks.

| layer                  | weight per rank   | input               | output                | communication           |
|------------------------|-------------------|---------------------|-----------------------|-------------------------|
| ColumnParallelLinear   | [o/t, i]          | [.., i] replicated  | [.., o/t] split       | backward: 1 all-reduce  |
| RowParallelLinear      | [o, i/t]          | [.., i/t] split     | [.., o] replicated    | forward: 1 all-reduce   |
| VocabParallelEmbedding | [v/t, h]          | [s, b] replicated   | [s, b, h] replicated  | forward: 1 all-reduce   |
| LayerNorm              | [h] replicated    | [.., h] replicated  | [.., h] replicated    | none                    |

That is with the plain boundary. Every layer can be told another (see `parallel.boundary`): with the sequence split,
"replicated" activations are [s/t, b, ..] and each all-reduce is a reduce-scatter and an all-gather.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megascale.parallel.boundary import Boundary
from megascale.parallel.context import Axis
from megascale.parallel.sharding import Constant, Normal, ParallelModule, ParameterSpec


class ColumnParallelLinear(ParallelModule):
    """y = x W^T + c with W's rows, and so y's features, split over the axis.

    x [.., i] replicated -> y [.., o/t] split on the last dim.
    Forward: y_r = x W_r^T + c_r, no communication. Backward: dx = sum over r of dy_r W_r (the all-reduce of f);
    dW_r = dy_r^T x and dc_r = sum of dy_r stay on the rank.

    Args:
        num_inputs, num_outputs: i and o, global.
        axis: The tensor axis.
        init_std: Standard deviation of the initial weight; the bias starts at 0.
        boundary: How activations enter and leave; None: replicated ones, without overlap.
        bias: Whether there is a c.

    Raises:
        ValueError: o does not divide by the axis.
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
        self.declare("weight", ParameterSpec((num_outputs, num_inputs), 0, Normal(init_std), True), dtype, device)
        if bias:
            self.declare("bias", ParameterSpec((num_outputs,), 0, Constant(0.0), False), dtype, device)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.boundary.enter_linear(x, self.weight, self.bias)


class RowParallelLinear(ParallelModule):
    """y = x W^T + c with W's columns, and so x's features, split over the axis.

    x [.., i/t] split on the last dim -> y [.., o] replicated.
    Forward: y = (sum over r of x_r W_r^T) + c, the all-reduce of g; the bias is replicated and added once, after it.
    Backward: dx_r = dy W_r and dW_r = dy^T x_r stay on the rank.

    Args and errors as for ColumnParallelLinear, with i in place of o.
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
        self.declare("weight", ParameterSpec((num_outputs, num_inputs), 1, Normal(init_std), True), dtype, device)
        if bias:
            spec = ParameterSpec((num_outputs,), None, Constant(0.0), False, self.boundary.gradient_is_partial)
            self.declare("bias", spec, dtype, device)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.axis.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = self.boundary.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(ParallelModule):
    """Look tokens up in a table whose rows are split over the axis.

    tokens [s, b] replicated -> [s, b, h] replicated. A rank looks up the tokens of its own rows, gives zeros for the
    others, and g adds the ranks' results. Backward: each rank scatters the gradient into its own rows.
    """

    weight: torch.Tensor

    def __init__(
        self,
        num_rows: int,
        hidden_size: int,
        axis: Axis,
        init_std: float,
        dtype: torch.dtype,
        device: torch.device,
        boundary: Boundary | None = None,
    ) -> None:
        super().__init__(axis)
        self.boundary = boundary or Boundary(axis)
        self.declare("weight", ParameterSpec((num_rows, hidden_size), 0, Normal(init_std), True), dtype, device)

    @property
    def first_row(self) -> int:
        """The first row of the table that this rank holds."""
        return self.axis.rank * self.weight.shape[0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.axis.size == 1:
            return F.embedding(tokens, self.weight)
        row = tokens - self.first_row
        elsewhere = (row < 0) | (row >= self.weight.shape[0])
        found = F.embedding(row.masked_fill(elsewhere, 0), self.weight)
        return self.boundary.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class VocabParallelHead(ParallelModule):
    """The weight of an output layer that is not the word embedding's, its rows split over the axis.

    It is only held here: the product with it is fused with the loss (`cross_entropy.linear_cross_entropy`).
    """

    weight: torch.Tensor

    def __init__(
        self, num_rows: int, hidden_size: int, axis: Axis, init_std: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(axis)
        self.declare("weight", ParameterSpec((num_rows, hidden_size), 0, Normal(init_std), True), dtype, device)


class PositionEmbedding(ParallelModule):
    """Learned absolute positions, replicated. s -> rows 0 .. s-1 as [s, 1, h], to be added to [s, b, h]."""

    weight: torch.Tensor

    def __init__(
        self,
        num_positions: int,
        hidden_size: int,
        axis: Axis,
        init_std: float,
        dtype: torch.dtype,
        device: torch.device,
        boundary: Boundary | None = None,
    ) -> None:
        super().__init__(axis)
        self.boundary = boundary or Boundary(axis)
        shape = (num_positions, hidden_size)
        spec = ParameterSpec(shape, None, Normal(init_std), True, self.boundary.gradient_is_partial)
        self.declare("weight", spec, dtype, device)

    def forward(self, num_positions: int) -> torch.Tensor:
        return self.boundary.outside(self.weight[:num_positions]).unsqueeze(1)


class LayerNorm(ParallelModule):
    """Layer normalisation over the last dim of what lies outside the regions. x [.., h] -> [.., h]."""

    weight: torch.Tensor
    bias: torch.Tensor

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
        self.declare("bias", ParameterSpec((hidden_size,), None, Constant(0.0), False, is_partial), dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
