"""Half-precision training: float32 master weights, and loss scaling for float16.

Ott et al. 2018, section 3.1; Megatron-LM's constants by default (initial scale 2^32, window 1000, hysteresis 2).
"""

from __future__ import annotations

import torch

from megascale.config.schema import TrainConfig
from megascale.optim.gradients import FlatBuffer
from megascale.parallel.sharding import DeclaredParameter


class MasterWeights(FlatBuffer):
    """Float32 copies of the parameters, which are turned to half precision.

    The optimizer updates the copies; `write_back` rounds them into the model. `gradients` are float32 views that the
    optimizer reads, filled by `take_gradients`.
    """

    def __init__(self, declared: list[DeclaredParameter], half: torch.dtype) -> None:
        super().__init__(declared, torch.float32)
        self._gradients = FlatBuffer(declared, torch.float32)
        self._model = FlatBuffer(declared, half)
        for d, master, gradient, view in zip(
            self.declared, self.views, self._gradients.views, self._model.views, strict=True
        ):
            master.copy_(d.parameter.data)
            master.grad = gradient
            d.parameter.data = view
        self.write_back()

    def take_gradients(self, flat: torch.Tensor, factor: float) -> None:
        """Set the masters' gradients to `flat` (the model's, half precision) times `factor`, in float32."""
        self._gradients.flat.copy_(flat).mul_(factor)

    def write_back(self) -> None:
        """Round the masters into the model's parameters."""
        self._model.flat.copy_(self.flat)


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
        constant = train.loss_scale if train.fp16 and train.loss_scale is not None else 1.0
        self.scale = train.initial_loss_scale if self.dynamic else constant
        self._window, self._hysteresis, self._minimum = train.loss_scale_window, train.hysteresis, train.min_loss_scale
        self._clean_steps, self._tolerance = 0, train.hysteresis

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
