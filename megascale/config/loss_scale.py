"""The constants of dynamic loss scaling in the systems that this project is built after."""

from dataclasses import replace
from typing import Any

from megascale.config.schema import TrainConfig

__all__ = ["LOSS_SCALE_FIELDS", "LOSS_SCALE_PRESETS", "fill_loss_scale"]

LOSS_SCALE_FIELDS = ("initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale")

# The values of LOSS_SCALE_FIELDS. megatron: Megatron-LM's FP16_Optimizer. fairseq: the trainer of v0.5.0, with which
# Ott et al. 2018 ran (section 3.1: the scale grows after 2,000 updates without overflow). transformer-xl: the fp16
# utilities of its training script, which starts at 2^16.
LOSS_SCALE_PRESETS: dict[str, tuple[float, int, int, float]] = {
    "megatron": (2.0**32, 1000, 2, 1.0),
    "fairseq": (2.0**7, 2000, 1, 1e-4),
    "transformer-xl": (2.0**16, 1000, 1, 1.0),
}


def fill_loss_scale(train: TrainConfig) -> TrainConfig:
    """Return `train` with the preset's constants where none are given; a run without a dynamic scale has none."""
    if not train.fp16 or train.loss_scale is not None:
        return train
    constants = zip(LOSS_SCALE_FIELDS, LOSS_SCALE_PRESETS[train.loss_scale_preset], strict=True)
    missing: dict[str, Any] = {name: value for name, value in constants if getattr(train, name) is None}
    return replace(train, **missing)
