"""What two pipeline stages hold lies and is cut alike on both, however different the rest of their buffers is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megascale.config.layout import ParallelLayout
from megascale.optim.distributed import own_stretches
from megascale.optim.flat import ROW, FlatLayout
from megascale.parallel.context import Axis, ParallelContext, single_process
from megascale.parallel.sharding import Constant, DeclaredParameter, ParameterSpec
from tests.axes import lone_axis
from tests.train.training import assemble, small_config, train_on_rank


def _declared(name: str, rows: int, shared: bool = False, partial: bool = False) -> DeclaredParameter:
    spec = ParameterSpec((rows, 5), None if partial else 0, Constant(0.0), True, partial)
    copies = lone_axis(0, 2, "pp_ends") if shared else None
    return DeclaredParameter(name, nn.Parameter(torch.zeros(rows, 5)), spec, single_process().tp, copies)


FIRST_STAGE = [_declared("embedding", 301, shared=True), _declared("positions", 40, partial=True), _declared("a", 77)]
LAST_STAGE = [_declared("b", 500), _declared("norm", 1, partial=True), _declared("embedding", 301, shared=True)]


def _shares(declared: list[DeclaredParameter], dp: Axis, largest: int) -> list[tuple[int, int]]:
    """This rank's stretches of the shared parameter, counted from where it starts."""
    layout = FlatLayout(declared, dp.size)
    buckets = layout.cut(largest)
    assert [b.start for b in buckets] == [0, *(b.stop for b in buckets[:-1])]
    assert buckets[-1].stop == layout.size
    assert all((b.stop - b.start) % (ROW * dp.size) == 0 for b in buckets)
    (index,) = [i for i, d in enumerate(layout.declared) if d.copies is not None]
    assert layout.offsets[index] == layout.shared.start
    shared = layout.shared
    stretches = [s for s in own_stretches(buckets, dp) if s.start < shared.stop and s.stop > shared.start]
    assert all(shared.start <= s.start and s.stop <= shared.stop for s in stretches), "inside or outside"
    return [(s.start - shared.start, s.stop - shared.start) for s in stretches]


@pytest.mark.parametrize("largest", [ROW, 500, 1 << 20])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_both_stages_cut_what_they_share_alike(num_shards: int, largest: int) -> None:
    for rank in range(num_shards):
        dp = lone_axis(rank, num_shards, "dp")
        assert _shares(FIRST_STAGE, dp, largest) == _shares(LAST_STAGE, dp, largest) != []


def test_without_shared_parameters_nothing_is_padded() -> None:
    plain = [_declared("a", 77), _declared("b", 13)]
    layout = FlatLayout(plain, 2)
    assert layout.offsets == [0, 2 * ROW], "65 elements of b, then a"
    assert layout.size == 10 * ROW, "9 rows, in two shards"
    assert layout.cut(1 << 20) == [slice(0, layout.size)]
    assert layout.shared == slice(layout.size, layout.size)


def _train(context: ParallelContext, parallel: dict[str, Any], run: Any) -> Any:
    changes = {"pipeline_model_parallel_size": 2, **parallel}
    config = small_config(
        # The table begins in the second third of a stage's buffer and ends in the last, where a ring of three ranks
        # adds in another order; the stages' buffers differ in size.
        model={"num_layers": 2, "make_vocab_size_divisible_by": 256, "max_position_embeddings": 64},
        parallel=changes,
        train={"micro_batch_size": 2, "global_batch_size": 12, "train_iters": 4, "params_dtype": "float32"},
    )
    return train_on_rank(context, config, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{}, {"overlap_grad_reduce": True, "bucket_cap_mb": 0.01}, {"use_distributed_optimizer": True}],
    ids=["plain", "overlap", "sharded"],
)
def test_copies_stay_equal_over_three_replicas(ranks, tmp_path, parallel) -> None:
    """A sum of three depends on its order; `assemble` compares the two stages' copies bit by bit."""
    pieces = ranks(ParallelLayout(pp=2, dp=3), _train, parallel, tmp_path)
    assert np.isfinite(assemble(pieces)["model.word_embedding.weight"]).all()
