"""The choice of the optimizer's backend, and apex's calling convention against a stand-in for it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from megascale.config.schema import OptimizerConfig
from megascale.optim import adam
from megascale.optim.adam import ApexAdam, TorchAdam, build_adam, nvidia_apex_optimizers
from megascale.utils.errors import UserError

CONFIG = OptimizerConfig(weight_decay=0.1)


class FusedAdam(torch.optim.Optimizer):
    """Does what NVIDIA apex's does with its arguments, state and step count, in plain torch."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, **kwargs: Any):
        assert kwargs.pop("adam_w_mode"), "decoupled weight decay was asked for"
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, **kwargs})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v, g = state["exp_avg"], state["exp_avg_sq"], p.grad
                m.mul_(beta1).add_(g, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                update = (m / (1 - beta1 ** group["step"])) / ((v / (1 - beta2 ** group["step"])).sqrt() + group["eps"])
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))


def _module() -> ModuleType:
    module = ModuleType("apex.optimizers")
    module.FusedAdam = FusedAdam
    return module


def _weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


def test_apex_is_driven_to_the_same_numbers_as_torch_and_resumes() -> None:
    ours, theirs = _weights(), _weights()
    decays = [True, False, True]
    torchs, apexs = TorchAdam(ours, decays, CONFIG), ApexAdam(_module(), theirs, decays, CONFIG)
    for step in range(6):
        if step == 3:  # through a checkpoint
            saved = [{key: value.clone() for key, value in apexs.moments(w).items()} for w in theirs]
            apexs = ApexAdam(_module(), theirs, decays, CONFIG)
            for w, moments in zip(theirs, saved, strict=True):
                for key, value in apexs.moments(w).items():
                    value.copy_(moments[key])
            apexs.set_num_updates(3)
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.full_like(a, 0.1 * (step + 1))
            b.grad = a.grad.clone()
        torchs.step(1e-2)
        apexs.step(1e-2)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_package_of_that_name_is_not_nvidias() -> None:
    web_toolkit = ModuleType("apex")
    with mock.patch.dict(sys.modules, {"apex": web_toolkit}):
        sys.modules.pop("apex.optimizers", None)
        assert nvidia_apex_optimizers() is None
    with mock.patch.dict(sys.modules, {"apex": ModuleType("apex"), "apex.optimizers": _module()}):
        assert nvidia_apex_optimizers() is not None


@pytest.mark.parametrize("installed", [True, False])
def test_on_a_cpu_torch_is_used_and_asking_for_apex_is_refused(installed: bool) -> None:
    with mock.patch.object(adam, "nvidia_apex_optimizers", return_value=_module() if installed else None):
        for backend in ("auto", "torch"):
            built = build_adam(_weights(), [True] * 3, OptimizerConfig(optimizer_backend=backend))
            assert built.name == "torch's fused AdamW"
        reason = "no CPU weights" if installed else "not installed"
        with pytest.raises(UserError, match=reason):
            build_adam(_weights(), [True] * 3, OptimizerConfig(optimizer_backend="apex"))


class _CudaWeight:
    """As much of a weight on a GPU as the choice looks at."""

    is_cuda, dtype = True, torch.float32


@pytest.mark.parametrize(
    ("backend", "installed", "chosen"),
    [("auto", True, "apex"), ("auto", False, "torch"), ("torch", True, "torch"), ("apex", True, "apex")],
)
def test_the_choice_on_a_gpu(backend: str, installed: bool, chosen: str) -> None:
    weights: Any = [_CudaWeight()]
    with (
        mock.patch.object(adam, "nvidia_apex_optimizers", return_value=_module() if installed else None),
        mock.patch.object(adam, "TorchAdam", return_value="torch"),
        mock.patch.object(adam, "ApexAdam", return_value="apex"),
    ):
        assert build_adam(weights, [True], OptimizerConfig(optimizer_backend=backend)) == chosen
