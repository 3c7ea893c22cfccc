"""The optimizer of a run: flat gradients, precision, clipping and AdamW behind one `step`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from megascale.config.schema import RunConfig
from megascale.optim.adam import build_adamw
from megascale.optim.gradients import GradientBuffer, global_norm, sum_partial_gradients, sum_shared_gradients
from megascale.optim.precision import LossScaler, MasterWeights
from megascale.optim.schedule import learning_rate
from megascale.parallel.context import Axis
from megascale.parallel.sharding import DeclaredParameter, declared_parameters

# Keeps the clipping coefficient finite at a zero gradient (Megatron-LM's constant).
_CLIP_EPSILON = 1e-6


class NonFiniteGradients(RuntimeError):
    """The gradients hold an inf or a nan that no loss scale explains."""


@dataclass(frozen=True)
class StepResult:
    """What one update did.

    Attributes:
        grad_norm: Norm of the whole model's gradient before clipping; inf or nan when the step was skipped.
        lr: The learning rate it ran at (would have run at, when skipped).
        skipped: Whether float16 overflowed, so that nothing changed but the loss scale.
    """

    grad_norm: float
    lr: float
    skipped: bool


class ModelOptimizer:
    """Updates a model from the gradients that its backward passes accumulate.

    Args:
        model: The rank's model, initialised. In half precision its parameters are replaced here by rounded ones.
        config: A resolved configuration.
        tp, dp: The axes to take the norm and reduce the gradients over.
        pp: The pipeline of stages that the norm is taken over as well; None: the model is one stage.

    Attributes:
        num_updates: Updates made so far; the learning rate follows it. Skipped steps do not count.
        scaler: Its `scale` multiplies the loss before the backward pass.
    """

    def __init__(self, model: nn.Module, config: RunConfig, tp: Axis, dp: Axis, pp: Axis | None = None) -> None:
        self._config = config
        self._tp, self._dp, self._pp = tp, dp, pp
        declared = declared_parameters(model)
        half = torch.float16 if config.train.fp16 else torch.bfloat16 if config.train.bf16 else None
        self._masters = MasterWeights(declared, half) if half is not None else None
        self.gradients = GradientBuffer(declared, declared[0].parameter.dtype)
        self.declared = self.gradients.declared
        self.weights: list[torch.Tensor] = (
            self._masters.views if self._masters is not None else [d.parameter for d in self.declared]
        )
        self._adam = build_adamw(self.weights, [d.spec.decay for d in self.declared], config.optimizer)
        self.scaler = LossScaler(config.train)
        self.num_updates = 0

    def zero_gradients(self) -> None:
        self.gradients.zero_()

    def expect_last_backward(self) -> None:
        """Take note that the next backward pass is the update's last: gradients are final as it leaves them."""

    def step(self, normaliser: float) -> StepResult:
        """Make the gradients whole over tensor- and data-parallel ranks, clip them and update the weights.

        Args:
            normaliser: What the summed gradients are multiplied with, the loss scale apart: see `train.trainer`.

        Raises:
            NonFiniteGradients: Not float16 with a dynamic scale, or that scale is at its minimum.
        """
        sum_partial_gradients(self.gradients, self._tp)
        sum_shared_gradients(self.gradients)
        self.gradients.all_reduce_(self._dp)
        factor = normaliser / self.scaler.scale
        norm = global_norm(self.gradients, self._tp, self._pp) * factor
        lr = learning_rate(self._config.schedule, self.num_updates + 1)
        if not math.isfinite(norm):
            if not self.scaler.dynamic or self.scaler.exhausted:
                raise NonFiniteGradients(
                    f"the gradient norm is {norm} at update {self.num_updates + 1} "
                    f"(loss scale {self.scaler.scale:g}): the run diverged; lower --lr, or resume from a checkpoint"
                )
            self.scaler.update(overflow=True)
            return StepResult(norm, lr, skipped=True)
        clip_grad = self._config.optimizer.clip_grad
        if clip_grad > 0:
            factor *= min(1.0, clip_grad / (norm + _CLIP_EPSILON))
        for group in self._adam.param_groups:
            group["lr"] = lr
        if self._masters is not None:
            self._masters.take_gradients(self.gradients.flat, factor)
        elif factor != 1.0:
            self.gradients.flat.mul_(factor)
        self._adam.step()
        if self._masters is not None:
            self._masters.write_back()
        self.scaler.update(overflow=False)
        self.num_updates += 1
        return StepResult(norm, lr, skipped=False)

    def tensors(self) -> list[tuple[str, torch.Tensor, DeclaredParameter]]:
        """Return what a checkpoint holds, by logical name: the weights and both Adam moments.

        In half precision the weights are the float32 masters. After writing into the tensors, call `loaded`.
        """
        found = []
        for d, weight in zip(self.declared, self.weights, strict=True):
            state = self._adam.state[weight]
            found.append((f"model.{d.name}", weight.detach(), d))
            found += [(f"optimizer.{key}.{d.name}", state[key], d) for key in ("exp_avg", "exp_avg_sq")]
        return found

    def state(self) -> dict[str, object]:
        """Return the rest of the state, as plain numbers."""
        return {"num_updates": self.num_updates, "scaler": self.scaler.state()}

    def loaded(self, state: dict[str, object]) -> None:
        """Take over a state after its tensors were written into `tensors()`."""
        self.num_updates = int(state["num_updates"])  # type: ignore[call-overload]
        self.scaler.load_state(state["scaler"])  # type: ignore[arg-type]
        for weight in self.weights:
            self._adam.state[weight]["step"].fill_(self.num_updates)
        if self._masters is not None:
            self._masters.write_back()
