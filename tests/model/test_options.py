"""Every architecture option at tp 1, 2 and 4 against a plain decoder on one process, in float64.

Logits, losses and every gradient; each option alone, all of a Llama together, the post-norm transformer, and a mixture
that nobody would train; also recomputed and with the sequence split.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megascale.config.layout import ParallelLayout
from megascale.config.schema import ModelConfig
from megascale.model import activations
from megascale.model.block import PostNormBlock, TransformerBlock
from megascale.model.gpt import GPT
from megascale.model.grouped_query import GroupedQueryAttention, GroupedQueryCore
from megascale.model.rotary import Rotary, RotaryCore
from megascale.parallel.boundary import Boundary
from megascale.parallel.context import ParallelContext
from megascale.parallel.gated_linear import GatedColumnParallelLinear
from megascale.parallel.rms_norm import RMSNorm
from megascale.parallel.sharding import declared_parameters
from tests.full import difference, full, full_weights, gradient_of, slice_of
from tests.model.plain_decoder import Options, PlainDecoder, plain_decoder, to_plain
from tests.model.tiny import TINY, tiny_batch, tiny_gpt

EXACT = 1e-10
VOCAB = TINY["vocab_size"]
# Eight heads of 4 features, so that four ranks share four groups.
SHAPE = {"hidden_size": 32, "num_attention_heads": 8, "ffn_hidden_size": 24}
LLAMA = SHAPE | {
    "num_query_groups": 4,
    "position_embedding_type": "rope",
    "rotary_base": 100.0,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "activation": "swiglu",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
POST_NORM = SHAPE | {"norm_position": "post", "activation": "relu"}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "post-norm": POST_NORM,
    "multi-query": SHAPE | {"num_query_groups": 1},
    "groups of heads": SHAPE | {"num_query_groups": 4},
    "rotary": SHAPE | {"position_embedding_type": "rope"},
    "RMSNorm": SHAPE | {"normalization": "RMSNorm"},
    "swiglu with bias": SHAPE | {"activation": "swiglu"},
    "relu": SHAPE | {"activation": "relu"},
    "no bias": SHAPE | {"disable_bias_linear": True},
    "own head": SHAPE | {"untie_embeddings_and_output_weights": True},
    "mixture": LLAMA | {"norm_position": "post", "num_query_groups": 8, "disable_bias_linear": False},
    "llama recomputed": LLAMA | {"recompute_granularity": "full"},
    "llama with recomputed cores": LLAMA | {"recompute_granularity": "selective"},
    "llama smoothed": LLAMA | {"label_smoothing": 0.1},
    "llama with the sequence split": LLAMA | {"sequence_parallel": True},
    "post-norm with the sequence split": POST_NORM | {"sequence_parallel": True, "recompute_granularity": "full"},
}


def _options(config: ModelConfig) -> Options:
    return Options(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_query_groups or config.num_attention_heads,
        ffn=config.ffn_hidden_size,
        vocab=config.vocab_size,
        positions=config.max_position_embeddings,
        rotary_base=config.rotary_base if config.position_embedding_type == "rope" else None,
        rms=config.normalization == "RMSNorm",
        epsilon=config.layernorm_epsilon,
        post=config.norm_position == "post",
        activation=config.activation,
        bias=not config.disable_bias_linear,
        tied=not config.untie_embeddings_and_output_weights,
    )


def _told_apart(model: GPT) -> None:
    """Give every element of every parameter a value of its own: norms and biases start out equal everywhere."""
    with torch.no_grad():
        for number, d in enumerate(declared_parameters(model)):
            noise = torch.randn(d.spec.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            d.parameter.add_(slice_of(d, 0.1 * noise))


def _reference(model: GPT) -> PlainDecoder:
    return plain_decoder(full_weights(model), _options(model.config))


def _compare(context: ParallelContext, changes: dict[str, Any]) -> dict[str, float]:
    """Return the difference of the logits, the losses, the loss, and each full gradient, by name."""
    model = tiny_gpt(context, **changes)
    _told_apart(model)
    reference = _reference(model)
    tokens, targets, weights = tiny_batch(seq_length=8)
    expected_logits = reference(tokens)
    smoothed, plain_losses = (
        F.cross_entropy(expected_logits.transpose(1, 2), targets, reduction="none", label_smoothing=smoothing)
        for smoothing in (model.label_smoothing, 0.0)
    )
    expected_loss = (smoothed * weights).sum()
    expected_loss.backward()
    loss = model(tokens, targets, weights)
    loss.backward()
    with torch.no_grad():
        logits = context.tp.all_gather(model.logits(tokens), -1)[..., :VOCAB]
        differences = {
            "logits": difference(logits, expected_logits),
            "token losses": difference(model.token_losses(tokens, targets), plain_losses),
            "loss": difference(loss, expected_loss),
        }
    expected = {name: gradient_of(parameter) for name, parameter in reference.named_parameters()}
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for d in declared_parameters(model):
        gradient = gradient_of(d.parameter)
        if d.spec.gradient_is_partial:
            gradient = d.axis.all_reduce(gradient)
        for name, ours in to_plain(d.name, full(d, gradient), _options(model.config)).items():
            # Relative to the largest of all: a key bias without rotation has a gradient of 0 but for rounding.
            differences[name] = (ours - expected.pop(name)).abs().max().item() / largest
    assert not expected, "every gradient of the reference was compared"
    return differences


def _compare_all(context: ParallelContext) -> dict[str, dict[str, float]]:
    return {
        name: _compare(context, changes)
        for name, changes in VARIANTS.items()
        if changes.get("num_query_groups", 8) % context.tp.size == 0
    }


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_option_equals_the_plain_decoder(ranks, tp: int) -> None:
    for variants in ranks(ParallelLayout(tp=tp), _compare_all):
        assert len(variants) == len(VARIANTS) - (tp > 1), "multi-query attention has one group, for one rank"
        for name, differences in variants.items():
            assert max(differences.values()) < EXACT, (name, differences)


def _heads_as_if_all_queries_came_first(
    attention: GroupedQueryAttention, qkv: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Cut a rank's slice into all queries, all keys, all values: right for no rank, whatever the slice."""
    s, b, _ = qkv.shape
    heads, groups = attention.num_local_heads, attention.num_local_groups
    parts = qkv.view(s, b, heads + 2 * groups, attention.head_dim).split((heads, groups, groups), dim=2)
    return tuple(part.permute(1, 2, 0, 3) for part in parts)


