"""The restart matrix: a rank is killed with SIGKILL at awkward moments; what is resumed equals what never stopped.

At the same layout bit for bit, at another one within rounding. (SIGTERM at such moments: test_stopping.py.)
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megascale.checkpoint import save as save_module
from megascale.checkpoint.manifest import find_latest, list_checkpoints, read_manifest
from megascale.config.layout import ParallelLayout
from megascale.data.indexed import IndexedDataset, IndexedWriter
from megascale.data.samples import ShardedSamples
from megascale.parallel.context import ParallelContext, launch
from megascale.train.trainer import Trainer
from tests.train.training import EOD, assemble, build_trainer, exact_records, losses, pieces, small_config

STEPS, SAVE_INTERVAL, KILL_AT = 9, 3, 5
BATCH, MICRO = 8, 2
LAYOUT, OTHER = ParallelLayout(tp=2), ParallelLayout(dp=2)
# 42 samples an epoch: the sixth step, of samples 40 to 47, reads the last of one epoch and the first of the next.
SAMPLES_PER_EPOCH = 42


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _mid_accumulation(trainer: Trainer) -> None:
    """In the third of four micro-batches of a step."""
    streams = trainer.runner._streams
    start = streams.start

    def starting(step: int, micro_batch: int) -> None:
        if (step + 1, micro_batch) == (KILL_AT, 2):
            _kill()
        start(step, micro_batch)

    streams.start = starting


def _mid_save(trainer: Trainer) -> None:
    """With the tensors of the second checkpoint written and its record not."""
    write = save_module.write_tensor_file

    def writing(path, content):
        record = write(path, content)
        if "00000006" in str(path):
            _kill()
        return record

    save_module.write_tensor_file = writing


def _mid_evaluation(trainer: Trainer) -> None:
    """In the second batch of the validation after step 4."""
    score, done = trainer.runner.score, []

    def scoring(micro_batches) -> float:
        done.append(trainer.state.step)
        if len(done) == 2:
            _kill()
        return score(micro_batches)

    trainer.runner.score = scoring


def _before_step(number: int, trainer: Trainer) -> None:
    """Between a step and the next one's first pass."""
    run = trainer.runner.run

    def running(micro_batches, step, *args, **kwargs) -> float:
        if step + 1 == number:
            _kill()
        return run(micro_batches, step, *args, **kwargs)

    trainer.runner.run = running


POINTS = {
    "mid-accumulation": _mid_accumulation,
    "mid-save": _mid_save,
    "mid-evaluation": _mid_evaluation,
    # The first steps of the fp16 case overflow and are skipped; step 4, before the kill, is one of them.
    "after-a-skipped-step": partial(_before_step, 5),
    "epoch-boundary": partial(_before_step, 7),
}


def _config(point: str):
    precision = {"params_dtype": "float64"}
    if point == "after-a-skipped-step":
        precision = {"params_dtype": "float32", "fp16": True, "initial_loss_scale": 2.0**24, "hysteresis": 1}
    return small_config(
        train={
            **precision,
            "train_iters": STEPS,
            "micro_batch_size": MICRO,
            "global_batch_size": BATCH,
            "eval_interval": 4,
            "eval_iters": 3,
        },
        schedule={"lr_decay_iters": STEPS},
        checkpoint={"save": "run", "save_interval": SAVE_INTERVAL},
    )


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    prefix = tmp_path_factory.mktemp("data") / "documents"
    random = np.random.RandomState(3)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(27):
            writer.add_document([*random.randint(0, EOD, 24), EOD])
    return prefix


def _train(context: ParallelContext, point: str, prefix: Path, run: Path, killed: bool = False):
    source = ShardedSamples(IndexedDataset(prefix), None, 16, 1, seed=5)
    assert source.samples_per_epoch == SAMPLES_PER_EPOCH
    trainer = build_trainer(context, _config(point), run, find_latest(run), source)
    if killed and context.rank == context.world.size - 1:
        POINTS[point](trainer)
    with trainer.metrics:
        trainer.fit()
    return pieces(trainer.optimizer)


def _killed_rank(rank: int, rendezvous: str, point: str, prefix: Path, run: Path) -> None:
    torch.set_num_threads(1)
    os.close(2)  # what the surviving rank says of its lost peer is no news
    with launch(LAYOUT, rank, torch.device("cpu"), "gloo", 1.0, init_method=rendezvous) as context:
        _train(context, point, prefix, run, killed=True)


def _train_until_killed(point: str, prefix: Path, run: Path) -> list[int | None]:
    """Train with a rank that kills itself; return how the ranks ended. Processes are forked with torch loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.training", "megascale.data.indexed"])
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        arguments = [(rank, rendezvous, point, prefix, run) for rank in range(LAYOUT.world_size)]
        processes = [context.Process(target=_killed_rank, args=a, daemon=True) for a in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=100)
            if process.is_alive():
                process.kill()
                process.join()
    return [process.exitcode for process in processes]


def _hashes(run: Path) -> dict[str, str]:
    manifest = read_manifest(run / "checkpoints" / f"step_{STEPS:08d}")
    return {name: record.sha256 for name, record in manifest.files.items() if name.endswith(".safetensors")}


@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed_is_never_stopped(ranks, tmp_path, prefix, point) -> None:
    whole, parts, other = tmp_path / "whole", tmp_path / "parts", tmp_path / "other"
    weights = assemble(ranks(LAYOUT, _train, point, prefix, whole))
    ended = _train_until_killed(point, prefix, parts)
    assert ended[1] == -signal.SIGKILL
    assert ended[0] not in (0, -signal.SIGKILL), "the other rank fails, it does not hang"
    saved = 3 if KILL_AT <= 5 and point != "epoch-boundary" else 6
    assert list_checkpoints(parts)[0].step == saved
    shutil.copytree(parts, other)

    ranks(LAYOUT, _train, point, prefix, parts)
    assert exact_records(parts) == exact_records(whole)
    assert _hashes(parts) == _hashes(whole) != {}

    resumed = assemble(ranks(OTHER, _train, point, prefix, other))
    if point == "after-a-skipped-step":
        skipped = [r["skipped"] for r in exact_records(whole) if r["kind"] == "train"]
        assert skipped[3], "the step before the kill is meant to be skipped"
        assert not skipped[-1]
        assert losses(other) == pytest.approx(losses(whole), rel=2e-3)
    else:
        assert losses(other) == pytest.approx(losses(whole), rel=1e-10)
        for name, values in weights.items():
            assert np.allclose(resumed[name], values, rtol=1e-9, atol=1e-10), name
