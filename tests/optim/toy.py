"""A model of a few declared weights, and a configuration for its optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megascale.config.loss_scale import fill_loss_scale
from megascale.config.schema import OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig, TrainConfig
from megascale.parallel.context import Axis
from megascale.parallel.sharding import Constant, Normal, ParallelModule, ParameterSpec


class Toy(ParallelModule):
    """Two split weights and two replicated ones; one of each is decayed."""

    def __init__(self, axis: Axis, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(axis)
        device = torch.device("cpu")
        self.declare("norm", ParameterSpec((5,), None, Constant(1.0), False), dtype, device)
        self.declare("rows", ParameterSpec((8, 6), 0, Normal(0.5), True), dtype, device)
        self.declare("positions", ParameterSpec((7, 3), None, Normal(0.5), True), dtype, device)
        self.declare("bias", ParameterSpec((4,), 0, Constant(1.0), False), dtype, device)


def toy_config(**changes: Any) -> RunConfig:
    """Return a configuration with a constant learning rate of 1e-3, no clipping and no decay, but for `changes`."""
    config = RunConfig(
        optimizer=OptimizerConfig(clip_grad=0.0, weight_decay=0.0),
        schedule=ScheduleConfig(lr=1e-3, min_lr=0.0, lr_decay_style="constant", lr_decay_iters=100),
    )
    sections: dict[str, Any] = {
        "optimizer": OptimizerConfig,
        "schedule": ScheduleConfig,
        "train": TrainConfig,
        "parallel": ParallelConfig,
    }
    for section, section_type in sections.items():
        names = section_type.__dataclass_fields__.keys() & changes.keys()
        chosen = {name: changes.pop(name) for name in names}
        config = replace(config, **{section: replace(getattr(config, section), **chosen)})
    config = replace(config, train=fill_loss_scale(config.train))
    assert not changes, f"no such options: {sorted(changes)}"
    return config


def set_gradients(model: Toy, values: dict[str, torch.Tensor]) -> None:
    """Write this rank's part of global gradients into the model's."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        spec, axis = model.parameter_specs[name], model.axis
        piece = values[name] if spec.split_dim is None else axis.shard(values[name], spec.split_dim)
        parameter.grad.copy_(piece)


def random_gradients(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return a global gradient for each weight of `Toy`, float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"norm": (5,), "rows": (8, 6), "positions": (7, 3), "bias": (4,)}
    return {
        name: scale * torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()
    }
