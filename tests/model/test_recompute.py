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
from megascale.parallel.context import Collective, ParallelContext, single_process
from megascale.parallel.random import RandomStreams, StreamStates
from tests.full import full_gradients
from tests.model.tiny import tiny_batch, tiny_gpt


def _gradients(context: ParallelContext, recompute: bool, **changes: Any) -> dict[str, torch.Tensor]:
    """Two micro-batches' gradients."""
    model = tiny_gpt(context, torch.float32, recompute_granularity="full" if recompute else "none", **changes)
    for micro_batch in range(2):
        model.streams.start(step=5, micro_batch=micro_batch)
        model(*tiny_batch(seed=micro_batch)).backward()
    return full_gradients(model)


def _num_unequal(context: ParallelContext, bug: str | None, hidden_dropout: float, attention_dropout: float) -> int:
    """Count the parameters whose gradients differ in any bit."""
    changes = {"hidden_dropout": hidden_dropout, "attention_dropout": attention_dropout}
    kept = _gradients(context, False, **changes)
    with mock.patch.object(RandomStreams, "replaying", _BROKEN_REPLAYS[bug]) if bug else nullcontext():
        again = _gradients(context, True, **changes)
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


@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_are_bit_equal_with_dropout_from_both_streams(ranks, tp: int) -> None:
    assert ranks(ParallelLayout(tp=tp), _num_unequal, None, 0.2, 0.2) == [0] * tp


@pytest.mark.parametrize(("bug", "dropouts"), [("own stream only", (0.2, 0.0)), ("shared stream only", (0.0, 0.2))])
def test_a_stream_that_is_not_replayed_is_noticed(ranks, bug: str, dropouts: tuple[float, float]) -> None:
    assert min(ranks(ParallelLayout(tp=2), _num_unequal, bug, *dropouts)) > 10


def test_the_streams_go_on_as_if_nothing_was_run_twice() -> None:
    after = []
    for recompute in (False, True):
        model = tiny_gpt(single_process(), recompute_granularity="full" if recompute else "none", hidden_dropout=0.1, attention_dropout=0.1)
        model(*tiny_batch()).backward()
        after.append(model.streams.states())
    assert torch.equal(after[0].shared, after[1].shared)
    assert torch.equal(after[0].model_parallel, after[1].model_parallel)


def _saved_bytes(recompute: bool, num_layers: int) -> int:
    """The bytes that autograd keeps between the forward and the backward pass, shared storage once."""
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model = tiny_gpt(single_process(), recompute_granularity="full" if recompute else "none", num_layers=num_layers, hidden_dropout=0.1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(*tiny_batch())
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    loss.backward()
    return sum(storages.values())


def test_a_layer_keeps_its_input_and_no_more() -> None:
    tokens, _, _ = tiny_batch()
    input_bytes = tokens.numel() * 16 * 8
    per_layer = {
        recompute: (_saved_bytes(recompute, 6) - _saved_bytes(recompute, 2)) / 4 for recompute in (False, True)
    }
    assert per_layer[True] == pytest.approx(input_bytes, rel=0.01)
    assert per_layer[False] > 15 * input_bytes


def test_evaluation_recomputes_nothing() -> None:
    model = tiny_gpt(single_process(), recompute_granularity="full")
    with mock.patch("megascale.model.gpt.recompute") as recompute, torch.no_grad():
        model(*tiny_batch())
    recompute.assert_not_called()


def _collectives(context: ParallelContext, recompute: bool, num_layers: int, bug: bool = False) -> list[Collective]:
    model = tiny_gpt(context, torch.float32, recompute_granularity="full" if recompute else "none", num_layers=num_layers)
    early_stop = mock.patch.object(recompute_module, "set_checkpoint_early_stop", return_value=nullcontext())
    with early_stop if bug else nullcontext(), context.recording() as records:
        model(*tiny_batch()).backward()
    return records


@pytest.mark.parametrize("num_layers", [1, 3])
def test_communication_is_what_the_paper_counts(ranks, num_layers: int) -> None:
    """4L + 2 all-reduces of s*b*h, 6L + 2 with recomputation; 3 scalars per token in the loss; nothing else."""
    samples, sequence, hidden = 3, 10, 16
    for recompute, expected in ((False, 4 * num_layers + 2), (True, 6 * num_layers + 2)):
        for records in ranks(ParallelLayout(tp=2), _collectives, recompute, num_layers):
            assert {(record.op, record.axis) for record in records} == {("all_reduce", "tp")}
            activations = [record for record in records if record.num_elements == sequence * samples * hidden]
            assert len(activations) == expected
            rest = sum(record.num_elements for record in records if record not in activations)
            assert rest == 3 * sequence * samples
    assert ranks(ParallelLayout(tp=1), _collectives, True, num_layers) == [[]]


def test_the_count_notices_a_skipped_all_reduce(ranks) -> None:
    """Torch's early stop leaves out each block's last all-reduce: 5L + 2."""
    records = ranks(ParallelLayout(tp=2), _collectives, True, 3, True)[0]
    assert sum(record.num_elements == 3 * 10 * 16 for record in records) == 5 * 3 + 2
