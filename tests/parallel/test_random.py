"""Tensor-parallel ranks share one dropout stream and have one each; both are functions of (seed, step, micro-batch)."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megascale.config.layout import ParallelLayout
from megascale.parallel import random as random_module
from megascale.parallel.context import ParallelContext
from megascale.parallel.random import RandomStreams, mix_seed
from tests.axes import lone_axis

CPU = torch.device("cpu")
SEED = 1234


def _mask() -> list[bool]:
    """Which of 64 elements dropout keeps."""
    return F.dropout(torch.ones(64), 0.5).bool().tolist()


def _streams(rank: int = 0, size: int = 1, seed: int = SEED) -> RandomStreams:
    return RandomStreams(seed, lone_axis(rank, size), CPU)


def _interleaved_masks(streams: RandomStreams) -> dict[str, list[list[bool]]]:
    """Draw shared, own, shared, own."""
    shared, own = [], []
    for _ in range(2):
        shared.append(_mask())
        with streams.model_parallel():
            own.append(_mask())
    return {"shared": shared, "own": own}


def _masks_of_a_rank(context: ParallelContext) -> dict[str, list[list[bool]]]:
    streams = RandomStreams(SEED, context.tp, CPU)
    # The replicas take the micro-batches of a global batch in turn.
    streams.start(step=3, micro_batch=context.dp.rank)
    return _interleaved_masks(streams)


def test_shared_masks_are_shared_and_own_masks_differ(ranks) -> None:
    by_rank = ranks(ParallelLayout(tp=4), _masks_of_a_rank)
    assert all(masks["shared"] == by_rank[0]["shared"] for masks in by_rank)
    own = [str(mask) for masks in by_rank for mask in masks["own"]]
    assert len(set(own)) == len(own), "each rank's, and each draw's, is another"
    assert not set(own) & {str(mask) for mask in by_rank[0]["shared"]}


def test_masks_do_not_depend_on_the_data_parallel_size(ranks) -> None:
    on_two_replicas = ranks(ParallelLayout(tp=2, dp=2), _masks_of_a_rank)
    for tp_rank in range(2):
        streams = _streams(tp_rank, 2)
        for micro_batch in range(2):
            streams.start(step=3, micro_batch=micro_batch)
            expected = _interleaved_masks(streams)
            assert on_two_replicas[2 * micro_batch + tp_rank] == expected
    assert on_two_replicas[0]["shared"] != on_two_replicas[2]["shared"], "micro-batches drop different elements"


def test_the_shared_mask_is_the_same_at_every_tensor_parallel_size() -> None:
    masks = []
    for size in (1, 2, 4):
        _streams(size - 1, size).start(step=5, micro_batch=2)
        masks.append(_mask())
    assert masks[0] == masks[1] == masks[2]


def test_the_seeds_are_the_papers() -> None:
    streams = [_streams(rank, 4) for rank in range(4)]
    assert [s.shared_seed for s in streams] == [SEED] * 4
    assert [s.model_parallel_seed for s in streams] == [SEED + 2718 + rank for rank in range(4)]


def test_start_repeats_itself_and_tells_steps_apart() -> None:
    streams = _streams()
    drawn = {}
    for place in ((0, 0), (0, 1), (1, 0), (1, 1)):
        streams.start(*place)
        drawn[place] = _interleaved_masks(streams)
        _mask()  # whatever was drawn before
        streams.start(*place)
        assert _interleaved_masks(streams) == drawn[place]
    assert len({str(masks) for masks in drawn.values()}) == 4


def test_a_layer_draws_the_same_whatever_was_drawn_before() -> None:
    """So that a pipeline stage, which skips the layers before its own, drops what one process drops."""
    streams, masks = _streams(), {}
    streams.start(3, 1)
    for layer in range(4):
        streams.start_layer(layer)
        masks[layer] = _interleaved_masks(streams)
    for layer in (2, 0, 3):
        other = _streams()
        other.start(3, 1)
        other.start_layer(layer)
        assert _interleaved_masks(other) == masks[layer]
    streams.start(3, 1)
    assert len({str(mask) for mask in [*masks.values(), _interleaved_masks(streams)]}) == 5
    streams.start(3, 2)
    streams.start_layer(0)
    assert _interleaved_masks(streams) != masks[0], "another micro-batch"


def test_the_shared_stream_stands_still_inside() -> None:
    streams = _streams()
    streams.start(0, 0)
    expected = [_mask(), _mask()]
    streams.start(0, 0)
    first = _mask()
    with streams.model_parallel():
        _mask()
    assert [first, _mask()] == expected


def test_the_stream_is_put_back_after_an_error() -> None:
    streams = _streams()
    streams.start(0, 0)
    expected = _mask()
    streams.start(0, 0)
    with pytest.raises(RuntimeError, match="inside"), streams.model_parallel():
        raise RuntimeError("inside")
    assert _mask() == expected
    with streams.model_parallel(), pytest.raises(AssertionError, match="already in use"), streams.model_parallel():
        pass


def test_replaying_rewinds_both_streams_and_goes_on_afterwards() -> None:
    streams = _streams()
    streams.start(0, 0)
    states = streams.states()
    first, second = _interleaved_masks(streams), None
    with streams.replaying(states):
        assert _interleaved_masks(streams) == first
    second = _interleaved_masks(streams)
    streams.start(0, 0)
    assert [_interleaved_masks(streams), _interleaved_masks(streams)] == [first, second]


def test_the_checks_would_notice_one_stream_for_all(ranks) -> None:
    by_rank = ranks(ParallelLayout(tp=2), _masks_with_one_seed)
    assert by_rank[0]["own"] == by_rank[1]["own"], "the planted mistake is the one that is looked for"


def _masks_with_one_seed(context: ParallelContext) -> dict[str, list[list[bool]]]:
    with mock.patch.object(random_module, "mix_seed", lambda seed, *place: sum(place)):
        return _masks_of_a_rank(context)


def test_neighbouring_seeds_mix_apart() -> None:
    mixed = {mix_seed(seed, step, index) for seed in range(20) for step in range(20) for index in range(20)}
    assert len(mixed) == 20**3
    assert all(0 <= value < 2**63 for value in mixed)
    # torch's CPU generator keeps the low 32 bits of a seed only; those must differ as well.
    assert len({value & 0xFFFFFFFF for value in mixed}) == 20**3
    assert mix_seed(1, 2, 3) != mix_seed(1, 3, 2)
    # Every bit is a coin.
    bits = [sum(value >> bit & 1 for value in mixed) / len(mixed) for bit in range(63)]
    assert max(abs(bit - 0.5) for bit in bits) < 5 * 0.5 / len(mixed) ** 0.5
