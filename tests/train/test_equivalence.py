"""Every layout trains the same model: losses and weights after 20 steps equal those of one process.

The reference is one process with no accumulation. Batches are ragged (no loss after an end-of-document token), the
vocabulary is padded, gradients are clipped.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megascale.config.layout import ParallelLayout
from megascale.optim.build import ModelOptimizer
from megascale.parallel.boundary import Boundary
from megascale.parallel.context import Axis, ParallelContext, single_process
from tests.train.training import assemble, build_trainer, losses, pieces, small_config, train_on_rank

# (tp, dp, accumulation)
LAYOUTS = [(tp, dp, accumulation) for tp, dp in [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)] for accumulation in (1, 4)]
_NUM_HEADS = 4
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def _config(dtype: str, dp: int = 1, accumulation: int = 1):
    return small_config(train={"params_dtype": dtype, "micro_batch_size": 8 // (dp * accumulation)})


def _difference(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    """The largest |ours - reference| / (1 + |reference|) over the weights.

    Key biases are left out: the softmax does not see them, so their gradient is 0 but for rounding, which Adam scales
    up to steps of any size. They change no output.
    """
    assert ours.keys() == reference.keys()
    largest = 0.0
    for name in reference:
        if name.startswith("model."):
            difference = np.abs(ours[name] - reference[name]) / (1 + np.abs(reference[name]))
            if name.endswith("qkv.bias"):
                difference = difference.reshape(_NUM_HEADS, 3, -1)[:, [0, 2]]
            largest = max(largest, difference.max())
    return largest


@pytest.fixture(scope="module", params=["float64", "float32"])
def reference(request, tmp_path_factory):
    run = tmp_path_factory.mktemp("reference")
    weights = assemble([train_on_rank(single_process(), _config(request.param), run)])
    assert losses(run)[0] > losses(run)[19] + 0.2, "the reference learns something"
    return request.param, losses(run), weights


@pytest.mark.parametrize(("tp", "dp", "accumulation"), LAYOUTS[1:])
def test_any_layout_and_accumulation_equals_one_process(ranks, reference, tmp_path, tp, dp, accumulation) -> None:
    dtype, reference_losses, reference_weights = reference
    config = _config(dtype, dp, accumulation)
    weights = assemble(ranks(ParallelLayout(tp=tp, dp=dp), train_on_rank, config, tmp_path))
    assert losses(tmp_path) == pytest.approx(reference_losses, rel=TOLERANCE[dtype])
    assert _difference(weights, reference_weights) < TOLERANCE[dtype]


def _without_data_parallel_reduction(context: ParallelContext, config, run: Path):
    trainer = build_trainer(context, config, run)
    reducer = trainer.optimizer._reducer
    reducer._sum = replace(reducer._sum, dp=single_process().dp)
    with trainer.metrics:
        trainer.fit()
    return pieces(trainer.optimizer)


def _without_the_all_reduce_of_f(context: ParallelContext, config, run: Path):
    with (
        mock.patch.object(Boundary, "enter", lambda self, x: x),
        mock.patch.object(Boundary, "enter_linear", lambda self, x, weight, bias: F.linear(x, weight, bias)),
    ):
        return train_on_rank(context, config, run)


def _with_replicated_gradients_counted_on_every_rank(context: ParallelContext, config, run: Path):
    trainer = build_trainer(context, config, run)
    norm = trainer.optimizer._norm
    norm._counted = [torch.ones_like(counted) for counted in norm._counted]
    with trainer.metrics:
        trainer.fit()
    return pieces(trainer.optimizer)


def _with_a_mean_of_means(context: ParallelContext, config, run: Path):
    """Each rank divides by its own token count, and the ranks' gradients are averaged."""
    trainer = build_trainer(context, config, run)
    step = ModelOptimizer.step

    def mean_of_means(optimizer: ModelOptimizer, normaliser: float):
        counted = trainer.local_tokens * context.dp.size
        nominal = trainer.samples_per_step * trainer._seq_length
        optimizer.gradients.flat *= nominal / counted
        return step(optimizer, 1.0)

    original = Axis.sum_floats

    def note_local_tokens(axis: Axis, values: list[float]) -> list[float]:
        if axis.name == "world" and len(values) == 3:
            trainer.local_tokens = values[1]
        return original(axis, values)

    Axis.sum_floats, ModelOptimizer.step = note_local_tokens, mean_of_means
    try:
        with trainer.metrics:
            trainer.fit()
    finally:
        Axis.sum_floats, ModelOptimizer.step = original, step
    return pieces(trainer.optimizer)


@pytest.mark.parametrize(
    ("planted", "tp", "dp"),
    [
        (_without_data_parallel_reduction, 1, 2),
        (_without_the_all_reduce_of_f, 2, 1),
        (_with_replicated_gradients_counted_on_every_rank, 2, 1),
        (_with_a_mean_of_means, 1, 2),
    ],
)
def test_planted_bugs_are_seen(ranks, tmp_path, planted, tp, dp) -> None:
    reference = assemble([train_on_rank(single_process(), _config("float64"), tmp_path / "reference")])
    ranks_pieces = ranks(ParallelLayout(tp=tp, dp=dp), planted, _config("float64", dp), tmp_path / "planted")
    # Broken replicas part from each other, so look at the first rank's pieces only.
    first = ranks_pieces[0]
    differences = [
        np.abs(
            values - reference[name][tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))]
        ).max()
        for name, _, offset, values in first
        if name.startswith("model.")
    ]
    assert max(differences) > 1e-6


def _communication_of_a_step(context: ParallelContext, config, run: Path) -> list[tuple[str, str]]:
    trainer = build_trainer(context, config, run)
    batch = trainer.train_loader.batch(0)
    with context.recording() as records:
        trainer._train_step(batch)
    trainer.metrics.__exit__(None, None, None)
    return [(record.op, record.axis) for record in records]


def test_one_data_parallel_reduction_per_update(ranks, tmp_path) -> None:
    """However many micro-batches; beside it, one message of three numbers over the world."""
    config = _config("float64", dp=2, accumulation=4)
    collectives = ranks(ParallelLayout(dp=2), _communication_of_a_step, config, tmp_path)[0]
    assert collectives.count(("all_reduce", "dp")) == 1
    assert collectives.count(("all_reduce", "world")) == 1
    assert len(collectives) == 2


def _dropout_losses(context: ParallelContext, config, run: Path) -> None:
    train_on_rank(context, config, run)


def test_dropout_masks_do_not_depend_on_data_parallel_size_or_accumulation(ranks, tmp_path) -> None:
    """With equal micro-batches, so that masks have equal shapes."""
    config = small_config(train={"micro_batch_size": 2}, model={"hidden_dropout": 0.2, "attention_dropout": 0.2})
    train_on_rank(single_process(), config, tmp_path / "one")
    ranks(ParallelLayout(dp=2), _dropout_losses, config, tmp_path / "two")
    ranks(ParallelLayout(dp=4), _dropout_losses, config, tmp_path / "four")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)
    other_seed = small_config(
        train={"micro_batch_size": 2, "seed": 5}, model={"hidden_dropout": 0.2, "attention_dropout": 0.2}
    )
    train_on_rank(single_process(), other_seed, tmp_path / "other")
    assert losses(tmp_path / "other") != pytest.approx(losses(tmp_path / "one"), rel=1e-3)


def test_float64_means_float64(tmp_path) -> None:
    trainer = build_trainer(single_process(), _config("float64"), tmp_path)
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float64}
