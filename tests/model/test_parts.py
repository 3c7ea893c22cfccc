"""What the options build: names, shapes, initial deviations, sizes and operations; and rotation by itself."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megascale.config.accounting import flops_per_iteration, num_parameters, num_parameters_per_rank
from megascale.config.presets import PRESETS
from megascale.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig
from megascale.model.gpt import GPT
from megascale.model.rotary import Rotary
from megascale.parallel.context import single_process
from megascale.parallel.random import RandomStreams
from megascale.parallel.sharding import declared_parameters, initialise
from tests.axes import lone_axis
from tests.model.test_options import LLAMA, POST_NORM
from tests.model.tiny import TINY, tiny_batch, tiny_gpt

CPU = torch.device("cpu")
CHOICES: dict[str, tuple[Any, ...]] = {
    "num_query_groups": (None, 4),
    "position_embedding_type": ("learned_absolute", "rope"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "norm_position": ("pre", "post"),
    "activation": ("gelu", "relu", "swiglu"),
    "disable_bias_linear": (False, True),
    "untie_embeddings_and_output_weights": (False, True),
}
COMBINATIONS = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]


def _meta_gpt(config: ModelConfig, tp: int) -> GPT:
    axis = lone_axis(0, tp)
    return GPT(config, axis, RandomStreams(1, axis, CPU), torch.float32, torch.device("meta"))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_accounting_counts_the_parameters_of_every_combination(tp: int) -> None:
    for changes in COMBINATIONS:
        config = ModelConfig(**(TINY | {"hidden_size": 48, "num_attention_heads": 8, "ffn_hidden_size": 20} | changes))
        run = RunConfig(model=config)
        model = _meta_gpt(config, tp)
        assert sum(p.numel() for p in model.parameters()) == num_parameters_per_rank(run, tp), changes
        whole = sum(math.prod(d.spec.shape) for d in declared_parameters(model))
        assert whole == num_parameters(run), changes


@pytest.mark.parametrize(("preset", "published"), [("llama-7b", 6_738_415_616), ("tinyllama-1.1b", 1_100_048_384)])
def test_the_published_llamas_have_their_published_size(preset: str, published: int) -> None:
    config = ModelConfig(**PRESETS[preset]["model"])
    assert num_parameters(RunConfig(model=config)) == published
    assert sum(p.numel() for p in _meta_gpt(config, 1).parameters()) == published


def _plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention in products that the counter sees, with their usual backward passes."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value


@pytest.mark.parametrize("recompute_granularity", ["none", "selective", "full"])
def test_the_accounting_counts_the_operations_of_a_step(recompute_granularity: str) -> None:
    """Forward and backward of one micro-batch, counted by torch as they run."""
    for changes in ({}, LLAMA, POST_NORM, LLAMA | {"num_query_groups": 1, "disable_bias_linear": False}):
        model = tiny_gpt(single_process(), **changes, recompute_granularity=recompute_granularity)
        tokens, targets, weights = tiny_batch(num_samples=3, seq_length=10)
        # The fused head adds its weight's gradient up in place, which torch's counter does not know.
        in_place = {torch.ops.aten.addmm_: lambda into, a, b, **kwargs: 2 * a[0] * a[1] * b[1]}
        counter = FlopCounterMode(display=False, custom_mapping=in_place)
        with counter, mock.patch.object(F, "scaled_dot_product_attention", _plain_attention):
            model(tokens, targets, weights).backward()
        run = RunConfig(
            model=model.config,
            data=DataConfig(seq_length=10),
            train=TrainConfig(global_batch_size=3, recompute_granularity=recompute_granularity),
        )
        assert counter.get_total_flops() == flops_per_iteration(run), changes


def test_names_and_shapes_of_a_llama() -> None:
    config = ModelConfig(**PRESETS["tinyllama-1.1b"]["model"])
    shapes = {
        d.name: d.spec.shape
        for d in declared_parameters(_meta_gpt(config, 1))
        if ".0." in d.name or "blocks" not in d.name
    }
    assert shapes == {
        "word_embedding.weight": (32000, 2048),
        "blocks.0.attention_norm.weight": (2048,),
        "blocks.0.attention.qkv.weight": (2048 + 2 * 256, 2048),
        "blocks.0.attention.output.weight": (2048, 2048),
        "blocks.0.mlp_norm.weight": (2048,),
        "blocks.0.mlp.up.weight": (2, 5632, 2048),
        "blocks.0.mlp.down.weight": (2048, 5632),
        "final_norm.weight": (2048,),
        "head.weight": (32000, 2048),
    }


@pytest.mark.parametrize("changes", [LLAMA, POST_NORM], ids=["llama", "post-norm"])
def test_initial_deviations(changes: dict[str, Any]) -> None:
    """0.02 everywhere, 0.02/sqrt(2L) for what writes into the residual stream; norms 1, biases 0; within 2%."""
    larger = {"hidden_size": 128, "ffn_hidden_size": 512, "max_position_embeddings": 128, "vocab_size": 128}
    config = ModelConfig(**(TINY | changes | larger))
    axis = single_process().tp
    model = GPT(config, axis, RandomStreams(1, axis, CPU))
    initialise(model, 7)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / (2 * 2) ** 0.5 if residual else 0.02, rel=0.02), name


def test_groups_that_do_not_divide_are_refused() -> None:
    config = ModelConfig(**(TINY | LLAMA | {"num_query_groups": 2}))
    with pytest.raises(ValueError, match="8 heads must divide into 2 query groups, and those over 4 ranks"):
        _meta_gpt(config, 4)


def test_only_distances_matter_to_rotation() -> None:
    """Positions that are all one off change no product of a query and a key; a query one off changes them."""
    rotary = Rotary(8, 32, 100.0, torch.float64, CPU)
    query, key = torch.randn(2, 1, 1, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def turned(x: torch.Tensor, first: int) -> torch.Tensor:
        return rotary(F.pad(x, (0, 0, first, 0)))[..., first:, :]

    scores = rotary(query) @ rotary(key).mT
    assert torch.allclose(turned(query, 7) @ turned(key, 7).mT, scores, rtol=0, atol=1e-12)
    assert not torch.allclose(turned(query, 1) @ rotary(key).mT, scores, rtol=0, atol=1e-3)
    assert torch.equal(rotary(query)[..., 0, :], query[..., 0, :]), "position 0 is not turned"
    assert torch.allclose(rotary(query).norm(dim=-1), query.norm(dim=-1)), "lengths are kept"


def test_rotation_in_half_precision_rounds_once() -> None:
    """Tables stay float32: at position 4000 a bfloat16 table would be off by whole features' worth."""
    x = torch.randn(1, 1, 4096, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = Rotary(64, 4096, 10000.0, torch.float64, CPU)(x.double())
    ours = Rotary(64, 4096, 10000.0, torch.bfloat16, CPU)(x)
    assert ours.dtype == torch.bfloat16
    assert (ours.double() - exact).abs().max() <= 2**-8 * exact.abs().max()
    rounded_tables = Rotary(64, 4096, 10000.0, torch.float64, CPU)
    rounded_tables.cosines, rounded_tables.sines = (
        table.bfloat16() for table in (rounded_tables.cosines, rounded_tables.sines)
    )
    worse = (rounded_tables(x).double() - exact).pow(2).mean()
    assert worse > 2 * (ours.double() - exact).pow(2).mean()
