"""A signal to one rank stops all of them within a step, also while they evaluate or save, and loses nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megascale.checkpoint.manifest import find_latest, list_checkpoints, read_manifest
from megascale.config.layout import ParallelLayout
from megascale.parallel.context import ParallelContext
from tests.train.training import build_trainer, exact_records, small_config, train_on_rank

STEPS = 8
LAYOUT = ParallelLayout(tp=2, dp=2)


def _config():
    return small_config(
        model={"hidden_dropout": 0.1, "attention_dropout": 0.1},
        train={"train_iters": STEPS, "eval_interval": 4, "eval_iters": 5, "micro_batch_size": 2},
        checkpoint={"save": "run", "save_interval": 3},
    )


def _told_to_stop(number: int) -> None:
    os.kill(os.getpid(), number)


def _stop_while(context: ParallelContext, run: Path, doing: str, at_step: int, number: int) -> tuple:
    """Send the signal to the last rank only, in the middle of what it does at a step; return how the run ended."""
    trainer = build_trainer(context, _config(), run)
    evaluated = []
    save, score, run_micro_batches = trainer.save, trainer.runner.score, trainer.runner.run
    is_told = context.rank == context.world.size - 1

    def saving(state) -> None:
        if doing == "saving" and state.step == at_step and is_told:
            _told_to_stop(number)
        save(state)

    def scoring(micro_batches) -> float:
        if trainer.state.step == at_step:
            evaluated.append(len(micro_batches))
            if doing == "validation" and len(evaluated) == 2 and is_told:
                _told_to_stop(number)
        return score(micro_batches)

    def training(micro_batches, step, *args, **kwargs) -> float:
        if doing == "training" and step + 1 == at_step and is_told:
            _told_to_stop(number)
        return run_micro_batches(micro_batches, step, *args, **kwargs)

    trainer.save, trainer.runner.score, trainer.runner.run = saving, scoring, training
    with trainer.metrics:
        result = trainer.fit()
    return result.state.step, result.by_signal, result.stopped_by, len(evaluated)


def _resume(context: ParallelContext, run: Path):
    return train_on_rank(context, _config(), run, find_latest(run))


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("whole")
    ranks(LAYOUT, train_on_rank, _config(), run)
    return run


def _hashes(run: Path) -> dict[str, str]:
    manifest = read_manifest(run / "checkpoints" / f"step_{STEPS:08d}")
    return {name: record.sha256 for name, record in manifest.files.items() if name.endswith(".safetensors")}


@pytest.mark.parametrize(
    ("doing", "at_step", "number", "stops_after"),
    [
        ("training", 5, signal.SIGTERM, 5),
        ("validation", 4, signal.SIGUSR1, 4),
        ("saving", 6, signal.SIGTERM, 6),
        ("validation", STEPS, signal.SIGTERM, STEPS),
    ],
)
def test_all_ranks_stop_and_a_resume_goes_on_bitwise(
    ranks, tmp_path, whole, doing, at_step, number, stops_after
) -> None:
    ended = ranks(LAYOUT, _stop_while, tmp_path, doing, at_step, number)
    assert {result[0] for result in ended} == {stops_after}, "not one step later, and on all ranks"
    assert all(result[1] for result in ended)
    assert ended[-1][2] == number.name
    assert ended[0][2] == "a signal to another rank"
    if doing == "validation":
        assert {result[3] for result in ended} == {2}, "the rest of the validation is not waited for"
    assert list_checkpoints(tmp_path)[0].step == stops_after
    ranks(LAYOUT, _resume, tmp_path)
    # A validation that was cut short is done by the resumed run, so nothing is missing and nothing is there twice.
    assert exact_records(tmp_path) == exact_records(whole)
    assert _hashes(tmp_path) == _hashes(whole)
    ends = [read_manifest(run / "checkpoints" / f"step_{STEPS:08d}").state for run in (tmp_path, whole)]
    assert ends[0] == ends[1]
