"""AdamW (Loshchilov and Hutter 2019) over the model's parameters: torch's fused kernel and the paper's decay groups."""

from __future__ import annotations

import torch

from megascale.config.schema import OptimizerConfig


def build_adamw(weights: list[torch.Tensor], decays: list[bool], config: OptimizerConfig) -> torch.optim.AdamW:
    """Return an AdamW with its state in place (moments zero, step 0).

    Args:
        weights: What it updates: the parameters, or their float32 masters.
        decays: Per weight, whether weight decay applies.
        config: The optimizer section.
    """
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [w for w, decay in zip(weights, decays, strict=True) if decay],
                "weight_decay": config.weight_decay,
            },
            {"params": [w for w, decay in zip(weights, decays, strict=True) if not decay], "weight_decay": 0.0},
        ],
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )
    for weight in weights:
        optimizer.state[weight] = {
            "step": torch.zeros((), dtype=torch.float32, device=weight.device),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
    return optimizer
