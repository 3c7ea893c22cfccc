"""The equivalence matrix: every option of the parallel engine with every other, against one process, in float64.

Each combination trains a small model for several steps on real gloo processes; losses, weights and both Adam moments
(the running sums of gradients) must equal those of one process with no option at all, to 1e-10. The suite runs
combinations that together contain every pair of values; `-m slow` runs the full product on up to 8 ranks and writes
`docs/matrix.json`.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import pytest

from megascale.config.layout import ParallelLayout
from megascale.parallel.context import single_process
from tests.train.training import assemble, losses, small_config, train_on_rank

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


def pairs(cell: Combination) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    return set(itertools.combinations(asdict(cell).items(), 2))


def pairwise(cells: list[Combination]) -> list[Combination]:
    """A few of the cells that together contain every pair of values that any of them contains, chosen greedily."""
    left = set().union(*map(pairs, cells))
    chosen = []
    while left:
        best = max(cells, key=lambda cell: (len(pairs(cell) & left), -cell.world_size))
        left -= pairs(best)
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
    cell = Combination(1, 1, 1, False, False, False, "none", 1, model, mask, False)
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


SUITE = pairwise(product(max_ranks=4))


def test_the_suite_contains_every_pair_that_is_possible() -> None:
    covered = set().union(*map(pairs, SUITE))
    assert covered == set().union(*map(pairs, product(max_ranks=4)))
    assert len(SUITE) < 40


@pytest.mark.parametrize("cell", SUITE, ids=str)
def test_pairs_of_options_equal_one_process(ranks, references, tmp_path, cell: Combination) -> None:
    assert difference(run_cell(ranks, cell, tmp_path), references[cell.model, cell.mask]) < TOLERANCE


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
