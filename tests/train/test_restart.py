"""A run that stops and resumes is the run that never stopped: same records, same checkpoint, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megascale.checkpoint.manifest import find_latest, read_manifest
from megascale.config.layout import ParallelLayout
from megascale.parallel.context import ParallelContext
from megascale.train.metrics import METRICS_FILE, keep_records, read_records
from tests.train.training import assemble, build_trainer, exact_records, losses, small_config, train_on_rank

# Everything random or stateful at once: dropout in both streams, accumulation, recomputation, loss scaling with
# overflows (a scale that starts far too high, so that the first steps are skipped).
CASES = {
    "float64": {"train": {"params_dtype": "float64", "micro_batch_size": 2}},
    "float32-recompute": {"train": {"params_dtype": "float32", "micro_batch_size": 2, "recompute_granularity": "full"}},
    "bf16": {"train": {"params_dtype": "float32", "micro_batch_size": 2, "bf16": True}},
    "fp16": {
        "train": {
            "params_dtype": "float32",
            "micro_batch_size": 2,
            "fp16": True,
            "initial_loss_scale": 2.0**26,
            "loss_scale_window": 5,
        }
    },
}
STEPS, STOP_AT = 16, 7


def _config(case: str, **train):
    changes = CASES[case]
    return small_config(
        model={"hidden_dropout": 0.2, "attention_dropout": 0.2},
        train={**changes["train"], "train_iters": STEPS, "eval_interval": 4, **train},
        schedule={"lr_decay_iters": STEPS},
        checkpoint={"save": "run", "save_interval": 5},
    )


def _stop_and_resume(context: ParallelContext, case: str, run: Path) -> None:
    train_on_rank(context, _config(case, exit_interval=STOP_AT), run)
    latest = find_latest(run)
    assert latest is not None
    assert read_manifest(latest).step == STOP_AT
    train_on_rank(context, _config(case), run, load=latest)


def _tensors(run: Path) -> dict[str, str]:
    """The hashes of a finished run's tensor files."""
    manifest = read_manifest(run / "checkpoints" / f"step_{STEPS:08d}")
    return {name: record.sha256 for name, record in manifest.files.items() if name.endswith(".safetensors")}


@pytest.mark.parametrize(
    ("case", "tp", "dp"), [("float64", 2, 1), ("float32-recompute", 2, 2), ("bf16", 1, 2), ("fp16", 2, 1)]
)
def test_stop_and_resume_is_bitwise_the_uninterrupted_run(ranks, tmp_path, case, tp, dp) -> None:
    layout = ParallelLayout(tp=tp, dp=dp)
    ranks(layout, train_on_rank, _config(case), tmp_path / "whole")
    ranks(layout, _stop_and_resume, case, tmp_path / "parts")
    assert exact_records(tmp_path / "parts") == exact_records(tmp_path / "whole")
    assert _tensors(tmp_path / "parts") == _tensors(tmp_path / "whole") != {}
    whole, parts = (
        read_manifest(tmp_path / run / "checkpoints" / f"step_{STEPS:08d}").state for run in ("whole", "parts")
    )
    assert parts == whole
    if case == "fp16":
        skipped = [r["step"] for r in exact_records(tmp_path / "whole") if r["kind"] == "train" and r["skipped"]]
        assert skipped, "the case is meant to skip steps"
        assert whole["optimizer"]["num_updates"] == STEPS - len(skipped)


def test_a_resume_at_another_layout_goes_on_with_the_same_samples(ranks, tmp_path) -> None:
    """Saved at tp 2 x dp 1, resumed at 1 x 2 and 4 x 1: equal to the uninterrupted run within rounding."""

    def config(micro_batch_size: int, **train):
        return small_config(train={"train_iters": STEPS, "micro_batch_size": micro_batch_size, **train})

    whole = assemble(ranks(ParallelLayout(tp=2), train_on_rank, config(8), tmp_path / "whole"))
    ranks(ParallelLayout(tp=2), train_on_rank, config(8, exit_interval=STOP_AT), tmp_path / "first")
    start = find_latest(tmp_path / "first")
    for layout, micro_batch_size in ((ParallelLayout(tp=1, dp=2), 4), (ParallelLayout(tp=4), 8)):
        run = tmp_path / f"second-{layout.tp}"
        resumed = assemble(ranks(layout, train_on_rank, config(micro_batch_size), run, start))
        assert losses(run)[: STEPS - STOP_AT] == pytest.approx(losses(tmp_path / "whole")[STOP_AT:STEPS], rel=1e-10)
        for name, values in whole.items():
            assert np.allclose(resumed[name], values, rtol=1e-9, atol=1e-10), name


def _resume_with_a_forgotten_moment(context: ParallelContext, case: str, run: Path, start: Path) -> None:
    trainer = build_trainer(context, _config(case), run, start)
    for name, tensor, _ in trainer.optimizer.tensors():
        if name.startswith("optimizer.exp_avg_sq"):
            tensor.zero_()
    with trainer.metrics:
        trainer.fit()


def test_a_forgotten_piece_of_state_would_be_seen(ranks, tmp_path) -> None:
    ranks(ParallelLayout(tp=2), train_on_rank, _config("float64", exit_interval=STOP_AT), tmp_path)
    start = find_latest(tmp_path)
    ranks(ParallelLayout(tp=2), train_on_rank, _config("float64"), tmp_path / "right", start)
    ranks(ParallelLayout(tp=2), _resume_with_a_forgotten_moment, "float64", tmp_path / "wrong", start)
    assert _tensors(tmp_path / "wrong") != _tensors(tmp_path / "right")
    assert exact_records(tmp_path / "wrong") != exact_records(tmp_path / "right")


def test_records_of_lost_steps_are_written_again_not_twice(tmp_path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n{"kind": "train", "st')
    keep_records(path, up_to_step=1)
    assert read_records(path) == [{"kind": "train", "step": 1}]
