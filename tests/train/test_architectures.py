"""A Llama and a post-norm transformer train the same on every layout: losses and weights after 20 steps, in float64.

The reference is one process without accumulation, as in `test_equivalence.py`; batches are ragged, the vocabulary is
padded, gradients are clipped.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megascale.checkpoint.manifest import find_latest
from megascale.config.layout import ParallelLayout
from megascale.config.schema import CheckpointConfig, RunConfig
from megascale.model.grouped_query import GroupedQueryAttention
from megascale.parallel.boundary import SequenceBoundary
from megascale.parallel.context import ParallelContext, single_process
from tests.train.training import Pieces, assemble, losses, small_config, train_on_rank

EXACT = 1e-10
SHAPE = {"num_attention_heads": 8, "ffn_hidden_size": 40}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SHAPE
    | {
        "num_query_groups": 4,
        "position_embedding_type": "rope",
        "rotary_base": 100.0,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        # Large enough for positions and attention to matter from the start.
        "init_method_std": 0.2,
    },
    "post-norm": SHAPE | {"norm_position": "post", "activation": "relu", "init_method_std": 0.2},
}
# (tp, dp, pp, accumulation, sequence parallel, recompute granularity)
LAYOUTS = [
    (2, 1, 1, 4, False, "none"),
    (2, 1, 1, 1, True, "selective"),
    (4, 1, 1, 1, True, "full"),
    (1, 2, 1, 4, False, "full"),
    (2, 2, 1, 1, True, "none"),
    (1, 1, 2, 4, False, "none"),
    (2, 1, 2, 4, True, "full"),
]


def _config(
    name: str,
    tp: int = 1,
    dp: int = 1,
    pp: int = 1,
    accumulation: int = 1,
    sequence_parallel: bool = False,
    recompute_granularity: str = "none",
) -> RunConfig:
    return small_config(
        model=MODELS[name],
        parallel={
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "sequence_parallel": sequence_parallel,
        },
        train={"micro_batch_size": 8 // (dp * accumulation), "recompute_granularity": recompute_granularity},
    )


def _difference(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    """The largest |ours - reference| / (1 + |reference|) over the weights, without key biases that nothing turns.

    Their gradient is 0 but for rounding, which Adam scales up (see `test_equivalence.py`).
    """
    assert ours.keys() == reference.keys()
    largest = 0.0
    for name in reference:
        if name.startswith("model."):
            difference = np.abs(ours[name] - reference[name]) / (1 + np.abs(reference[name]))
            if name.endswith("qkv.bias"):
                difference = difference.reshape(SHAPE["num_attention_heads"], 3, -1)[:, [0, 2]]
            largest = max(largest, difference.max())
    return largest


@pytest.fixture(scope="module", params=MODELS)
def reference(request, tmp_path_factory) -> tuple[str, list[float], dict[str, np.ndarray]]:
    run = tmp_path_factory.mktemp("reference")
    weights = assemble([train_on_rank(single_process(), _config(request.param), run)])
    assert losses(run)[0] > losses(run)[19] + 0.2, "the reference learns something"
    return request.param, losses(run), weights


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_equals_one_process(ranks, reference, tmp_path, layout) -> None:
    name, reference_losses, reference_weights = reference
    tp, dp, pp, *_ = layout
    weights = assemble(ranks(ParallelLayout(tp=tp, dp=dp, pp=pp), train_on_rank, _config(name, *layout), tmp_path))
    assert losses(tmp_path) == pytest.approx(reference_losses, rel=EXACT)
    assert _difference(weights, reference_weights) < EXACT


def test_shared_optimizer_state_equals_one_process(ranks, reference, tmp_path) -> None:
    """ZeRO-1: a rank's share of the flat state starts and ends inside parameters of three dims as well."""
    name, reference_losses, reference_weights = reference
    config = _config(name, tp=2, dp=2)
    shared = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_cap_mb": 0.01}
    config = replace(config, parallel=replace(config.parallel, **shared))
    weights = assemble(ranks(ParallelLayout(tp=2, dp=2), train_on_rank, config, tmp_path))
    assert losses(tmp_path) == pytest.approx(reference_losses, rel=EXACT)
    assert _difference(weights, reference_weights) < EXACT


def _queries_first(attention: GroupedQueryAttention, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut what a rank holds into all queries, all keys, all values: another model at each tp."""
    s, b, _ = qkv.shape
    heads, groups = attention.num_local_heads, attention.num_local_groups
    parts = qkv.view(s, b, heads + 2 * groups, attention.head_dim).split((heads, groups, groups), dim=2)
    return tuple(part.permute(1, 2, 0, 3) for part in parts)


# What is patched, with what, in which model, whether the sequence is split.
BUGS: dict[str, tuple[Any, str, Any, str, bool]] = {
    "query groups cut across ranks": (GroupedQueryAttention, "heads", _queries_first, "llama", False),
    "norms of a split sequence not summed": (SequenceBoundary, "gradient_is_partial", False, "llama", True),
    "post-norms of a split sequence not summed": (SequenceBoundary, "gradient_is_partial", False, "post-norm", True),
}


def _train_with_bug(context: ParallelContext, bug: str, config: RunConfig, run: Path) -> Pieces:
    owner, name, replacement, *_ = BUGS[bug]
    with mock.patch.object(owner, name, replacement):
        return train_on_rank(context, config, run)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(ranks, tmp_path, bug: str) -> None:
    *_, model, splits = BUGS[bug]
    # The reference has the bug as well where one process can have it: two layouts must then part.
    with mock.patch.object(*BUGS[bug][:3]):
        train_on_rank(single_process(), _config(model), tmp_path / "reference")
    ranks(
        ParallelLayout(tp=2),
        _train_with_bug,
        bug,
        _config(model, tp=2, sequence_parallel=splits),
        tmp_path / "planted",
    )
    assert losses(tmp_path / "planted") != pytest.approx(losses(tmp_path / "reference"), rel=1e-7)


def test_saved_at_one_layout_goes_on_at_another(ranks, reference, tmp_path) -> None:
    """A gated weight is cut on its second dim, a fused projection by groups: both are put together and cut anew."""
    name, _, reference_weights = reference
    saving = {"save": "run", "save_interval": 5}
    first = _config(name, tp=4, sequence_parallel=True)
    first = replace(first, train=replace(first.train, exit_interval=10), checkpoint=CheckpointConfig(**saving))
    ranks(ParallelLayout(tp=4), train_on_rank, first, tmp_path)
    latest = find_latest(tmp_path)
    assert latest is not None
    weights = assemble(ranks(ParallelLayout(tp=2, dp=2), train_on_rank, _config(name, 2, 2), tmp_path, latest))
    assert _difference(weights, reference_weights) < EXACT


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_half_precision_follows_single_precision(tmp_path, half: str) -> None:
    """With every option of a Llama; within what rounding to 8 (bf16) or 11 bits moves a loss of about 4 nats."""
    single = {"params_dtype": "float32"}
    train_on_rank(single_process(), small_config(model=MODELS["llama"], train=single), tmp_path / "single")
    halved = single | {half: True} | ({"initial_loss_scale": 1024.0} if half == "fp16" else {})
    train_on_rank(single_process(), small_config(model=MODELS["llama"], train=halved), tmp_path / "half")
    expected, ours = losses(tmp_path / "single"), losses(tmp_path / "half")
    assert ours == pytest.approx(expected, abs=0.1 if half == "bf16" else 0.02)
    assert ours != expected
