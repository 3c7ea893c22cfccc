"""Dropout keeps what is expected of the output, drops the share it is told to, and is off in evaluation."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megascale.config.layout import ParallelLayout
from megascale.config.schema import ModelConfig
from megascale.model.attention import CausalSelfAttention
from megascale.model.block import TransformerBlock
from megascale.model.parts import ModelParts
from megascale.parallel.boundary import Dropout
from megascale.parallel.context import ParallelContext, single_process
from megascale.parallel.random import RandomStreams
from megascale.parallel.sharding import initialise
from tests.full import full_gradients
from tests.model.tiny import TINY, tiny_batch, tiny_gpt

CPU = torch.device("cpu")
NUM_DRAWS = 20_000


def _deviations(module: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Return how far the mean of many dropped outputs is from the output without dropout.

    x [s, 1, h]. First as the largest distance in standard errors, then as the mean relative distance.
    """
    streams = RandomStreams(0, single_process().tp, CPU)
    streams.start(0, 0)
    with torch.no_grad():
        expected = module.eval()(x)[:, 0]
        draws = module.train()(x.expand(-1, NUM_DRAWS, -1))
    mean, error = draws.mean(dim=1), draws.std(dim=1) / NUM_DRAWS**0.5
    return ((mean - expected) / error).abs().max().item(), ((mean - expected).norm() / expected.norm()).item()


def _attention(dropout: float = 0.25) -> nn.Module:
    axis = single_process().tp
    config = ModelConfig(
        **TINY | {"hidden_size": 8, "num_attention_heads": 2, "attention_dropout": dropout, "init_method_std": 0.5}
    )
    module = ModelParts(config, axis, RandomStreams(0, axis, CPU), torch.float64, CPU).attention()
    initialise(module, 1)
    return module


class _Zero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def _block(dropout: float = 0.25) -> nn.Module:
    """A block that is linear in what its second dropout drops."""
    return TransformerBlock(nn.Identity(), _Zero(), nn.Identity(), nn.Tanh(), Dropout(dropout))


def _input(sequence: int = 5, hidden: int = 8) -> torch.Tensor:
    return torch.randn(sequence, 1, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("build", [_attention, _block])
def test_the_expected_output_is_the_one_without_dropout(build) -> None:
    standard_errors, relative = _deviations(build(), _input())
    assert standard_errors < 5, "of 40 outputs, none is so far off by chance"
    assert relative < 0.02


def test_a_missing_rescale_would_be_noticed() -> None:
    dropout = F.dropout
    with mock.patch.object(F, "dropout", lambda x, p, training: dropout(x, p, training) * (1 - p if training else 1)):
        standard_errors, relative = _deviations(_block(), _input())
    assert standard_errors > 20
    assert relative > 0.1


def test_the_share_that_is_dropped() -> None:
    x = torch.ones(100, 100, 1, dtype=torch.float64)
    RandomStreams(0, single_process().tp, CPU)
    with torch.no_grad():
        change = _block(0.25).train()(x) - x
    # Standard error 0.0043.
    assert (change == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)


def test_evaluation_draws_nothing() -> None:
    model = tiny_gpt(single_process(), hidden_dropout=0.5, attention_dropout=0.5)
    without = tiny_gpt(single_process(), hidden_dropout=0.0, attention_dropout=0.0)
    batch = tiny_batch()
    before = model.streams.states()
    with torch.no_grad():
        evaluated = model.eval()(*batch)
    after = model.streams.states()
    assert torch.equal(evaluated, without(*batch))
    assert torch.equal(before.shared, after.shared)
    assert torch.equal(before.model_parallel, after.model_parallel)
    with torch.no_grad():
        assert not torch.equal(model.train()(*batch), evaluated)


def test_label_smoothing_is_for_training_only() -> None:
    smoothed, plain = (tiny_gpt(single_process(), label_smoothing=smoothing) for smoothing in (0.1, 0.0))
    batch = tiny_batch()
    assert not torch.equal(smoothed.train()(*batch), plain.train()(*batch))
    assert torch.equal(smoothed.eval()(*batch), plain.eval()(*batch))


def _gradients(context: ParallelContext, attention_dropout: float) -> list[list[float]]:
    model = tiny_gpt(context, hidden_dropout=0.3, attention_dropout=attention_dropout)
    model.streams.start(step=1, micro_batch=0)
    model(*tiny_batch()).backward()
    return [gradient.flatten().tolist() for gradient in full_gradients(model).values()]


def test_hidden_dropout_is_the_same_at_every_tensor_parallel_size(ranks) -> None:
    """And attention's is not: by design each rank draws its own heads' masks."""
    serial = ranks(ParallelLayout(tp=1), _gradients, 0.0)[0]
    for rank in ranks(ParallelLayout(tp=2), _gradients, 0.0):
        for ours, expected in zip(rank, serial, strict=True):
            assert ours == pytest.approx(expected, rel=1e-8, abs=1e-10)
    serial, parallel = ranks(ParallelLayout(tp=1), _gradients, 0.3)[0], ranks(ParallelLayout(tp=2), _gradients, 0.3)[0]
    assert parallel[0] != pytest.approx(serial[0], rel=1e-3)


def _what_ranks_drop(context: ParallelContext, bug: bool) -> tuple[list[float], list[float]]:
    """Return the first block's attention context, from heads of equal weights, and the final hidden states."""
    model = tiny_gpt(context, num_layers=1, hidden_dropout=0.3, attention_dropout=0.3)
    attention = model.get_submodule("blocks.0.attention")
    assert isinstance(attention, CausalSelfAttention)
    with torch.no_grad():
        one_head = torch.randn(12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        attention.qkv.weight.copy_(one_head.repeat(attention.num_local_heads, 1))
    seen: list[torch.Tensor] = []
    attention.output.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    model.streams.start(step=0, micro_batch=0)
    one_stream = mock.patch.object(RandomStreams, "model_parallel", return_value=nullcontext())
    with one_stream if bug else nullcontext():
        hidden = model.hidden_states(tiny_batch()[0])
    return seen[0].flatten().tolist(), hidden.flatten().tolist()


def test_ranks_drop_other_attention_weights_and_the_same_hidden_elements(ranks) -> None:
    first, second = ranks(ParallelLayout(tp=2), _what_ranks_drop, False)
    assert first[0] != second[0]
    assert first[1] == second[1], "bit for bit"
    first, second = ranks(ParallelLayout(tp=2), _what_ranks_drop, True)
    assert first[0] == second[0], "from the shared stream, heads of equal weights would drop the same"
