"""A pipeline trains the model that one process trains: losses, weights, checkpoints, dropout masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megascale.config.layout import ParallelLayout
from megascale.parallel.context import single_process
from tests.train.training import assemble, losses, small_config, train_on_rank

_NUM_HEADS = 4
TOLERANCE = 1e-10


def _config(dp: int = 1, accumulation: int = 4, depth: int | None = None, **changes):
    """Four layers, ragged masks, clipped gradients."""
    sections = {
        "model": {"num_layers": 4, **changes.pop("model", {})},
        "train": {
            "micro_batch_size": 8 // (dp * accumulation),
            "train_iters": 8,
            "eval_interval": 4,
            **changes.pop("train", {}),
        },
        **changes,
    }
    if depth is not None:
        sections["parallel"] = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": depth}
    return small_config(**sections)


def _difference(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    assert ours.keys() == reference.keys()
    largest = 0.0
    for name in reference:
        if name.startswith("model."):
            difference = np.abs(ours[name] - reference[name]) / (1 + np.abs(reference[name]))
            if name.endswith("qkv.bias"):
                difference = difference.reshape(_NUM_HEADS, 3, -1)[:, [0, 2]]
            largest = max(largest, difference.max())
    return largest


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    run = tmp_path_factory.mktemp("reference")
    weights = assemble([train_on_rank(single_process(), _config(accumulation=1), run)])
    return losses(run), weights


@pytest.mark.parametrize(
    ("layout", "depth"),
    [
        (ParallelLayout(pp=2), None),
        (ParallelLayout(pp=4), None),
        (ParallelLayout(pp=2, tp=2), None),
        (ParallelLayout(pp=2, dp=2), None),
        (ParallelLayout(pp=2), 1),
        (ParallelLayout(pp=2, dp=2), 1),
    ],
)
def test_a_pipeline_equals_one_process(ranks, reference, tmp_path, layout, depth) -> None:
    reference_losses, reference_weights = reference
    weights = assemble(ranks(layout, train_on_rank, _config(layout.dp, depth=depth), tmp_path))
    assert losses(tmp_path) == pytest.approx(reference_losses, rel=TOLERANCE)
    print(_difference(weights, reference_weights))
    assert _difference(weights, reference_weights) < TOLERANCE
