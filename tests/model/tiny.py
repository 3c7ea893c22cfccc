"""A GPT small enough to train in a test, and a batch for it."""

from __future__ import annotations

from typing import Any

import torch

from megascale.config.schema import ModelConfig, ParallelConfig
from megascale.model.gpt import GPT
from megascale.parallel.boundary import build_boundary
from megascale.parallel.context import ParallelContext
from megascale.parallel.random import RandomStreams
from megascale.parallel.sharding import initialise

# 37 tokens padded to 64: over four ranks, the last holds nothing but padding.
TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "max_position_embeddings": 12,
    "vocab_size": 37,
    "make_vocab_size_divisible_by": 64,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
SEED = 1234


def tiny_gpt(context: ParallelContext, dtype: torch.dtype = torch.float64, **changes: Any) -> GPT:
    """Return an initialised tiny GPT of this rank.

    `changes` are to the model section, or arguments of GPT, or `sequence_parallel` and `overlap`.
    """
    parallel = ParallelConfig(
        sequence_parallel=changes.pop("sequence_parallel", False),
        async_tensor_model_parallel_allreduce=changes.pop("overlap", False),
    )
    arguments = {name: changes.pop(name) for name in ("recompute_granularity", "label_smoothing") if name in changes}
    config = ModelConfig(**(TINY | changes))
    streams = RandomStreams(SEED, context.tp, context.device)
    arguments["boundary"] = build_boundary(context.tp, streams, parallel)
    model = GPT(config, context.tp, streams, dtype, context.device, **arguments)
    # Larger than in training, so that attention is far from uniform and every term counts.
    initialise(model, SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                # The same on every rank, whatever its slice.
                parameter.fill_(0.05)
            elif "norm" not in name:
                parameter.mul_(8.0)
    return model


def tiny_batch(
    num_samples: int = 3, seq_length: int = 10, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, targets and loss weights, [b, s] each; some weights are 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, TINY["vocab_size"], (num_samples, seq_length + 1), generator=generator)
    weights = torch.ones(num_samples, seq_length)
    weights[0, 3:5] = 0.0
    return ids[:, :-1], ids[:, 1:], weights
