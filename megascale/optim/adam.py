"""AdamW (Loshchilov and Hutter 2019) by the paper's decay groups: torch's fused kernel, or NVIDIA apex's.

The package `apex` of the Python index is an unrelated web toolkit; NVIDIA's is told by its module `apex.optimizers`.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from megascale.config.schema import OptimizerConfig
from megascale.utils.errors import UserError


class Adam(Protocol):
    """An AdamW over a list of weights, with its moments in place from the start.

    Attributes:
        name: Whose it is, for the log.
    """

    name: str

    def step(self, lr: float) -> None:
        """Update the weights from their `.grad`."""

    def moments(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return exp_avg and exp_avg_sq of a weight."""

    def set_num_updates(self, num_updates: int) -> None:
        """Go on after this many updates: the bias correction depends on it."""


class TorchAdam:
    """torch.optim.AdamW with its fused kernel."""

    name = "torch's fused AdamW"

    def __init__(self, weights: list[torch.Tensor], decays: list[bool], config: OptimizerConfig) -> None:
        self._weights = weights
        self._optimizer = torch.optim.AdamW(
            decay_groups(weights, decays, config.weight_decay),
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        for weight in weights:
            self._optimizer.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }

    def step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def moments(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self._optimizer.state[weight]
        return {key: state[key] for key in ("exp_avg", "exp_avg_sq")}

    def set_num_updates(self, num_updates: int) -> None:
        for weight in self._weights:
            self._optimizer.state[weight]["step"].fill_(num_updates)


class ApexAdam:
    """NVIDIA apex's FusedAdam in its AdamW mode: one kernel launch per group and chunk. CUDA only."""

    name = "NVIDIA apex's FusedAdam"

    def __init__(
        self, apex_optimizers: Any, weights: list[torch.Tensor], decays: list[bool], config: OptimizerConfig
    ) -> None:
        self._optimizer = apex_optimizers.FusedAdam(
            decay_groups(weights, decays, config.weight_decay),
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            adam_w_mode=True,
        )
        for weight in weights:
            self._optimizer.state[weight].update(exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        self.set_num_updates(0)

    def step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def moments(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self._optimizer.state[weight]
        return {key: state[key] for key in ("exp_avg", "exp_avg_sq")}

    def set_num_updates(self, num_updates: int) -> None:
        # Apex counts per group, from the group's first step on.
        for group in self._optimizer.param_groups:
            group["step"] = num_updates


def decay_groups(weights: list[torch.Tensor], decays: list[bool], weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups with and without weight decay, empty ones left out."""
    groups: list[dict[str, Any]] = []
    for decays_wanted, value in ((True, weight_decay), (False, 0.0)):
        members = [w for w, decay in zip(weights, decays, strict=True) if decay == decays_wanted]
        groups += [{"params": members, "weight_decay": value}] if members else []
    return groups


def nvidia_apex_optimizers() -> Any | None:
    """Return the module `apex.optimizers` if NVIDIA's apex is installed and can be imported, None otherwise."""
    try:
        module = importlib.import_module("apex.optimizers")
    except (ImportError, OSError):  # absent, the web toolkit, or built for another torch
        return None
    return module if hasattr(module, "FusedAdam") else None


def build_adam(weights: list[torch.Tensor], decays: list[bool], config: OptimizerConfig) -> Adam:
    """Return an AdamW with its state in place (moments zero, step 0).

    Args:
        weights: What it updates: the parameters or their float32 masters, or runs of them.
        decays: Per weight, whether weight decay applies.
        config: The optimizer section; its backend "auto" is apex for CUDA weights (not float64) where it is installed.

    Raises:
        UserError: --optimizer-backend apex where it cannot work.
    """
    usable = all(weight.is_cuda and weight.dtype != torch.float64 for weight in weights)
    if config.optimizer_backend == "torch" or (config.optimizer_backend == "auto" and not usable):
        return TorchAdam(weights, decays, config)
    apex_optimizers = nvidia_apex_optimizers()
    if config.optimizer_backend == "apex" and (apex_optimizers is None or not usable):
        reason = "it updates no float64 and no CPU weights" if apex_optimizers is not None else "it is not installed"
        raise UserError(
            f"--optimizer-backend apex needs NVIDIA's apex (the package of that name on the Python index is another "
            f"one): {reason}. Use --optimizer-backend torch, or auto"
        )
    if apex_optimizers is None:
        return TorchAdam(weights, decays, config)
    return ApexAdam(apex_optimizers, weights, decays, config)
