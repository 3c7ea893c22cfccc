"""GPT at tp 1, 2 and 4 against a plain GPT-2 on one process, in float64: logits, loss and every gradient."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megascale.config.accounting import num_parameters, num_parameters_per_rank
from megascale.config.layout import ParallelLayout
from megascale.config.schema import DataConfig, ModelConfig, RunConfig
from megascale.model.gpt import GPT
from megascale.parallel.boundary import Boundary
from megascale.parallel.context import ParallelContext, single_process
from megascale.parallel.random import RandomStreams
from megascale.parallel.sharding import declared_parameters, initialise
from tests.axes import lone_axis
from tests.full import difference, full_gradients, full_weights
from tests.model.plain_gpt2 import plain_gpt2, plain_name, to_plain
from tests.model.tiny import TINY, tiny_batch, tiny_gpt

EXACT = 1e-10
HEADS, VOCAB = TINY["num_attention_heads"], TINY["vocab_size"]


def compare_with_plain_gpt2(
    context: ParallelContext, label_smoothing: float = 0.0, seq_length: int = 10, **changes: Any
) -> dict[str, float]:
    """Return the difference of the logits, the losses, the loss, and each full gradient, by name."""
    model = tiny_gpt(context, label_smoothing=label_smoothing, **changes)
    with torch.no_grad():
        # Parameters that start out equal everywhere get values that tell them apart.
        for d in declared_parameters(model):
            if not d.is_split:
                noise = torch.randn(d.spec.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
                d.parameter.add_(0.1 * noise)
    tokens, targets, weights = tiny_batch(seq_length=seq_length)
    reference = plain_gpt2(full_weights(model), HEADS, VOCAB)
    expected_logits = reference(tokens)
    smoothed, plain_losses = (
        F.cross_entropy(expected_logits.transpose(1, 2), targets, reduction="none", label_smoothing=smoothing)
        for smoothing in (label_smoothing, 0.0)
    )
    expected_loss = (smoothed * weights).sum()
    (0.25 * expected_loss).backward()

    loss = model(tokens, targets, weights, gradient_scale=0.25)
    (0.25 * loss).backward()
    with torch.no_grad():
        logits = context.tp.all_gather(model.logits(tokens), -1)[..., :VOCAB]
        differences = {
            "logits": difference(logits, expected_logits),
            "token losses": difference(model.token_losses(tokens, targets), plain_losses),
            "loss": difference(loss, expected_loss),
        }
    expected_gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, gradient in full_gradients(model).items():
        ours = to_plain(name, gradient, HEADS, VOCAB)
        differences[name] = difference(ours, expected_gradients.pop(plain_name(name)))
        if name == "word_embedding.weight":
            assert not gradient[VOCAB:].any(), "padding is never trained"
    assert not expected_gradients, "every gradient of the reference was compared"
    return differences


def _compare_variants(context: ParallelContext) -> list[dict[str, float]]:
    return [
        compare_with_plain_gpt2(context),
        compare_with_plain_gpt2(context, label_smoothing=0.1),
        compare_with_plain_gpt2(context, recompute_granularity="full"),
        compare_with_plain_gpt2(context, recompute_granularity="selective", overlap=True),
        compare_with_plain_gpt2(context, num_layers=1),
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gpt_equals_plain_gpt2(ranks, tp: int) -> None:
    for variants in ranks(ParallelLayout(tp=tp), _compare_variants):
        for differences in variants:
            assert max(differences.values()) < EXACT, differences


def _compare_with_bug(context: ParallelContext, bug: str) -> dict[str, float]:
    if bug == "no f":
        with mock.patch.object(Boundary, "enter", lambda self, x: x):
            return compare_with_plain_gpt2(context)
    if bug == "not causal":
        with mock.patch.object(F, "scaled_dot_product_attention", _sees_the_future):
            return compare_with_plain_gpt2(context)
    if bug == "exact GeLU":
        with mock.patch.object(F, "gelu", lambda x, approximate: 0.5 * x * (1 + torch.erf(x / 2**0.5))):
            return compare_with_plain_gpt2(context)
    assert bug == "other epsilon"
    return compare_with_plain_gpt2(context, layernorm_epsilon=1e-4)


_ATTENTION = F.scaled_dot_product_attention


def _sees_the_future(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool
) -> torch.Tensor:
    return _ATTENTION(query, key, value, dropout_p=dropout_p, is_causal=False)


@pytest.mark.parametrize(
    ("bug", "noticed_by"),
    [
        ("no f", "final_norm.weight"),
        ("not causal", "logits"),
        ("exact GeLU", "logits"),
        ("other epsilon", "logits"),
    ],
)
def test_the_comparison_notices(ranks, bug: str, noticed_by: str) -> None:
    for differences in ranks(ParallelLayout(tp=2), _compare_with_bug, bug):
        assert differences[noticed_by] > 1e-6


def _leak_of_the_future(context: ParallelContext, bug: bool) -> tuple[float, float]:
    """Return the largest change of logits before token 6 when it changes, and after."""
    model = tiny_gpt(context, torch.float32).eval()
    tokens, _, _ = tiny_batch()
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % VOCAB
    patched = _sees_the_future if bug else _ATTENTION
    with torch.no_grad(), mock.patch.object(F, "scaled_dot_product_attention", patched):
        change = (model.logits(changed) - model.logits(tokens)).abs()
    return change[:, :6].max().item(), change[:, 6:].max().item()


def test_a_token_does_not_change_the_logits_before_it(ranks) -> None:
    for before, after in ranks(ParallelLayout(tp=2), _leak_of_the_future, False):
        assert before == 0.0, "bit for bit"
        assert after > 1e-3
    assert all(before > 1e-3 for before, _ in ranks(ParallelLayout(tp=2), _leak_of_the_future, True))


def _meta_gpt(tp: int, **changes: Any) -> tuple[GPT, ModelConfig]:
    config = ModelConfig(
        **{
            "num_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "ffn_hidden_size": 3072,
            "max_position_embeddings": 1024,
            "vocab_size": 50257,
            "make_vocab_size_divisible_by": 1,
        }
        | changes
    )
    axis = lone_axis(0, tp)
    streams = RandomStreams(1, axis, torch.device("cpu"))
    return GPT(config, axis, streams, torch.float32, torch.device("meta")), config


def test_the_structure_is_gpt2s() -> None:
    model, _ = _meta_gpt(1)
    shapes = {plain_name(d.name): d.spec.shape for d in declared_parameters(model)}
    # Our linear weights are [outputs, inputs].
    assert shapes["wte.weight"] == (50257, 768)
    assert shapes["wpe.weight"] == (1024, 768)
    assert shapes["h.11.attn.c_attn.weight"] == (2304, 768)
    assert shapes["h.11.attn.c_proj.weight"] == (768, 768)
    assert shapes["h.11.mlp.c_fc.weight"] == (3072, 768)
    assert shapes["h.11.mlp.c_proj.weight"] == (768, 3072)
    assert len(shapes) == 2 + 12 * 12 + 2, "12 tensors per layer, as published, and no separate output layer"
    # The published "124M".
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_accounting_counts_these_parameters(tp: int) -> None:
    model, config = _meta_gpt(tp, make_vocab_size_divisible_by=1024)
    run = RunConfig(model=config, data=DataConfig(seq_length=1024))
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters_per_rank(run, tp)
    assert sum(d.parameter.numel() * (tp if d.is_split else 1) for d in declared_parameters(model)) == num_parameters(
        run
    )


def test_initial_deviations_are_the_papers() -> None:
    """0.02, and 0.02/sqrt(2L) for what writes into the residual stream; within 2%."""
    config = ModelConfig(**(TINY | {"hidden_size": 128, "ffn_hidden_size": 512, "max_position_embeddings": 128}))
    axis = single_process().tp
    model = GPT(config, axis, RandomStreams(1, axis, torch.device("cpu")))
    initialise(model, 7)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            expected = 0.02 / (2 * 2) ** 0.5 if residual else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.02), name
            assert abs(parameter.mean().item()) < 5 * expected / parameter.numel() ** 0.5, name


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    model = tiny_gpt(single_process())
    with pytest.raises(ValueError, match=r"13 tokens, but --max-position-embeddings is 12"):
        model.hidden_states(torch.zeros(1, 13, dtype=torch.long))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 heads, and those over 4 ranks"):
        _meta_gpt(4, num_attention_heads=6, make_vocab_size_divisible_by=1024)
