"""The equivalence matrix: every option of the parallel engine with every other, against one process, in float64.

Each combination trains a small model for several steps on real gloo processes; losses, weights and both Adam moments
(the running sums of gradients) must equal those of one process with no option at all, to 1e-10. The suite runs
combinations that together contain every triple of values; `-m slow` runs the full product on up to 8 ranks and writes
`docs/matrix.json`.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megascale.config.layout import ParallelLayout
from megascale.config.schema import RunConfig
from megascale.model.grouped_query import GroupedQueryAttention
from megascale.optim import build
from megascale.parallel import recompute
from megascale.parallel.context import ParallelContext, single_process
from megascale.train.micro_batches import MicroBatchRunner
from tests.train.test_architectures import _queries_first
from tests.train.test_data_parallel import _buckets_leave_with_the_first_micro_batch, _nothing_is_gathered
from tests.train.test_equivalence import (
    _with_a_mean_of_means,
    _without_data_parallel_reduction,
    _without_the_all_reduce_of_f,
)
from tests.train.test_pipeline import _with_gradients_of_the_wrong_token, _with_the_first_layers_on_every_stage
from tests.train.training import Pieces, assemble, losses, small_config, train_on_rank

TOLERANCE = 1e-10
STEPS = 4

MODELS = {
    "gpt2-tied": {},
    "gpt2-untied": {"untie_embeddings_and_output_weights": True},
    "llama": {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "activation": "swiglu",
        "num_query_groups": 4,
        "num_attention_heads": 8,
        "ffn_hidden_size": 64,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
    },
}


@dataclass(frozen=True)
class Combination:
    """One cell of the matrix."""

    tp: int
    pp: int
    dp: int
    sequence_parallel: bool
    distributed_optimizer: bool
    overlap: bool
    recompute: str
    accumulation: int
    model: str
    mask: str
    interleaved: bool

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def is_valid(self) -> bool:
        """Whether the constraints allow it."""
        if self.sequence_parallel and self.tp == 1:
            return False
        if self.interleaved and (self.pp == 1 or self.accumulation % self.pp):
            return False
        return not (self.dp == 1 and self.distributed_optimizer)

    def __str__(self) -> str:
        flags = [f.name for f in fields(self) if getattr(self, f.name) is True]
        sizes = f"tp{self.tp}-pp{self.pp}-dp{self.dp}-x{self.accumulation}"
        return "-".join([sizes, self.model, self.mask, self.recompute, *flags])


PLAIN = Combination(1, 1, 1, False, False, False, "none", 1, "gpt2-tied", "dense", False)
VALUES = {
    "tp": (1, 2, 4),
    "pp": (1, 2),
    "dp": (1, 2),
    "sequence_parallel": (False, True),
    "distributed_optimizer": (False, True),
    "overlap": (False, True),
    "recompute": ("none", "selective", "full"),
    "accumulation": (1, 4),
    "model": tuple(MODELS),
    "mask": ("dense", "ragged"),
    "interleaved": (False, True),
}


def product(max_ranks: int) -> list[Combination]:
    """All valid combinations on up to so many ranks."""
    cells = (Combination(**dict(zip(VALUES, cell, strict=True))) for cell in itertools.product(*VALUES.values()))
    return [cell for cell in cells if cell.is_valid and cell.world_size <= max_ranks]


def triples(cell: Combination) -> set[tuple[tuple[str, object], ...]]:
    return set(itertools.combinations(asdict(cell).items(), 3))


def threewise(cells: list[Combination]) -> list[Combination]:
    """A few of the cells that together contain every triple of values that any of them contains, chosen greedily."""
    triples_of = {cell: triples(cell) for cell in cells}
    left = set().union(*triples_of.values())
    chosen = []
    while left:
        best = max(cells, key=lambda cell: (len(triples_of[cell] & left), -cell.world_size))
        left -= triples_of[best]
        chosen.append(best)
    return chosen


def config_of(cell: Combination):
    """The configuration of a cell; its layout comes from the ranks it runs on."""
    return small_config(
        model={"num_layers": 4, **MODELS[cell.model]},
        data={"eod_mask_loss": cell.mask == "ragged"},
        parallel={
            "tensor_model_parallel_size": cell.tp,
            "pipeline_model_parallel_size": cell.pp,
            "num_layers_per_virtual_pipeline_stage": 1 if cell.interleaved else None,
            "sequence_parallel": cell.sequence_parallel,
            "use_distributed_optimizer": cell.distributed_optimizer,
            "overlap_grad_reduce": cell.overlap,
            # Small enough for several buckets.
            **({"bucket_cap_mb": 0.05} if cell.overlap else {}),
        },
        train={
            "train_iters": STEPS,
            "eval_interval": STEPS,
            "micro_batch_size": 8 // (cell.dp * cell.accumulation),
            "recompute_granularity": cell.recompute,
        },
    )


def reference(model: str, mask: str, run: Path) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same training by one process, all options off."""
    cell = replace(PLAIN, model=model, mask=mask)
    return _losses_and_weights([train_on_rank(single_process(), config_of(cell), run)], run)


def _losses_and_weights(ranks_pieces, run: Path) -> tuple[list[float], dict[str, np.ndarray]]:
    return losses(run), assemble(ranks_pieces)