def _heads_of_the_next_group(attention: GroupedQueryAttention, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    query, key, value = _HEADS(attention, qkv)
    return query, key.roll(1, dims=1), value.roll(1, dims=1)


def _attend_in_turn(
    core: GroupedQueryCore, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
) -> torch.Tensor:
    """Head k takes group k mod g, not k // (a/g)."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1)
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)


def _later_queries(core: RotaryCore, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Queries one position further on than their keys."""
    later = core.rotary(F.pad(query, (0, 0, 1, 0)))[..., 1:, :]
    return core.core(later, core.rotary(key), value)


def _pairs_side_by_side(rotary: Rotary, x: torch.Tensor) -> torch.Tensor:
    cosines, sines = rotary.cosines[: x.shape[-2]], rotary.sines[: x.shape[-2]]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((first * cosines - second * sines, second * cosines + first * sines), dim=-1).flatten(-2)


def _unreduced_gate(layer: GatedColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
    """No f before the gated product: each rank keeps its own part of the input's gradient."""
    return F.linear(x, layer.weight.flatten(0, 1))


def _value_first(layer: GatedColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
    gate, value = _GATED(layer, x).chunk(2, dim=-1)
    return torch.cat((value, gate), dim=-1)


def _with_a_mean_taken_off(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x - x.mean(-1, keepdim=True), norm.weight.shape, norm.weight, norm.epsilon)


_HEADS = GroupedQueryAttention.heads
_GATED = GatedColumnParallelLinear.forward
# What is patched, with what, in which variant, and what must differ.
BUGS: dict[str, tuple[Any, str, Any, str, str]] = {
    "a rank's slice is cut as if all queries came first": (
        GroupedQueryAttention,
        "heads",
        _heads_as_if_all_queries_came_first,
        "llama",
        "logits",
    ),
    "keys of the next group": (GroupedQueryAttention, "heads", _heads_of_the_next_group, "llama", "logits"),
    "groups dealt in turn": (GroupedQueryCore, "attend", _attend_in_turn, "llama", "logits"),
    "queries one position off": (RotaryCore, "forward", _later_queries, "llama", "logits"),
    "feature pairs side by side": (Rotary, "forward", _pairs_side_by_side, "rotary", "logits"),
    "a gate without silu": (activations.F, "silu", lambda gate: gate, "llama", "logits"),
    "gate and value swapped": (GatedColumnParallelLinear, "forward", _value_first, "llama", "logits"),
    "no f before the gated product": (
        GatedColumnParallelLinear,
        "forward",
        _unreduced_gate,
        "llama",
        "layers.1.post_attention_layernorm.weight",
    ),
    "a mean taken off": (RMSNorm, "forward", _with_a_mean_taken_off, "llama", "logits"),
    "norms before the branches": (PostNormBlock, "forward", TransformerBlock.forward, "post-norm", "logits"),
    "the embedding as the head": (
        GPT,
        "output_weight",
        property(lambda model: model.word_embedding.weight + 0 * model.head.weight),
        "own head",
        "logits",
    ),
    "no g after the row product": (Boundary, "leave", lambda boundary, x: x, "no bias", "logits"),
}


def _compare_with_bug(context: ParallelContext, bug: str) -> dict[str, float]:
    owner, name, replacement, variant, _ = BUGS[bug]
    with mock.patch.object(owner, name, replacement):
        return _compare(context, VARIANTS[variant])


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_notices(ranks, bug: str) -> None:
    for differences in ranks(ParallelLayout(tp=2), _compare_with_bug, bug):
        assert differences[BUGS[bug][-1]] > 1e-6
