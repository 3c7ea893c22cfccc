"""Overlapped and shared data parallelism train the same model as the plain kind.

Buckets that leave during the backward pass, ZeRO-1 and gathering during the forward pass, alone and together, with
tensor parallelism and accumulation, against one process in float64; what they communicate and when; what a rank keeps;
and checkpoints across all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megascale.checkpoint.manifest import find_latest, read_manifest
from megascale.config.layout import ParallelLayout
from megascale.config.schema import RunConfig
from megascale.optim.distributed import OverlappedGathering, ParameterGathering
from megascale.optim.reduction import OverlappedReducer
from megascale.parallel.context import Axis, ParallelContext, Pending, single_process
from tests.train.test_equivalence import _difference
from tests.train.training import Pieces, assemble, build_trainer, exact_records, losses, small_config, train_on_rank

EXACT = 1e-10
STEPS = 8
# The model's 29,000 float64 gradients in about a dozen buckets.
BUCKETS = {"bucket_cap_mb": 0.02}
OVERLAP = {"overlap_grad_reduce": True, **BUCKETS}
SHARED = {"use_distributed_optimizer": True}
GATHERED = {**SHARED, "overlap_param_gather": True, **BUCKETS}
EVERYTHING = {**GATHERED, **OVERLAP}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": OVERLAP,
    "shared": SHARED,
    "gathered": GATHERED,
    "everything": EVERYTHING,
}


def _config(parallel: dict[str, Any], ranks_and_accumulation: int = 1, **train: Any) -> RunConfig:
    return small_config(
        train={"micro_batch_size": 8 // ranks_and_accumulation, "train_iters": STEPS, "eval_interval": 4, **train},
        schedule={"lr_decay_iters": STEPS},
        parallel=parallel,
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, np.ndarray]]:
    run = tmp_path_factory.mktemp("reference")
    weights = assemble([train_on_rank(single_process(), _config({}), run)])
    return losses(run), weights


@pytest.mark.parametrize(
    ("kind", "tp", "dp", "accumulation"),
    [
        ("overlap", 1, 2, 4),
        ("overlap", 2, 2, 1),
        ("shared", 1, 2, 1),
        ("shared", 2, 2, 4),
        ("shared", 1, 4, 1),
        ("gathered", 2, 2, 1),
        ("everything", 1, 2, 1),
        ("everything", 2, 2, 4),
        ("everything", 1, 1, 2),
    ],
)
def test_every_kind_equals_one_process(ranks, reference, tmp_path, kind, tp, dp, accumulation) -> None:
    reference_losses, reference_weights = reference
    config = _config(KINDS[kind], dp * accumulation)
    weights = assemble(ranks(ParallelLayout(tp=tp, dp=dp), train_on_rank, config, tmp_path))
    assert losses(tmp_path) == pytest.approx(reference_losses, rel=EXACT)
    assert _difference(weights, reference_weights) < EXACT


@pytest.mark.parametrize("train", [{}, {"params_dtype": "float32", "bf16": True}])
def test_overlap_is_bit_equal_to_no_overlap(ranks, tmp_path, train) -> None:
    """Two numbers have one sum, whatever the bucket that they are sent in; also the sharing of the update changes none.

    Clipping is off: when ranks share the update, the squares of the norm are added up in another order.
    """

    def run_of(kind: str) -> dict[str, np.ndarray]:
        config = _config(KINDS[kind], 4, **train)
        config = replace(config, optimizer=replace(config.optimizer, clip_grad=0.0))
        return assemble(ranks(ParallelLayout(dp=2), train_on_rank, config, tmp_path / kind))

    plain = run_of("plain")
    for kind in ("overlap", "shared", "everything"):
        other = run_of(kind)
        assert all(np.array_equal(other[name], plain[name]) for name in plain), kind
    assert exact_records(tmp_path / "overlap") == exact_records(tmp_path / "plain"), "the norm is the same sum too"


def _sequence_parallel(parallel: dict[str, Any]) -> dict[str, Any]:
    return {**parallel, "sequence_parallel": True, "tensor_model_parallel_size": 2}


@pytest.mark.parametrize("kind", ["overlap", "shared", "everything"])
def test_partial_gradients_are_summed_first(ranks, reference, tmp_path, kind) -> None:
    config = _config(_sequence_parallel(KINDS[kind]), 2)
    weights = assemble(ranks(ParallelLayout(tp=2, dp=2), train_on_rank, config, tmp_path))
    assert _difference(weights, reference[1]) < EXACT


@pytest.mark.parametrize("kind", ["overlap", "everything"])
def test_pipeline_stages_and_their_shared_embedding(ranks, reference, tmp_path, kind) -> None:
    config = _config({**KINDS[kind], "pipeline_model_parallel_size": 2}, 4)
    weights = assemble(ranks(ParallelLayout(pp=2, dp=2), train_on_rank, config, tmp_path))
    assert _difference(weights, reference[1]) < EXACT


@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_recomputation_gives_each_gradient_once(ranks, reference, tmp_path, granularity) -> None:
    """What is run again in the backward pass reads gathered weights and sends no bucket early."""
    config = _config(EVERYTHING, 4, recompute_granularity=granularity)
    weights = assemble(ranks(ParallelLayout(dp=2), train_on_rank, config, tmp_path))
    assert _difference(weights, reference[1]) < EXACT


def _trained_on_llama(context: ParallelContext, parallel: dict[str, Any], run: Path) -> Pieces:
    model = {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "activation": "swiglu",
        "untie_embeddings_and_output_weights": True,
        "disable_bias_linear": True,
        "ffn_hidden_size": 64,
    }
    config = small_config(
        model=model,
        parallel=parallel,
        train={"micro_batch_size": 4 if context.dp.size == 2 else 8, "train_iters": STEPS},
        schedule={"lr_decay_iters": STEPS},
    )
    patch = mock.patch.object(Axis, "start_all_gather", _late_gather(Axis.start_all_gather))
    with patch if parallel else nullcontext():
        return train_on_rank(context, config, run)


def test_a_head_of_its_own_is_waited_for(ranks, tmp_path) -> None:
    """Its weight is used by the model, not by a call of the module that it belongs to."""
    plain = assemble([_trained_on_llama(single_process(), {}, tmp_path / "plain")])
    shared = assemble(ranks(ParallelLayout(dp=2), _trained_on_llama, EVERYTHING, tmp_path / "shared"))
    assert _difference(shared, plain) < EXACT


def _events(context: ParallelContext, config: RunConfig, run: Path) -> tuple[list[str], list[int]]:
    """What happens in one step, in order, and the elements of its data-parallel messages."""
    trainer = build_trainer(context, config, run)
    events: list[str] = []

    class Watcher:
        def entered(self, collective: Any) -> None:
            if collective.axis == "dp":
                events.append(collective.op)

        def left(self) -> None:
            pass

    for d in trainer.optimizer.gradients.declared:
        d.parameter.register_post_accumulate_grad_hook(lambda _, name=d.name: events.append(name))
    finish = trainer.optimizer._reducer.finish
    trainer.optimizer._reducer.finish = lambda: (events.append("backward ended"), finish())
    with context.world.log.watching(Watcher()), context.recording() as records:
        trainer._train_step(trainer.train_loader.batch(0))
    trainer.metrics.__exit__(None, None, None)
    return events, [record.num_elements for record in records if record.axis == "dp"]


def test_buckets_leave_before_the_backward_pass_ends(ranks, tmp_path) -> None:
    """The event log of a step: of four micro-batches the last sends, and all but its last bucket leave early."""
    events, elements = ranks(ParallelLayout(dp=2), _events, _config(OVERLAP, 8), tmp_path)[0]
    num_buckets = -(-sum(elements) * 8 // int(0.02 * 2**20))
    assert num_buckets > 5
    assert events.count("all_reduce") == num_buckets == len(elements)
    sent = [index for index, event in enumerate(events) if event == "all_reduce"]
    last_gradient = max(index for index, event in enumerate(events) if event == "word_embedding.weight")
    assert sum(index < last_gradient for index in sent) >= num_buckets - 4, "all but those with the tied embedding"
    assert sent[-1] < events.index("backward ended")
    first_in_last_pass = [index for index, event in enumerate(events) if event == "final_norm.bias"][-1]
    assert sent[0] > first_in_last_pass, "nothing is sent before the last of the four backward passes"


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    ("kind", "messages"),
    [("plain", ["all_reduce"]), ("shared", ["reduce_scatter", "wait", "all_reduce", "all_gather", "wait"])],
)
def test_messages_of_an_update(ranks, tmp_path, kind, messages, accumulation) -> None:
    """One reduction per update however many micro-batches; sharing adds the norm's scalar and the gathering."""
    config = _config(KINDS[kind], 2 * accumulation)
    events, elements = ranks(ParallelLayout(dp=2), _events, config, tmp_path)[0]
    found = [event for event in events if "." not in event and event != "backward ended"]
    assert [event for event in found if event != "wait"] == [event for event in messages if event != "wait"]
    if kind == "shared":
        assert elements[1] == 1
        assert elements[0] == 2 * elements[2], "each rank sends its half of the parameters"


