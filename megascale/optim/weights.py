"""What the optimizer updates: the parameters themselves, or float32 masters of half-precision ones.

| run                  | parameters | updated         | bytes per parameter; with ZeRO over n ranks, / n what is in () |
|----------------------|------------|-----------------|----------------------------------------------------------------|
| float32              | float32    | the parameters  | 4 + 4 gradient + (8 moments)                                   |
| half, float32 sums   | half       | float32 masters | 2 + 4 gradient + (4 masters + 8 moments)                       |
| half                 | half       | float32 masters | 2 + 2 gradient + (4 gradient + 4 masters + 8 moments)          |
| pure fp16            | float16    | the parameters  | 2 + 2 gradient + (4 moments)                                   |
"""

from __future__ import annotations

from typing import Protocol

import torch

from megascale.optim.flat import FlatLayout, Shard
from megascale.optim.gradients import GradientBuffer


class FlatParameters:
    """One buffer that a model's parameters are moved into, turned to `dtype`."""

    def __init__(self, layout: FlatLayout, dtype: torch.dtype) -> None:
        self.flat = layout.zeros(dtype)
        for d, view in zip(layout.declared, layout.views(self.flat), strict=True):
            view.copy_(d.parameter.data)
            d.parameter.data = view


class UpdatedWeights(Protocol):
    """The tensors that the optimizer reads and writes, one for each piece of the rank's shard."""

    tensors: list[torch.Tensor]

    def attach(self, gradients: GradientBuffer) -> None:
        """Take the gradients from this buffer from now on."""

    def take_gradients(self, factor: float) -> None:
        """Set the `.grad` of all tensors to the model's gradients times `factor`."""

    def write_back(self) -> None:
        """Write the tensors into the model's parameters, as far as this rank updates them."""


class ParameterWeights:
    """The parameters themselves: nothing is copied."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.tensors = [p.declared.parameter if p.is_whole else p.of_parameter() for p in shard.pieces]

    def attach(self, gradients: GradientBuffer) -> None:
        self._gradients = self._shard.parts(gradients.flat)
        for piece, tensor, view in zip(
            self._shard.pieces, self.tensors, self._shard.views(gradients.flat), strict=True
        ):
            if not piece.is_whole:  # the gradient of a whole parameter is there already
                tensor.grad = view

    def take_gradients(self, factor: float) -> None:
        if factor != 1.0:
            for part in self._gradients:
                part.mul_(factor)

    def write_back(self) -> None:
        pass


class MasterWeights:
    """Float32 copies of the pieces that the rank updates; `write_back` rounds them into the model.

    Made while the parameters are still unrounded.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._own = shard.own_zeros(torch.float32)
        self.tensors = shard.own_views(self._own)
        for piece, master in zip(shard.pieces, self.tensors, strict=True):
            master.copy_(piece.of_parameter())

    def round_into(self, parameters: FlatParameters) -> None:
        """Write into these parameters from now on."""
        self._model = self._shard.parts(parameters.flat)

    def attach(self, gradients: GradientBuffer) -> None:
        self._sources = self._shard.parts(gradients.flat)
        if gradients.flat.dtype == torch.float32:
            self._gradients = self._sources
            views = self._shard.views(gradients.flat)
        else:
            own = self._shard.own_zeros(torch.float32)
            self._gradients = self._shard.own_parts(own)
            views = self._shard.own_views(own)
        for master, view in zip(self.tensors, views, strict=True):
            master.grad = view

    def take_gradients(self, factor: float) -> None:
        for target, source in zip(self._gradients, self._sources, strict=True):
            if target is not source:
                target.copy_(source)
            if factor != 1.0:
                target.mul_(factor)

    def write_back(self) -> None:
        for target, source in zip(self._model, self._shard.own_parts(self._own), strict=True):
            target.copy_(source)


def build_weights(
    shard: Shard, parameter_dtype: torch.dtype, has_masters: bool, is_sharded: bool
) -> tuple[UpdatedWeights, FlatParameters | None]:
    """Turn the model's parameters to their dtype; return what to update and, if there is one, their flat buffer."""
    masters = MasterWeights(shard) if has_masters else None
    rounded = parameter_dtype != shard.layout.declared[0].parameter.dtype
    parameters = FlatParameters(shard.layout, parameter_dtype) if rounded or is_sharded else None
    if masters is None:
        return ParameterWeights(shard), parameters
    assert parameters is not None, "masters are of half-precision parameters"
    masters.round_into(parameters)
    return masters, parameters