def difference(ours, theirs) -> float:
    """The largest difference in losses (relative) and in weights and moments (by 1 + |value|)."""
    assert ours[1].keys() == theirs[1].keys()
    largest = max(abs(a - b) / abs(b) for a, b in zip(ours[0], theirs[0], strict=True))
    for name, values in theirs[1].items():
        largest = max(largest, float((np.abs(ours[1][name] - values) / (1 + np.abs(values))).max()))
    return largest


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return {
        (model, mask): reference(model, mask, tmp_path_factory.mktemp(f"{model}-{mask}"))
        for model in MODELS
        for mask in VALUES["mask"]
    }


def run_cell(ranks, cell: Combination, run: Path):
    layout = ParallelLayout(tp=cell.tp, pp=cell.pp, dp=cell.dp)
    return _losses_and_weights(ranks(layout, train_on_rank, config_of(cell), run), run)


SUITE = threewise(product(max_ranks=4))


def test_the_suite_contains_every_triple_that_is_possible() -> None:
    assert set().union(*map(triples, SUITE)) == set().union(*map(triples, product(max_ranks=4)))
    assert len(SUITE) < 60


@pytest.mark.parametrize("cell", SUITE, ids=str)
def test_options_together_equal_one_process(ranks, references, tmp_path, cell: Combination) -> None:
    assert difference(run_cell(ranks, cell, tmp_path), references[cell.model, cell.mask]) < TOLERANCE


def _only_the_last_micro_batch(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    original = MicroBatchRunner.run

    def run_last(runner: MicroBatchRunner, micro_batches, *arguments, **named):
        return original(runner, micro_batches[-1:], *arguments, **named)

    with mock.patch.object(MicroBatchRunner, "run", run_last):
        return train_on_rank(context, config, run)


def _recomputed_without_a_gradient(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    def forget(function, x, **settings):
        return x + (function(x) - x).detach()

    with mock.patch.object(recompute, "checkpoint", forget):
        return train_on_rank(context, config, run)


def _partial_gradients_stay_partial(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    with mock.patch.object(build, "sum_partial_gradients"):
        return train_on_rank(context, config, run)


def _query_groups_cut_across_ranks(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    with mock.patch.object(GroupedQueryAttention, "heads", _queries_first):
        return train_on_rank(context, config, run)


# For each option a bug that it could have, and the changes to the plain cell that show it.
PLANTED = {
    "tp": (_without_the_all_reduce_of_f, {"tp": 2}),
    "pp": (_with_gradients_of_the_wrong_token, {"pp": 2, "accumulation": 4}),
    "dp": (_without_data_parallel_reduction, {"dp": 2}),
    "sequence_parallel": (_partial_gradients_stay_partial, {"tp": 2, "sequence_parallel": True}),
    "distributed_optimizer": (_nothing_is_gathered, {"dp": 2, "distributed_optimizer": True}),
    "overlap": (_buckets_leave_with_the_first_micro_batch, {"dp": 2, "overlap": True, "accumulation": 4}),
    "recompute": (_recomputed_without_a_gradient, {"recompute": "full"}),
    "accumulation": (_only_the_last_micro_batch, {"accumulation": 4}),
    "model": (_query_groups_cut_across_ranks, {"tp": 2, "model": "llama"}),
    "mask": (_with_a_mean_of_means, {"dp": 2, "mask": "ragged"}),
    "interleaved": (_with_the_first_layers_on_every_stage, {"pp": 2, "accumulation": 4, "interleaved": True}),
}


@pytest.mark.parametrize("option", VALUES)
def test_a_bug_planted_in_any_option_is_seen(ranks, references, tmp_path, option: str) -> None:
    planted, changes = PLANTED[option]
    cell = replace(PLAIN, **changes)
    layout = ParallelLayout(tp=cell.tp, pp=cell.pp, dp=cell.dp)
    pieces = ranks(layout, planted, config_of(cell), tmp_path)
    expected = references[cell.model, cell.mask]
    # Replicas that part from each other cannot be put together, so each rank's pieces are compared by themselves.
    found = max(
        float(
            np.abs(
                values - expected[1][name][tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))]
            ).max()
        )
        for rank in pieces
        for name, _, offset, values in rank
        if values.size
    )
    assert found > 1e4 * TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_full_product(ranks, references, tmp_path) -> None:
    """Every valid combination. MEGASCALE_MATRIX=FILE records each cell's difference; a rerun skips recorded cells."""
    record = Path(os.environ.get("MEGASCALE_MATRIX", tmp_path / "matrix.jsonl"))
    done = {line["cell"] for line in map(json.loads, record.read_text().splitlines())} if record.exists() else set()
    cells = [cell for cell in product(int(os.environ.get("MEGASCALE_MATRIX_RANKS", "8"))) if str(cell) not in done]
    wrong = []
    for number, cell in enumerate(sorted(cells, key=lambda cell: cell.world_size)):
        started = time.monotonic()
        found = difference(run_cell(ranks, cell, tmp_path / str(number)), references[cell.model, cell.mask])
        line = {"cell": str(cell), **asdict(cell), "difference": found, "seconds": time.monotonic() - started}
        with record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if not found < TOLERANCE:
            wrong.append((str(cell), found))
    assert wrong == []
