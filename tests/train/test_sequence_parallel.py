"""Sequence parallelism trains the same model: losses and weights after 20 steps equal those of one process.

The same comparison as in `test_equivalence.py`, in float64, with its planted bugs; and what a step communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megascale.config.layout import ParallelLayout
from megascale.config.schema import RunConfig
from megascale.optim import build
from megascale.parallel import boundary
from megascale.parallel.boundary import SequenceBoundary
from megascale.parallel.context import Axis, Collective, ParallelContext, single_process
from megascale.parallel.sharding import declared_parameters
from tests.train.test_equivalence import _difference
from tests.train.training import Pieces, assemble, build_trainer, losses, small_config, train_on_rank

EXACT = 1e-10
HIDDEN, LAYERS, SEQUENCE = 32, 2, 16


def _config(dp: int = 1, accumulation: int = 1, recompute: str = "none", overlap: bool = True) -> RunConfig:
    return small_config(
        train={"micro_batch_size": 8 // (dp * accumulation), "recompute_granularity": recompute},
        parallel={"sequence_parallel": True, "async_tensor_model_parallel_allreduce": overlap},
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, np.ndarray]]:
    run = tmp_path_factory.mktemp("reference")
    weights = assemble([train_on_rank(single_process(), small_config(), run)])
    return losses(run), weights


@pytest.mark.parametrize(
    ("tp", "dp", "accumulation", "recompute", "overlap"),
    [
        (1, 1, 1, "none", True),
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
    config = _config(dp, accumulation, recompute, overlap)
    weights = assemble(ranks(ParallelLayout(tp=tp, dp=dp), train_on_rank, config, tmp_path))
    assert losses(tmp_path) == pytest.approx(reference[0], rel=EXACT)
    assert _difference(weights, reference[1]) < EXACT
