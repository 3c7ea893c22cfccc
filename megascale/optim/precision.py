"""Half-precision training: which numbers are kept in which type, and loss scaling for float16.

Ott et al. 2018, section 3.1; Megatron-LM's constants by default: see `config.loss_scale`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megascale.config.schema import TrainConfig


@dataclass(frozen=True)
class NumericTypes:
    """The element types of a run.

    Attributes:
        parameters: Of the model, in which it computes.
        gradients: In which gradients are added up over micro-batches.
        reduction: In which data-parallel ranks send each other their sums.
        has_masters: Whether the optimizer updates float32 copies of the parameters.
    """

    parameters: torch.dtype
    gradients: torch.dtype
    reduction: torch.dtype
    has_masters: bool

    @classmethod
    def of(cls, train: TrainConfig, full: torch.dtype) -> NumericTypes:
        """Return the types of a run whose model was built in `full`."""
        half = torch.float16 if train.fp16 else torch.bfloat16 if train.bf16 else None
        if half is None:
            return cls(full, full, full, False)
        gradients = torch.float32 if train.accumulate_allreduce_grads_in_fp32 else half
        reduction = {None: gradients, "float32": torch.float32, "half": half}[train.grad_reduce_dtype]
        return cls(half, gradients, reduction, not train.fp16_pure)


class LossScaler:
    """The factor on the loss that keeps float16 gradients in range; 1 and constant unless training in float16.

    Dynamic: an overflow uses up one unit of hysteresis and, once that is spent, divides the scale by 2 (not below the
    minimum); `window` steps in a row without an overflow multiply it by 2 and restore the hysteresis.

    Attributes:
        scale: The factor now, a power of two if it started as one.
    """

    FACTOR = 2.0

    def __init__(self, train: TrainConfig) -> None:
        self.dynamic = train.fp16 and train.loss_scale is None
        self.scale = train.loss_scale if train.fp16 and train.loss_scale is not None else 1.0
        # None unless the scale is dynamic.
        self._window, self._hysteresis = train.loss_scale_window or 0, train.hysteresis or 0
        self._minimum = train.min_loss_scale or 0.0
        self._clean_steps, self._tolerance = 0, self._hysteresis
        if self.dynamic:
            assert train.initial_loss_scale is not None, "the configuration is resolved"
            self.scale = train.initial_loss_scale

    def update(self, overflow: bool) -> None:
        """Take note of one step."""
        if not self.dynamic:
            return
        if overflow:
            self._clean_steps = 0
            self._tolerance -= 1
            if self._tolerance <= 0:
                self.scale = max(self.scale / self.FACTOR, self._minimum)
        else:
            self._clean_steps += 1
            if self._clean_steps % self._window == 0:
                self.scale *= self.FACTOR
                self._tolerance = self._hysteresis

    @property
    def exhausted(self) -> bool:
        """Whether the scale is at its minimum with no tolerance left: another overflow means the run diverges."""
        return self.dynamic and self.scale <= self._minimum and self._tolerance <= 0

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "clean_steps": self._clean_steps, "tolerance": self._tolerance}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore a saved state; a constant scale stays what the configuration says."""
        if self.dynamic:
            self.scale = float(state["scale"])
            self._clean_steps, self._tolerance = int(state["clean_steps"]), int(state["tolerance"])
