"""Recomputation changes neither a gradient nor a mask, bit for bit, and keeps less; and it costs what the paper counts.

On the tiny GPT, whose blocks draw from both dropout streams and hold every collective of the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from megascale.config.layout import ParallelLayout
from megascale.parallel import recompute as recompute_module
from megascale.parallel.collective_log import Collective
from megascale.parallel.context import ParallelContext, single_process
from megascale.parallel.random import RandomStreams, StreamStates
from tests.full import full_gradients
from tests.model.tiny import tiny_batch, tiny_gpt


def _gradients(context: ParallelContext, granularity: str, **changes: Any) -> dict[str, torch.Tensor]:
    """Two micro-batches' gradients."""
    model = tiny_gpt(context, torch.float32, recompute_granularity=granularity, **changes)
    for micro_batch in range(2):
        model.streams.start(step=5, micro_batch=micro_batch)
        model(*tiny_batch(seq_length=12, seed=micro_batch)).backward()
    return full_gradients(model)


def _num_unequal(
    context: ParallelContext,
    granularity: str,
    bug: str | None,
    hidden_dropout: float,
    attention_dropout: float,
    sequence_parallel: bool = False,
) -> int:
    """Count the parameters whose gradients differ in any bit."""
    changes = {"hidden_dropout": hidden_dropout, "attention_dropout": attention_dropout}
    changes["sequence_parallel"] = sequence_parallel
    kept = _gradients(context, "none", **changes)
    with mock.patch.object(RandomStreams, "replaying", _BROKEN_REPLAYS[bug]) if bug else nullcontext():
        again = _gradients(context, granularity, **changes)
    return sum(not torch.equal(kept[name], again[name]) for name in kept)


@contextmanager
def _replay_only_the_own_stream(streams: RandomStreams, states: StreamStates) -> Iterator[None]:
    now = streams.states()
    streams._restore(StreamStates(now.shared, states.model_parallel))
    yield
    streams._restore(now)


@contextmanager
def _replay_only_the_shared_stream(streams: RandomStreams, states: StreamStates) -> Iterator[None]:
    now = streams.states()
    streams._restore(StreamStates(states.shared, now.model_parallel))
    yield
    streams._restore(now)


_BROKEN_REPLAYS = {"own stream only": _replay_only_the_own_stream, "shared stream only": _replay_only_the_shared_stream}


@pytest.mark.parametrize("granularity", ["selective", "full"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_gradients_are_bit_equal_with_dropout_from_both_streams(ranks, granularity, tp, sequence_parallel) -> None:
    arguments = (granularity, None, 0.2, 0.2, sequence_parallel)
    assert ranks(ParallelLayout(tp=tp), _num_unequal, *arguments) == [0] * tp


@pytest.mark.parametrize(
    ("granularity", "bug", "dropouts", "sequence_parallel"),
    [
        ("full", "own stream only", (0.2, 0.0), False),
        ("full", "shared stream only", (0.0, 0.2), False),
        ("full", "shared stream only", (0.2, 0.0), True),
        ("selective", "shared stream only", (0.0, 0.2), False),
    ],
)
def test_a_stream_that_is_not_replayed_is_noticed(ranks, granularity, bug, dropouts, sequence_parallel) -> None:
    arguments = (granularity, bug, *dropouts, sequence_parallel)
    assert min(ranks(ParallelLayout(tp=2), _num_unequal, *arguments)) > 10


def test_the_streams_go_on_as_if_nothing_was_run_twice() -> None:
    after = []
    for granularity in ("none", "selective", "full"):
        dropouts = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
        model = tiny_gpt(single_process(), recompute_granularity=granularity, **dropouts)
        model(*tiny_batch()).backward()
        after.append(model.streams.states())
    for states in after[1:]:
        assert torch.equal(after[0].shared, states.shared)
        assert torch.equal(after[0].model_parallel, states.model_parallel)


@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_evaluation_recomputes_nothing(granularity: str) -> None:
    model = tiny_gpt(single_process(), recompute_granularity=granularity)
    with mock.patch.object(recompute_module, "checkpoint") as checkpoint, torch.no_grad():
        model(*tiny_batch())
    checkpoint.assert_not_called()


def _collectives(
    context: ParallelContext, granularity: str, num_layers: int, overlap: bool = False, bug: bool = False
) -> list[Collective]:
    changes: dict[str, Any] = {"num_layers": num_layers, "overlap": overlap}
    model = tiny_gpt(context, torch.float32, recompute_granularity=granularity, **changes)
    early_stop = mock.patch.object(recompute_module, "set_checkpoint_early_stop", return_value=nullcontext())
    with early_stop if bug else nullcontext(), context.recording() as records:
        model(*tiny_batch()).backward()
    return records


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_communication_is_what_the_paper_counts(ranks, num_layers: int, overlap: bool) -> None:
    """4L + 2 all-reduces of s*b*h, 6L + 2 with recomputation; 3 scalars per token in the loss; nothing else."""
    samples, sequence, hidden = 3, 10, 16
    plain = 4 * num_layers + 2
    for granularity, expected in (("none", plain), ("selective", plain), ("full", 6 * num_layers + 2)):
        for records in ranks(ParallelLayout(tp=2), _collectives, granularity, num_layers, overlap):
            assert {(record.op, record.axis) for record in records} == {("all_reduce", "tp")}
            activations = [record for record in records if record.num_elements == sequence * samples * hidden]
            assert len(activations) == expected
            rest = sum(record.num_elements for record in records if record not in activations)
            assert rest == 3 * sequence * samples
    assert ranks(ParallelLayout(tp=1), _collectives, "full", num_layers, overlap) == [[]]


def test_the_count_notices_a_skipped_all_reduce(ranks) -> None:
    """Torch's early stop leaves out each block's last all-reduce: 5L + 2."""
    records = ranks(ParallelLayout(tp=2), _collectives, "full", 3, False, True)[0]
    assert sum(record.num_elements == 3 * 10 * 16 for record in records) == 5 * 3 + 2
