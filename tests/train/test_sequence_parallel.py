"""Sequence parallelism trains the same model: losses and weights after 20 steps equal those of one process.

The same comparison as in `test_equivalence.py`, in float64, with its planted bugs; and what a step communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megascale.checkpoint.manifest import find_latest
from megascale.config.layout import ParallelLayout
from megascale.config.schema import RunConfig
from megascale.optim import build
from megascale.parallel import boundary
from megascale.parallel.boundary import SequenceBoundary
from megascale.parallel.collective_log import Collective
from megascale.parallel.collectives import gather_from_ranks
from megascale.parallel.context import Axis, ParallelContext, single_process
from megascale.parallel.sharding import declared_parameters
from tests.train.test_equivalence import _difference
from tests.train.training import Pieces, assemble, build_trainer, exact_records, losses, small_config, train_on_rank

EXACT = 1e-10
HIDDEN, LAYERS, SEQUENCE = 32, 2, 16


def _config(tp: int, dp: int = 1, accumulation: int = 1, recompute: str = "none", overlap: bool = True) -> RunConfig:
    return small_config(
        train={"micro_batch_size": 8 // (dp * accumulation), "recompute_granularity": recompute},
        parallel={
            "tensor_model_parallel_size": tp,
            "sequence_parallel": True,
            "async_tensor_model_parallel_allreduce": overlap,
        },
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, np.ndarray]]:
    run = tmp_path_factory.mktemp("reference")
    weights = assemble([train_on_rank(single_process(), small_config(), run)])
    return losses(run), weights


@pytest.mark.parametrize(
    ("tp", "dp", "accumulation", "recompute", "overlap"),
    [
        (2, 1, 1, "none", True),
        (2, 1, 4, "none", False),
        (2, 1, 1, "selective", True),
        (2, 2, 4, "full", True),
        (2, 2, 1, "none", True),
        (4, 1, 1, "none", True),
        (4, 1, 4, "selective", False),
        (4, 1, 1, "full", True),
    ],
)
def test_it_equals_one_process(ranks, reference, tmp_path, tp, dp, accumulation, recompute, overlap) -> None:
    config = _config(tp, dp, accumulation, recompute, overlap)
    weights = assemble(ranks(ParallelLayout(tp=tp, dp=dp), train_on_rank, config, tmp_path))
    assert losses(tmp_path) == pytest.approx(reference[0], rel=EXACT)
    assert _difference(weights, reference[1]) < EXACT


def _without(target: object, name: str, replacement: Callable[..., Any]) -> Callable[..., Pieces]:
    """Return a function that trains with one thing replaced."""

    def train(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
        with mock.patch.object(target, name, replacement):
            return train_on_rank(context, config, run)

    return train


def _train_with_bug(context: ParallelContext, config: RunConfig, run: Path, bug: str) -> Pieces:
    return _BUGS[bug](context, config, run)


_REDUCE_SCATTER = Axis.reduce_scatter

_BUGS: dict[str, Callable[..., Pieces]] = {
    "partial gradients are not summed": _without(build, "sum_partial_gradients", lambda gradients, tp: None),
    "nothing is declared partial": _without(SequenceBoundary, "gradient_is_partial", False),
    "every rank adds the first positions": _without(
        SequenceBoundary, "outside", lambda self, x: x[: x.shape[0] // self.axis.size]
    ),
    "the head's gradient is not summed": _without(
        boundary, "gather_sequence", lambda x, axis: gather_from_ranks(x, axis, 0)
    ),
    "reduce-scatter keeps its own part": _without(
        Axis, "reduce_scatter", lambda self, x: self.shard(x, 0) if x.requires_grad else _REDUCE_SCATTER(self, x)
    ),
}


@pytest.mark.parametrize("bug", _BUGS)
def test_planted_bugs_are_seen(ranks, reference, tmp_path, bug: str) -> None:
    first = ranks(ParallelLayout(tp=2), _train_with_bug, _config(tp=2), tmp_path, bug)[0]
    largest = 0.0
    for name, _, offset, values in first:
        if name.startswith("model."):
            where = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            largest = max(largest, np.abs(values - reference[1][name][where]).max())
    assert largest > 1e-6


def _communication_of_a_step(context: ParallelContext, config: RunConfig, run: Path) -> list[Collective]:
    trainer = build_trainer(context, config, run)
    batch = trainer.train_loader.batch(0)
    with context.recording() as records:
        trainer._train_step(batch)
    trainer.metrics.__exit__(None, None, None)
    return [record for record in records if record.axis == "tp"]


def _ring_bytes(record: Collective, size: int) -> float:
    """The bytes that each rank sends when the collective goes round a ring of `size` ranks."""
    steps = {"all_reduce": 2 * (size - 1) / size, "reduce_scatter": (size - 1) / size, "all_gather": size - 1}
    return steps[record.op] * record.num_bytes


def _is_activation(record: Collective, samples: int, tp: int) -> bool:
    whole = SEQUENCE * samples * HIDDEN
    return record.num_elements == (whole // tp if record.op == "all_gather" else whole)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("recompute", "per_layer", "without"),
    [("none", (6, 4), 4), ("selective", (6, 4), 4), ("full", (8, 6), 6)],
)
def test_what_a_step_communicates(ranks, tmp_path, tp, recompute, per_layer, without) -> None:
    """Reduce-scatters and all-gathers of activations in place of all-reduces; and one message for partial gradients.

    Per layer: the all-reduce of each f and g becomes one of either; and each of the two entering products gathers its
    input once more in the backward pass.
    """
    layout, samples = ParallelLayout(tp=tp), 8
    for records in ranks(layout, _communication_of_a_step, _config(tp, recompute=recompute), tmp_path / "split"):
        activations = [record for record in records if _is_activation(record, samples, tp)]
        ops = [record.op for record in activations]
        assert ops.count("all_gather") == per_layer[0] * LAYERS + 2
        assert ops.count("reduce_scatter") == per_layer[1] * LAYERS + 2
        assert ops.count("all_reduce") == 0
        unit = SEQUENCE * samples * HIDDEN * 8 * (tp - 1) / tp
        split_bytes = sum(_ring_bytes(record, tp) for record in activations)
        assert split_bytes == pytest.approx((sum(per_layer) * LAYERS + 4) * unit)
        rest = [record.num_elements for record in records if record not in activations]
        # Norms and row biases of each layer, positions, final norm; each padded to 64 in the buffer.
        partial = LAYERS * 6 * 64 + SEQUENCE * HIDDEN + 2 * 64
        assert sorted(rest) == sorted([SEQUENCE * samples, 2 * SEQUENCE * samples, partial, 1])
    plain = small_config(parallel={"tensor_model_parallel_size": tp}, train={"recompute_granularity": recompute})
    records = ranks(layout, _communication_of_a_step, plain, tmp_path / "plain")[0]
    activations = [record for record in records if _is_activation(record, samples, tp)]
    assert [record.op for record in activations] == ["all_reduce"] * (without * LAYERS + 2)
    plain_bytes = sum(_ring_bytes(record, tp) for record in activations)
    # An all-reduce costs a reduce-scatter and an all-gather: what is added is the second gathering, 2 a layer.
    assert split_bytes - plain_bytes == pytest.approx(2 * LAYERS * unit)


def test_partial_gradients_are_summed_once_per_update(ranks, tmp_path) -> None:
    """However many micro-batches."""
    config = _config(tp=2, accumulation=4)
    records = ranks(ParallelLayout(tp=2), _communication_of_a_step, config, tmp_path)[0]
    partial = LAYERS * 6 * 64 + SEQUENCE * HIDDEN + 2 * 64
    assert [record.num_elements for record in records].count(partial) == 1


def _partial_parameters(context: ParallelContext, config: RunConfig, run: Path) -> set[str]:
    trainer = build_trainer(context, config, run)
    trainer.metrics.__exit__(None, None, None)
    return {d.name for d in declared_parameters(trainer.model) if d.spec.gradient_is_partial}


def test_every_replicated_parameter_lies_outside_and_no_split_one(ranks, tmp_path) -> None:
    layer = {"attention_norm.weight", "attention_norm.bias", "mlp_norm.weight", "mlp_norm.bias"}
    layer |= {"attention.output.bias", "mlp.down.bias"}
    expected = {f"blocks.{index}.{name}" for index in range(LAYERS) for name in layer}
    expected |= {"final_norm.weight", "final_norm.bias", "position_embedding.weight"}
    assert ranks(ParallelLayout(tp=2), _partial_parameters, _config(tp=2), tmp_path) == [expected] * 2


def _stop_and_resume(context: ParallelContext, config: RunConfig, run: Path) -> None:
    train_on_rank(context, replace(config, train=replace(config.train, exit_interval=7)), run)
    latest = find_latest(run)
    assert latest is not None
    train_on_rank(context, config, run, load=latest)


def _saving(config: RunConfig, **model: float) -> RunConfig:
    return replace(config, model=replace(config.model, **model), checkpoint=replace(config.checkpoint, save="run"))


def test_stop_and_resume_is_bitwise_the_uninterrupted_run(ranks, tmp_path) -> None:
    """With dropout from the ranks' own streams, recomputed."""
    config = _saving(_config(tp=2, accumulation=4, recompute="full"), hidden_dropout=0.2, attention_dropout=0.2)
    whole = assemble(ranks(ParallelLayout(tp=2), train_on_rank, config, tmp_path / "whole"))
    ranks(ParallelLayout(tp=2), _stop_and_resume, config, tmp_path / "parts")
    latest = find_latest(tmp_path / "parts")
    assert exact_records(tmp_path / "parts") == exact_records(tmp_path / "whole")
    again = assemble(ranks(ParallelLayout(tp=2), train_on_rank, config, tmp_path / "again", latest))
    assert all(np.array_equal(again[name], values) for name, values in whole.items())


def test_a_checkpoint_does_not_know_of_it(ranks, reference, tmp_path) -> None:
    """Half the run with the sequence split over two ranks, half on one process, and the other way round."""
    split, plain = _saving(_config(tp=2)), _saving(small_config())
    stops = {"exit_interval": 10}
    ranks(ParallelLayout(tp=2), train_on_rank, replace(split, train=replace(split.train, **stops)), tmp_path / "split")
    weights = assemble([train_on_rank(single_process(), plain, tmp_path / "on", find_latest(tmp_path / "split"))])
    assert _difference(weights, reference[1]) < EXACT
    train_on_rank(single_process(), replace(plain, train=replace(plain.train, **stops)), tmp_path / "plain")
    latest = find_latest(tmp_path / "plain")
    weights = assemble(ranks(ParallelLayout(tp=2), train_on_rank, split, tmp_path / "off", latest))
    assert _difference(weights, reference[1]) < EXACT
