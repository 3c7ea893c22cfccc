"""A pipeline trains the model that one process trains: losses, weights, checkpoints, dropout masks.

Every run is in float64, over ragged batches (no loss after an end-of-document token), with gradients clipped and four
micro-batches per step and rank or more; the reference is one process.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megascale.checkpoint.manifest import find_latest, read_manifest
from megascale.checkpoint.save import SaveError
from megascale.config.layout import ParallelLayout
from megascale.config.pipeline import PipelineStage, stages_of_rank
from megascale.config.schema import RunConfig
from megascale.parallel.context import ParallelContext, single_process
from megascale.parallel.random import RandomStreams
from megascale.train.pipeline import PipelineRunner, _Kept
from megascale.train.validate import validate
from tests.train import training
from tests.train.training import Pieces, assemble, build_trainer, exact_records, losses, small_config, train_on_rank

_NUM_HEADS = 4
TOLERANCE = 1e-10
STEPS = 6
PP2, INTERLEAVED = ParallelLayout(pp=2), {"parallel": {"num_layers_per_virtual_pipeline_stage": 1}}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}


def _config(layout: ParallelLayout | None = None, accumulation: int = 4, **changes: dict) -> RunConfig:
    """Four layers, and a batch of `accumulation` micro-batches per replica."""
    layout = layout or ParallelLayout()
    changes = {section: dict(values) for section, values in changes.items()}
    micro_batch_size = 8 // (layout.dp * accumulation)
    train = {"micro_batch_size": micro_batch_size, "train_iters": STEPS, "eval_interval": 3}
    changes["model"] = {"num_layers": 4, **changes.get("model", {})}
    changes["train"] = {**train, **changes.get("train", {})}
    changes["parallel"] = {
        "pipeline_model_parallel_size": layout.pp,
        "tensor_model_parallel_size": layout.tp,
        **changes.get("parallel", {}),
    }
    return small_config(**changes)


def _difference(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    """The largest |ours - reference| / (1 + |reference|) over the weights, key biases left out (see docs)."""
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
    """One process without accumulation."""
    run = tmp_path_factory.mktemp("reference")
    return _on_one_process(run, accumulation=1)


def _on_one_process(run: Path, **changes):
    weights = assemble([train_on_rank(single_process(), _config(**changes), run)])
    return losses(run), weights


def _assert_equal(ranks, run: Path, layout: ParallelLayout, config: RunConfig, expected) -> None:
    # `assemble` requires pieces that several ranks hold, such as the tied embedding, to be bit-identical.
    weights = assemble(ranks(layout, train_on_rank, config, run))
    assert losses(run) == pytest.approx(expected[0], rel=TOLERANCE)
    assert _difference(weights, expected[1]) < TOLERANCE


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (PP2, {}),
        (PP2, {"accumulation": 8}),
        (ParallelLayout(pp=4), {}),
        (ParallelLayout(pp=2, tp=2), {}),
        (ParallelLayout(pp=2, dp=2), {}),
        (PP2, INTERLEAVED),
        (PP2, {"accumulation": 8, **INTERLEAVED}),
        (ParallelLayout(pp=2, tp=2), INTERLEAVED),
        (ParallelLayout(pp=2, dp=2), INTERLEAVED),
    ],
    ids=str,
)
def test_a_pipeline_equals_one_process(ranks, reference, tmp_path, layout, changes) -> None:
    _assert_equal(ranks, tmp_path, layout, _config(layout, **changes), reference)


@pytest.mark.parametrize(
    ("layout", "parallel", "model", "train"),
    [
        (ParallelLayout(pp=2, tp=2), {"sequence_parallel": True}, {}, {"recompute_granularity": "full"}),
        (PP2, {}, {"untie_embeddings_and_output_weights": True}, {"recompute_granularity": "selective"}),
        (
            PP2,
            INTERLEAVED["parallel"],
            {"position_embedding_type": "rope", "normalization": "RMSNorm", "norm_position": "post"},
            {"label_smoothing": 0.1},
        ),
        (
            ParallelLayout(pp=2, dp=2),
            {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
            | {"bucket_cap_mb": 0.02},
            {},
            {},
        ),
        (
            ParallelLayout(pp=2, dp=2),
            INTERLEAVED["parallel"] | {"overlap_grad_reduce": True, "bucket_cap_mb": 0.02},
            {},
            {},
        ),
    ],
    ids=[
        "sequence parallel, full recomputation",
        "own head, selective recomputation",
        "other parts, interleaved",
        "shared optimizer, overlap",
        "interleaved, overlap",
    ],
)
def test_a_pipeline_with_other_options(ranks, tmp_path, layout, parallel, model, train) -> None:
    expected = _on_one_process(tmp_path / "one", accumulation=1, model=model, train={"label_smoothing": 0.0, **train})
    config = _config(layout, parallel=parallel, model=model, train=train)
    _assert_equal(ranks, tmp_path / "pipeline", layout, config, expected)


@pytest.mark.parametrize("granularity", ["none", "full"])
@pytest.mark.parametrize("changes", [{}, INTERLEAVED], ids=["1f1b", "interleaved"])
def test_dropout_masks_do_not_depend_on_the_stage(ranks, tmp_path, changes, granularity) -> None:
    """Nor does what recomputation replays, whatever was run in between."""
    train = {"recompute_granularity": granularity}
    expected = _on_one_process(tmp_path / "one", model=DROPOUT, train=train)
    config = _config(PP2, model=DROPOUT, train=train, **changes)
    _assert_equal(ranks, tmp_path / "pipeline", PP2, config, expected)


def _with_one_stream_for_all_layers(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    with mock.patch.object(RandomStreams, "start_layer"):
        return train_on_rank(context, config, run)


def test_streams_that_run_through_the_layers_would_be_noticed(ranks, tmp_path) -> None:
    expected, _ = _on_one_process(tmp_path / "one", model=DROPOUT)
    ranks(PP2, _with_one_stream_for_all_layers, _config(PP2, model=DROPOUT), tmp_path / "planted")
    assert losses(tmp_path / "planted")[:2] != pytest.approx(expected[:2], rel=1e-6)


def _train_without_saving(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    """A checkpoint would refuse some of the planted bugs before they are compared."""
    trainer = build_trainer(context, config, run)
    trainer.save = lambda state: None
    with trainer.metrics:
        trainer.fit()
    return training.pieces(trainer.optimizer)


def _without_the_sum_over_both_ends(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    with mock.patch("megascale.optim.build.sum_shared_gradients"):
        return _train_without_saving(context, config, run)


def _first_layers_on_every_stage(config: RunConfig, pp_rank: int) -> tuple[PipelineStage, ...]:
    stages = stages_of_rank(config.model.num_layers, 2, 1, pp_rank)
    return tuple(replace(stage, layers=range(len(stage.layers))) for stage in stages)


def _with_the_first_layers_on_every_stage(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    with mock.patch("megascale.train.build.stages_of_run", _first_layers_on_every_stage):
        return _train_without_saving(context, config, run)


def _with_both_copies_in_the_norm(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    with mock.patch("megascale.parallel.sharding.DeclaredParameter.is_first_copy", True):
        return _train_without_saving(context, config, run)


def _with_gradients_of_the_wrong_token(context: ParallelContext, config: RunConfig, run: Path) -> Pieces:
    """The first stage takes each gradient for that of the sample beside it."""
    backward = PipelineRunner._backward

    def mixed_up(runner: PipelineRunner, stage: PipelineStage, kept: _Kept, gradient_scale: float) -> None:
        if not stage.is_last:
            kept = replace(kept, output=kept.output.roll(1, dims=1))
        backward(runner, stage, kept, gradient_scale)

    with mock.patch.object(PipelineRunner, "_backward", mixed_up):
        return _train_without_saving(context, config, run)


@pytest.mark.parametrize(
    "planted",
    [
        _without_the_sum_over_both_ends,
        _with_the_first_layers_on_every_stage,
        _with_both_copies_in_the_norm,
        _with_gradients_of_the_wrong_token,
    ],
)
def test_planted_bugs_are_seen(ranks, reference, tmp_path, planted) -> None:
    pieces = ranks(PP2, planted, _config(PP2), tmp_path)
    assert np.abs(np.subtract(losses(tmp_path), reference[0])).max() > 1e-6
    if planted is _without_the_sum_over_both_ends:
        with pytest.raises(AssertionError, match=r"word_embedding.weight differs between ranks"):
            assemble(pieces)


def _save_with_the_first_layers_on_every_stage(context: ParallelContext, config: RunConfig, run: Path) -> str:
    with mock.patch("megascale.train.build.stages_of_run", _first_layers_on_every_stage):
        trainer = build_trainer(context, config, run)
    with pytest.raises(SaveError) as refused:
        trainer.save(trainer.state)
    trainer.metrics.__exit__(None, None, None)
    return str(refused.value)


def test_a_checkpoint_of_misnumbered_layers_is_refused(ranks, tmp_path) -> None:
    message, _ = ranks(PP2, _save_with_the_first_layers_on_every_stage, _config(PP2), tmp_path)
    assert "model.blocks.0.attention.output.bias" in message
    assert "stored more than once" in message


# How a run is laid out when it is saved, and when it goes on.
LAYOUTS = {
    "one": (ParallelLayout(), {}),
    "tp2": (ParallelLayout(tp=2), {}),
    "pp2": (PP2, {}),
    "pp4": (ParallelLayout(pp=4), {}),
    "pp2 interleaved": (PP2, INTERLEAVED),
    "pp2 x tp2": (ParallelLayout(pp=2, tp=2), {}),
    "pp2 x dp2": (ParallelLayout(pp=2, dp=2), {}),
}


def _run(ranks, layout: ParallelLayout, *args):
    return [train_on_rank(single_process(), *args)] if layout.world_size == 1 else ranks(layout, train_on_rank, *args)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pp2", "one"),
        ("one", "pp4"),
        ("pp4", "pp2 interleaved"),
        ("pp2 interleaved", "tp2"),
        ("pp2 x tp2", "pp2 x dp2"),
    ],
)
def test_a_checkpoint_goes_on_at_another_layout(ranks, reference, tmp_path, before, after) -> None:
    layout, changes = LAYOUTS[before]
    stops = {"train": {"exit_interval": 4}, "checkpoint": {"save": "run"}}
    _run(ranks, layout, _config(layout, **stops, **changes), tmp_path / "first")
    layout, changes = LAYOUTS[after]
    start = find_latest(tmp_path / "first")
    weights = assemble(_run(ranks, layout, _config(layout, **changes), tmp_path / "second", start))
    assert _difference(weights, reference[1]) < TOLERANCE
    assert losses(tmp_path / "second")[:2] == pytest.approx(reference[0][4:6], rel=TOLERANCE)


def test_a_checkpoint_holds_the_tied_embedding_once(ranks, tmp_path) -> None:
    ranks(PP2, train_on_rank, _config(PP2, checkpoint={"save": "run"}), tmp_path / "pipeline")
    _run(ranks, ParallelLayout(), _config(checkpoint={"save": "run"}), tmp_path / "one")
    ours, whole = (read_manifest(find_latest(tmp_path / run)).tensors for run in ("pipeline", "one"))
    assert ours.keys() == whole.keys()
    assert {name: len(tensor.slices) for name, tensor in ours.items()} == dict.fromkeys(whole, 1)
    assert ours["model.word_embedding.weight"].slices[0].file == "rank_00000.safetensors"
    assert ours["model.blocks.3.mlp.up.weight"].slices[0].file == "rank_00001.safetensors"


@pytest.mark.parametrize("changes", [{}, INTERLEAVED], ids=["1f1b", "interleaved"])
def test_stop_and_resume_is_bitwise_the_uninterrupted_run(ranks, tmp_path, changes) -> None:
    def config(**train):
        saving = {"checkpoint": {"save": "run", "save_interval": 2}, "model": DROPOUT}
        return _config(PP2, train={"recompute_granularity": "full", **train}, **saving, **changes)

    ranks(PP2, train_on_rank, config(), tmp_path / "whole")
    ranks(PP2, train_on_rank, config(exit_interval=4), tmp_path / "parts")
    ranks(PP2, train_on_rank, config(), tmp_path / "parts", find_latest(tmp_path / "parts"))
    assert exact_records(tmp_path / "parts") == exact_records(tmp_path / "whole")
    hashes = [
        {name: file.sha256 for name, file in read_manifest(find_latest(tmp_path / run)).files.items()}
        for run in ("whole", "parts")
    ]
    assert hashes[0] == hashes[1]


def _communication_of_a_step(context: ParallelContext, config: RunConfig, run: Path) -> list[tuple[str, str, int]]:
    trainer = build_trainer(context, config, run)
    trainer.model.train()
    batch = trainer.train_loader.batch(0)
    with context.recording() as records:
        trainer._train_step(batch)
    trainer.metrics.__exit__(None, None, None)
    return [(record.op, record.axis, record.num_bytes) for record in records]


@pytest.mark.parametrize(("changes", "chunks"), [({}, 1), (INTERLEAVED, 2)], ids=["1f1b", "interleaved"])
def test_messages_of_a_step(ranks, tmp_path, changes, chunks) -> None:
    """One message of s b h elements per boundary, micro-batch and direction; the tied gradient once; the norm."""
    first, last = ranks(PP2, _communication_of_a_step, _config(PP2, **changes), tmp_path)
    num_micro_batches, message = 4, 16 * 2 * 32 * 8
    # The ring from the last rank to the first is one boundary less than the other way round.
    for records, boundaries_after in ((first, chunks), (last, chunks - 1)):
        boundaries_before = 2 * chunks - 1 - boundaries_after
        expected = {
            ("send", "pp_forward"): boundaries_after,
            ("receive", "pp_forward"): boundaries_before,
            ("send", "pp_backward"): boundaries_before,
            ("receive", "pp_backward"): boundaries_after,
        }
        for (op, axis), boundaries in expected.items():
            sizes = [size for o, a, size in records if (o, a) == (op, axis)]
            assert sizes == [message] * (num_micro_batches * boundaries)
        rest = [record for record in records if record[0] not in ("send", "receive")]
        embedding = 128 * 32 * 8  # 97 tokens padded to a multiple of 64
        assert sorted(rest) == sorted(
            [("all_reduce", "pp_ends", embedding), ("all_reduce", "pp", 8), ("all_reduce", "world", 3 * 8)]
        )


def test_validation_with_a_last_batch_that_is_not_full(ranks, tmp_path) -> None:
    """Three micro-batches through an interleaved pipeline of two."""
    answers = ranks(PP2, _validate_some, _config(PP2, **INTERLEAVED), tmp_path)
    (expected,) = [_validate_some(single_process(), _config(), tmp_path)]
    assert expected[1] > 50
    for answer in answers:
        assert answer == (pytest.approx(expected[0], rel=1e-12), expected[1])


def _validate_some(context: ParallelContext, config: RunConfig, run: Path) -> tuple[float, int]:
    trainer = build_trainer(context, config, run)
    batches = trainer.train_loader.validation_batches(6)
    result = validate(trainer.model, trainer.runner, batches, context, told_to_stop=lambda: False)
    assert result is not None
    trainer.metrics.__exit__(None, None, None)
    return result.sum_loss, result.num_scored_tokens