def _state_bytes(context: ParallelContext, config: RunConfig, run: Path) -> tuple[int, int]:
    """Bytes of masters and moments on this rank, and of the whole of them."""
    trainer = build_trainer(context, config, run)
    trainer.metrics.__exit__(None, None, None)
    tensors = [tensor for _, tensor, _ in trainer.optimizer.tensors()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    whole = sum(3 * 4 * p.numel() for p in trainer.model.parameters())
    return sum(storages.values()), whole


@pytest.mark.parametrize("dp", [2, 4])
def test_a_rank_keeps_its_share_of_the_state(ranks, tmp_path, dp) -> None:
    train = {"params_dtype": "float32", "bf16": True}
    for kept, whole in ranks(ParallelLayout(dp=dp), _state_bytes, _config(SHARED, dp, **train), tmp_path):
        assert kept == pytest.approx(whole / dp, rel=0.03)
    for kept, whole in ranks(ParallelLayout(dp=dp), _state_bytes, _config({}, dp, **train), tmp_path):
        assert kept == pytest.approx(whole, rel=0.03)


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"),
    [
        (("shared", 1, 2), ("plain", 1, 1)),
        (("shared", 1, 2), ("plain", 2, 1)),
        (("plain", 1, 2), ("shared", 1, 2)),
        (("plain", 2, 1), ("everything", 2, 2)),
        (("everything", 2, 2), ("shared", 1, 4)),
        (("shared", 1, 4), ("everything", 1, 2)),
    ],
)
def test_checkpoints_belong_to_no_kind(ranks, reference, tmp_path, saved_as, loaded_as) -> None:
    """Half of the run in one kind and layout, half in another, is the reference's run."""
    for (kind, tp, dp), run, start, stop in (
        (saved_as, tmp_path / "first", None, {"exit_interval": STEPS // 2}),
        (loaded_as, tmp_path / "second", tmp_path / "first", {}),
    ):
        config = _config(KINDS[kind], dp, **stop)
        layout = ParallelLayout(tp=tp, dp=dp)
        weights = assemble(ranks(layout, train_on_rank, config, run, find_latest(start) if start else None))
    assert _difference(weights, reference[1]) < EXACT
    moments = [name for name in weights if name.startswith("optimizer.exp_avg.")]
    assert all(np.allclose(weights[name], reference[1][name], rtol=1e-9, atol=1e-12) for name in moments)


PRECISIONS: dict[str, dict[str, Any]] = {
    "float64": {},
    "bf16": {"params_dtype": "float32", "bf16": True},
    "fp16": {"params_dtype": "float32", "fp16": True, "initial_loss_scale": 2.0**19, "hysteresis": 1},
}


def _tensors(run: Path) -> dict[str, str]:
    manifest = read_manifest(run / "checkpoints" / f"step_{STEPS:08d}")
    return {name: record.sha256 for name, record in manifest.files.items() if name.endswith(".safetensors")}


def _stop_and_resume(context: ParallelContext, precision: str, run: Path) -> None:
    train = PRECISIONS[precision]
    train_on_rank(context, _config(EVERYTHING, 2, exit_interval=3, **train), run)
    train_on_rank(context, _config(EVERYTHING, 2, **train), run, find_latest(run))


@pytest.mark.parametrize(("precision", "tp"), [("float64", 2), ("bf16", 1), ("fp16", 1)])
def test_a_resume_is_bitwise_the_uninterrupted_run(ranks, tmp_path, precision, tp) -> None:
    layout = ParallelLayout(tp=tp, dp=2)
    config = _config(EVERYTHING, 2, **PRECISIONS[precision])
    ranks(layout, train_on_rank, config, tmp_path / "whole")
    ranks(layout, _stop_and_resume, precision, tmp_path / "parts")
    assert exact_records(tmp_path / "parts") == exact_records(tmp_path / "whole")
    assert _tensors(tmp_path / "parts") == _tensors(tmp_path / "whole") != {}
    if precision == "fp16":
        records = [r for r in exact_records(tmp_path / "whole") if r["kind"] == "train"]
        assert {r["skipped"] for r in records} == {True, False}


def _with(patches: list[Any], context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    for patch in patches:
        patch.start()
    try:
        return train_on_rank(context, config, run)
    finally:
        for patch in patches:
            patch.stop()


def _nothing_is_gathered(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    return _with([mock.patch.object(ParameterGathering, "gather")], context, config, run)


def _each_rank_its_own_norm(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    trainer = build_trainer(context, config, run)
    trainer.optimizer._norm._axes = [context.tp]
    with trainer.metrics:
        trainer.fit()
    return [(name, shape, offset, data.numpy()) for name, shape, offset, data, _ in trainer.optimizer.slices()]


def _buckets_leave_with_the_first_micro_batch(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    def settle(reducer: OverlappedReducer) -> None:
        original(reducer)
        reducer.expect_last_backward()

    original = OverlappedReducer.settle
    patches = [
        mock.patch.object(OverlappedReducer, "settle", settle),
        mock.patch.object(OverlappedReducer, "_gradient_came", _came_without_a_check),
    ]
    return _with(patches, context, config, run)


def _came_without_a_check(reducer: OverlappedReducer, index: int, parameter: torch.Tensor) -> None:
    for bucket in reducer._buckets_of[index]:
        reducer._missing[bucket] -= 1
    while len(reducer._started) < len(reducer._buckets) and reducer._missing[len(reducer._started)] <= 0:
        reducer._start_next()


class _Late(Pending):
    """A collective that happens when it is waited for: whoever forgets to wait reads what was there before."""

    def __init__(self, action: Callable[[], Pending]) -> None:
        object.__setattr__(self, "action", action)

    def wait(self) -> None:
        self.action().wait()


def _late_gather(start: Callable[..., Pending]) -> Callable[..., Pending]:
    def late(axis: Axis, x: torch.Tensor, output: torch.Tensor) -> Pending:
        return _Late(lambda: start(axis, x, output))

    return late


def _gathering_late(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    late = _late_gather(Axis.start_all_gather)
    return _with([mock.patch.object(Axis, "start_all_gather", late)], context, config, run)


def _nobody_waits(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    with mock.patch.object(OverlappedGathering, "_wait_for", return_value=None):
        return _gathering_late(context, config, run)


def test_each_block_waits_for_its_own_parameters(ranks, reference, tmp_path) -> None:
    """With collectives that happen only where they are waited for, the run is still the reference's."""
    weights = assemble(ranks(ParallelLayout(dp=2), _gathering_late, _config(GATHERED, 2), tmp_path))
    assert _difference(weights, reference[1]) < EXACT


@pytest.mark.parametrize(
    ("planted", "kind", "accumulation"),
    [
        (_nothing_is_gathered, "shared", 1),
        (_each_rank_its_own_norm, "shared", 1),
        (_buckets_leave_with_the_first_micro_batch, "overlap", 4),
        (_nobody_waits, "gathered", 1),
    ],
)
def test_planted_bugs_are_seen(ranks, reference, tmp_path, planted, kind, accumulation) -> None:
    rank_pieces = ranks(ParallelLayout(dp=2), planted, _config(KINDS[kind], 2 * accumulation), tmp_path)
    differences = [
        np.abs(
            values - reference[1][name][tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))]
        ).max()
        for pieces in rank_pieces
        for name, _, offset, values in pieces
        if name.startswith("model.")
    ]
    assert max(differences) > 1e-6
