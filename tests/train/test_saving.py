"""A run that saves in the background writes the checkpoints of one that does not, and loses none of its failures."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.checkpoint import save as save_module
from megascale.checkpoint.background import HostBuffer
from megascale.checkpoint.manifest import list_checkpoints, read_manifest, verify
from megascale.checkpoint.save import SaveError
from megascale.config.layout import ParallelLayout
from megascale.parallel.context import ParallelContext
from tests.train.training import build_trainer, small_config, train_on_rank

STEPS = 6
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}


def config(parallel: dict[str, Any] | None = None, **checkpoint: Any):
    return small_config(
        model=DROPOUT,
        parallel=parallel or {},
        train={"train_iters": STEPS, "micro_batch_size": 4, "eval_interval": 2},
        checkpoint={"save": "run", "save_interval": 1, **checkpoint},
    )


def hashes(run: Path) -> dict[int, Any]:
    """By step the state and the hashes of the tensor files."""
    found = {}
    for entry in list_checkpoints(run):
        manifest = verify(entry.path)
        tensors = {name: file.sha256 for name, file in manifest.files.items() if name.endswith(".safetensors")}
        found[entry.step] = (manifest.state, tensors)
    return found


def _with_slow_writing(context: ParallelContext, *arguments: Any, live: bool = False) -> float:
    """Train with a disk so slow that the next steps run meanwhile; the seconds that saving held up the training."""
    patch = pytest.MonkeyPatch()
    plain = save_module.write_tensor_file

    def slow(path: Path, tensors: Any) -> Any:
        time.sleep(0.15)
        return plain(path, tensors)

    patch.setattr(save_module, "write_tensor_file", slow)
    if live:
        patch.setattr(HostBuffer, "copy", lambda self, slices: slices)
    try:
        trainer = build_trainer(context, *arguments)
        seconds = 0.0
        plain_save = trainer.save

        def save(state: Any) -> None:
            nonlocal seconds
            started = time.perf_counter()
            plain_save(state)
            seconds += time.perf_counter() - started

        trainer.save = save
        with trainer.metrics:
            trainer.fit()
    finally:
        patch.undo()
    return seconds


@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        (ParallelLayout(tp=1, dp=1), {}),
        (ParallelLayout(tp=2, dp=1), {}),
        (ParallelLayout(tp=1, dp=2), {"use_distributed_optimizer": True}),
        (ParallelLayout(tp=1, dp=2), {"use_distributed_optimizer": True, "overlap_param_gather": True}),
        (ParallelLayout(tp=1, dp=1, pp=2), {"pipeline_model_parallel_size": 2}),
    ],
    ids=["alone", "tensor", "zero-1", "zero-1 overlapped", "pipeline"],
)
def test_background_checkpoints_are_bitwise_those_saved_at_once(ranks, tmp_path, layout, parallel) -> None:
    """Every step is saved, and writing goes on while the next steps change the weights."""
    ranks(layout, train_on_rank, config(parallel), tmp_path / "direct")
    ranks(layout, _with_slow_writing, config(parallel, async_save=True), tmp_path / "background")
    expected = hashes(tmp_path / "direct")
    assert list(expected) == list(range(STEPS, 0, -1))
    assert hashes(tmp_path / "background") == expected


def _live(context: ParallelContext, *arguments: Any) -> None:
    _with_slow_writing(context, *arguments, live=True)


def test_writing_what_training_changes_would_be_seen(ranks, tmp_path) -> None:
    """Planted bug: the thread writes the tensors themselves instead of copies."""
    ranks(ParallelLayout(), train_on_rank, config(), tmp_path / "direct")
    ranks(ParallelLayout(), _live, config(async_save=True), tmp_path / "live")
    assert hashes(tmp_path / "live") != hashes(tmp_path / "direct")


def test_a_step_waits_for_the_copy_only(ranks, tmp_path) -> None:
    """One save in the run, besides the last: direct saving holds the training up for the whole write."""

    def once(**checkpoint: Any):
        return config(**{"save_interval": STEPS - 1, **checkpoint})

    (direct,) = ranks(ParallelLayout(), _with_slow_writing, once(), tmp_path / "direct")
    assert direct > 2 * 0.15
    single = {"save_interval": STEPS}
    (background,) = ranks(ParallelLayout(), _with_slow_writing, config(async_save=True, **single), tmp_path / "back")
    assert background < 0.15


def _failing_on_rank_1(context: ParallelContext, run: Path) -> tuple[str, int]:
    """A disk of rank 1 that is full at step 2: what the trainer raises, and the step it had reached."""
    patch = pytest.MonkeyPatch()
    plain = save_module.write_tensor_file

    def full(path: Path, tensors: Any) -> Any:
        if context.rank == 1 and "00000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(path, tensors)

    patch.setattr(save_module, "write_tensor_file", full)
    patch.setattr(save_module, "VISIBLE_WITHIN_SECONDS", 0.2)
    trainer = build_trainer(context, config({}, async_save=True, save_interval=2), run)
    try:
        with trainer.metrics:
            trainer.fit()
    except SaveError as error:
        return str(error), trainer.state.step
    finally:
        patch.undo()
    return "", trainer.state.step


def test_a_failure_on_one_rank_ends_the_run_on_all_at_the_next_save(ranks, tmp_path) -> None:
    results = ranks(ParallelLayout(tp=2), _failing_on_rank_1, tmp_path)
    assert [step for _, step in results] == [4, 4]
    assert all("the checkpoint of step 2 was not saved" in message for message, _ in results)
    assert any("No space left on device" in message for message, _ in results)
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("async_save", [False, True], ids=["direct", "background"])
def test_retention_during_a_run(ranks, tmp_path, async_save) -> None:
    """Saved at 1..6, the newest two and multiples of 3 kept; best by validation at 2, 4, 6, where it falls."""
    ranks(
        ParallelLayout(dp=2), train_on_rank, config(async_save=async_save, keep_last=2, keep_every=3), tmp_path / "run"
    )
    assert [entry.step for entry in list_checkpoints(tmp_path / "run")] == [6, 5, 3]


def test_the_best_is_saved_and_kept(ranks, tmp_path) -> None:
    """No interval: a checkpoint at each new lowest validation loss and at the end; of those the best and the last."""
    run = tmp_path / "run"
    settings = config(save_interval=None, save_best=True, keep_last=1)
    ranks(ParallelLayout(), _with_validation_losses, settings, run, [3.0, 2.0, 2.5])
    assert [entry.step for entry in list_checkpoints(run)] == [6, 4]
    best = read_manifest(run / "checkpoints" / "step_00000004").state["train"]
    assert (best["validation_loss"], best["best_loss"], best["best_step"]) == (2.0, 2.0, 4)
    last = read_manifest(run / "checkpoints" / "step_00000006").state["train"]
    assert (last["validation_loss"], last["best_loss"], last["best_step"]) == (2.5, 2.0, 4)


def _with_validation_losses(context: ParallelContext, settings: Any, run: Path, losses: list[float]) -> None:
    from megascale.train import trainer as trainer_module
    from megascale.train.validate import ValidationResult

    patch = pytest.MonkeyPatch()
    told = iter(losses)
    patch.setattr(trainer_module, "validate", lambda *arguments: ValidationResult(next(told), 1.0))
    try:
        trainer = build_trainer(context, settings, run)
        with trainer.metrics:
            trainer.fit()
    finally:
        patch.undo()
