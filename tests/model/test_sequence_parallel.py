"""The sequence-parallel GPT against the plain GPT-2 and, Llama-shaped, against itself on one process, in float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megascale.config.layout import ParallelLayout
from megascale.config.schema import ParallelConfig
from megascale.parallel.boundary import Boundary, Dropout, OwnStreamDropout, SequenceBoundary, build_boundary
from megascale.parallel.context import ParallelContext, single_process
from megascale.parallel.random import RandomStreams
from tests.axes import lone_axis
from tests.full import full_gradients
from tests.model.test_gpt import compare_with_plain_gpt2
from tests.model.tiny import tiny_batch, tiny_gpt

EXACT = 1e-10
SEQUENCE = 12
LLAMA = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "activation": "swiglu",
    "num_query_groups": 4,
    "num_attention_heads": 8,
    "untie_embeddings_and_output_weights": True,
    "disable_bias_linear": True,
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"recompute_granularity": "selective", "label_smoothing": 0.1},
    {"recompute_granularity": "full", "overlap": True},
]


def _compare_variants(context: ParallelContext) -> list[dict[str, float]]:
    return [
        compare_with_plain_gpt2(context, seq_length=SEQUENCE, sequence_parallel=True, **variant) for variant in VARIANTS
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_logits_losses_and_gradients_equal_plain_gpt2s(ranks, tp: int) -> None:
    for variants in ranks(ParallelLayout(tp=tp), _compare_variants):
        for differences in variants:
            assert max(differences.values()) < EXACT, differences


def _compare_with_bug(context: ParallelContext) -> dict[str, float]:
    """The slices of the sequence come back in the wrong order."""
    gather = SequenceBoundary.enter
    with mock.patch.object(SequenceBoundary, "enter", lambda self, x: gather(self, x).roll(SEQUENCE // 2, 0)):
        return compare_with_plain_gpt2(context, seq_length=SEQUENCE, sequence_parallel=True)


def test_the_comparison_notices(ranks) -> None:
    assert ranks(ParallelLayout(tp=2), _compare_with_bug)[0]["logits"] > 1e-3


def _loss_and_gradients(context: ParallelContext, changes: dict[str, Any]) -> dict[str, list[float]]:
    model = tiny_gpt(context, **changes)
    loss = model(*tiny_batch(seq_length=SEQUENCE))
    loss.backward()
    return {"loss": [loss.item()]} | {name: g.flatten().tolist() for name, g in full_gradients(model).items()}


@pytest.mark.parametrize(
    "changes", [LLAMA, {"norm_position": "post", "activation": "relu"}], ids=["llama", "post-norm"]
)
def test_other_architectures_equal_one_process(ranks, changes: dict[str, Any]) -> None:
    serial = ranks(ParallelLayout(tp=1), _loss_and_gradients, changes)[0]
    split = changes | {"sequence_parallel": True, "overlap": True}
    for tp in (2, 4):
        for found in ranks(ParallelLayout(tp=tp), _loss_and_gradients, split):
            assert found.keys() == serial.keys()
            for name, expected in serial.items():
                assert found[name] == pytest.approx(expected, rel=EXACT, abs=EXACT), name


def _hidden_states(context: ParallelContext, dropout: float) -> torch.Tensor:
    model = tiny_gpt(context, hidden_dropout=dropout, sequence_parallel=True)
    model.streams.start(step=0, micro_batch=0)
    return model.hidden_states(tiny_batch(seq_length=SEQUENCE)[0]).detach()


def test_a_rank_holds_its_own_stretch_of_the_sequence(ranks) -> None:
    whole = ranks(ParallelLayout(tp=1), _hidden_states, 0.0)[0]
    stretches = ranks(ParallelLayout(tp=4), _hidden_states, 0.0)
    assert [len(stretch) for stretch in stretches] == [SEQUENCE // 4] * 4
    torch.testing.assert_close(torch.cat(stretches), whole, rtol=EXACT, atol=EXACT)


def _what_is_dropped(context: ParallelContext, bug: bool) -> list[bool]:
    """Which elements of a stretch of ones each rank drops; with the bug, by the stream that all ranks share."""
    streams = RandomStreams(3, context.tp, context.device)
    boundary = SequenceBoundary(context.tp, streams)
    dropout = Dropout(0.3) if bug else boundary.dropout(0.3)
    return (dropout(torch.ones(400)) == 0).tolist()


def test_ranks_drop_other_elements_of_their_stretches(ranks) -> None:
    first, second = ranks(ParallelLayout(tp=2), _what_is_dropped, False)
    assert sum(first) == pytest.approx(120, abs=50)
    # Two independent masks agree in 58% of their elements.
    assert sum(a == b for a, b in zip(first, second, strict=True)) == pytest.approx(232, abs=50)
    first, second = ranks(ParallelLayout(tp=2), _what_is_dropped, True)
    assert first == second, "the same pattern in every stretch"


def test_dropout_is_off_in_evaluation_and_leaves_the_shared_stream_alone() -> None:
    axis = single_process().tp
    streams = RandomStreams(3, axis, torch.device("cpu"))
    dropout, x = OwnStreamDropout(0.3, streams), torch.ones(40)
    before = streams.states()
    assert dropout.eval()(x) is x
    assert torch.equal(before.model_parallel, streams.states().model_parallel)
    assert not torch.equal(dropout.train()(x), x)
    assert torch.equal(before.shared, streams.states().shared)
    assert not torch.equal(before.model_parallel, streams.states().model_parallel)


def test_a_sequence_that_cannot_be_split_is_refused_with_both_numbers() -> None:
    axis = lone_axis(1, 4)
    boundary = SequenceBoundary(axis, RandomStreams(1, axis, torch.device("cpu")))
    assert boundary.local_length(12) == 3
    assert boundary.outside(torch.arange(12)).tolist() == [3, 4, 5]
    with pytest.raises(ValueError, match="10 tokens cannot be split over the 4 ranks"):
        boundary.local_length(10)
    with pytest.raises(ValueError, match="10 tokens cannot be split over the 4 ranks"):
        boundary.outside(torch.arange(10))


def test_on_one_rank_there_is_nothing_to_split() -> None:
    axis = single_process().tp
    boundary = build_boundary(axis, RandomStreams(1, axis, torch.device("cpu")), ParallelConfig(sequence_parallel=True))
    assert type(boundary) is Boundary
    assert not boundary.gradient_is_partial
