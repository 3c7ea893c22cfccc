"""pretrain_gpt.py as a user runs it: what it refuses and how, stopping by signal, resuming, being killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

from megascale.checkpoint.manifest import find_latest, list_checkpoints, read_manifest, verify
from megascale.data.indexed import IndexedWriter
from megascale.train.metrics import read_records

_ROOT = Path(__file__).resolve().parent.parent.parent
_SCRIPT = str(_ROOT / "pretrain_gpt.py")
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
VOCAB_SIZE = 100


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}


def run(arguments: Sequence[object], launcher: Sequence[str] = (sys.executable,)) -> subprocess.CompletedProcess[str]:
    command = [*launcher, _SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=120)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    prefix = tmp_path_factory.mktemp("data") / "words"
    random = np.random.RandomState(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(300):
            writer.add_document(random.randint(0, VOCAB_SIZE, random.randint(50, 150)))
    return prefix


@pytest.fixture
def flags(data) -> dict[str, object]:
    """A run that works."""
    return {
        "--num-layers": 2,
        "--hidden-size": 32,
        "--num-attention-heads": 4,
        "--seq-length": 16,
        "--vocab-size": VOCAB_SIZE,
        "--make-vocab-size-divisible-by": 4,
        "--data-path": data,
        "--split": "9,1",
        "--micro-batch-size": 4,
        "--train-iters": 6,
        "--eval-interval": 3,
        "--eval-iters": 1,
        "--log-interval": 1,
    }


def as_arguments(flags: dict[str, object]) -> list[str]:
    return [str(word) for name, value in flags.items() for word in ([name] if value is True else [name, value])]


def _checkpoint_of_another_model(flags: dict[str, object], folder: Path) -> dict[str, object]:
    finished = run(as_arguments({**flags, "--train-iters": 1, "--save": folder / "other"}))
    assert finished.returncode == 0, finished.stderr
    return {"--load": folder / "other", "--hidden-size": 64}


def _garbage_tokenizer(flags: dict[str, object], folder: Path) -> dict[str, object]:
    (folder / "tokenizer.json").write_text("{ not a tokenizer")
    return {"--tokenizer-model": folder / "tokenizer.json"}


# What to change in a working run, and what the one message must say.
WRONG = {
    "hidden by heads": ({"--hidden-size": 30}, ["--hidden-size 30", "--num-attention-heads 4", "28 or 32"]),
    "heads by tp": (
        {"--tensor-model-parallel-size": 3, "--world-size": 3},
        ["--num-attention-heads 4", "--tensor-model-parallel-size 3"],
    ),
    "vocabulary by tp": (
        {"--tensor-model-parallel-size": 8, "--num-attention-heads": 8},
        ["--tensor-model-parallel-size 8", "--make-vocab-size-divisible-by 4", "100"],
    ),
    "world by tp": ({"--tensor-model-parallel-size": 2}, ["world size 1", "--tensor-model-parallel-size 2"]),
    "global by micro batch": (
        {"--global-batch-size": 6},
        ["--global-batch-size 6", "--micro-batch-size 4", "4 or 8"],
    ),
    "positions": (
        {"--max-position-embeddings": 8},
        ["--seq-length 16", "--max-position-embeddings 8"],
    ),
    "unknown flag": ({"--hidden-sizes": 32}, ["--hidden-sizes", "Did you mean --hidden-size?"]),
    "missing data": ({"--data-path": "nowhere/words"}, ["nowhere/words.bin", "not found"]),
    "unreadable tokenizer": (_garbage_tokenizer, ["tokenizer.json"]),
    "fp16 with float64": ({"--fp16": True, "--params-dtype": "float64"}, ["--fp16", "--params-dtype float64"]),
    "another model": (_checkpoint_of_another_model, ["--hidden-size 32 in the checkpoint, 64 now"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_gives_one_message_and_exit_code_2(name, flags, tmp_path) -> None:
    change, said = WRONG[name]
    change = change(flags, tmp_path) if callable(change) else change
    started = time.monotonic()
    finished = run(as_arguments({**flags, **change}))
    seconds = time.monotonic() - started
    assert finished.returncode == 2, finished.stderr
    assert finished.stderr.count("error:") == 1
    assert "Traceback" not in finished.stderr
    assert finished.stdout == ""
    for words in said:
        assert words in finished.stderr
    assert seconds < 10


def test_all_broken_rules_are_told_together(flags) -> None:
    change = {"--hidden-size": 30, "--global-batch-size": 6, "--max-position-embeddings": 8}
    message = run(as_arguments({**flags, **change})).stderr
    assert message.startswith("error: 3 problems")


@pytest.mark.parametrize("name", ["hidden by heads", "missing data"])
def test_under_torchrun_it_is_printed_once(name, flags, tmp_path) -> None:
    finished = run(as_arguments({**flags, **WRONG[name][0]}), _TORCHRUN)
    assert finished.returncode != 0
    assert finished.stderr.count("error: ") == 1, finished.stderr
    # Every rank ends with 2; torchrun itself always ends with 1 when a rank fails.
    assert "exitcode  : 2" in finished.stderr


def test_print_config_and_dry_run(flags, tmp_path) -> None:
    printed = run([*as_arguments(flags), "--print-config"])
    assert printed.returncode == 0, printed.stderr
    resolved = yaml.safe_load(printed.stdout)
    assert resolved["model"]["ffn_hidden_size"] == 128
    (tmp_path / "run.yaml").write_text(printed.stdout)
    again = run(["--config", tmp_path / "run.yaml", "--print-config"])
    assert again.stdout == printed.stdout
    dry = run([*as_arguments(flags), "--dry-run", "--world-size", "8", "--global-batch-size", "32"])
    assert dry.returncode == 0, dry.stderr
    assert "8 data-parallel replicas" in dry.stdout
    assert "samples an epoch" in dry.stdout


def test_a_run_directory_holds_everything(flags, tmp_path) -> None:
    finished = run(as_arguments({**flags, "--save": tmp_path / "run"}))
    assert finished.returncode == 0, finished.stderr
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "config.yaml",
        "loss.png",
        "metrics.jsonl",
        "tensorboard",
    ]
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    train = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in train] == [1, 2, 3, 4, 5, 6]
    expected = ["step", "samples", "tokens", "loss", "lr", "grad_norm", "loss_scale", "seconds", "tokens_per_second"]
    assert set(expected) <= set(train[0])
    assert [r["step"] for r in records if r["kind"] == "validation"] == [3, 6]
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert read_manifest(find_latest(tmp_path / "run")).config == json.loads(json.dumps(config))


def test_a_directory_with_checkpoints_is_not_overwritten(flags, tmp_path) -> None:
    arguments = as_arguments({**flags, "--train-iters": 2, "--save": tmp_path / "run"})
    assert run(arguments).returncode == 0
    refused = run(arguments)
    assert refused.returncode == 2
    assert f"--load {tmp_path / 'run'}" in refused.stderr
    missing = run([*arguments, "--load", tmp_path / "elsewhere"])
    assert missing.returncode == 2
    assert "holds no checkpoint" in missing.stderr


def test_one_command_both_starts_and_resumes(flags, tmp_path) -> None:
    both = {**flags, "--save": tmp_path / "run", "--load": tmp_path / "run"}
    assert run(as_arguments({**both, "--exit-interval": 4})).returncode == 0
    finished = run(as_arguments(both))
    assert finished.returncode == 0, finished.stderr
    assert "resuming after step 4" in finished.stdout
    steps = [r["step"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]


def _start(flags: dict[str, object], launcher: Sequence[str] = (sys.executable,)) -> subprocess.Popen[str]:
    command = [*launcher, _SCRIPT, *as_arguments(flags)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment(), start_new_session=True
    )


def _wait_for_step(run_directory: Path, step: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        records = read_records(run_directory / "metrics.jsonl")
        if records and records[-1]["step"] >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step} within {seconds} s")


# How checkpoints are written changes nothing of what a run promises.
SAVING = pytest.mark.parametrize(
    "saving", [{}, {"--async-save": True, "--keep-last": 2}], ids=["direct", "background and keep 2"]
)


@SAVING
def test_sigterm_under_torchrun_saves_and_exits(flags, tmp_path, saving) -> None:
    endless = {
        **flags,
        "--train-iters": 100000,
        "--tensor-model-parallel-size": 2,
        "--save": tmp_path / "run",
        **saving,
    }
    process = _start({**endless, "--eval-interval": 100000}, _TORCHRUN)
    _wait_for_step(tmp_path / "run", 5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert "stopped by SIGTERM" in output, output
    latest = verify(find_latest(tmp_path / "run"))
    assert latest.step == read_records(tmp_path / "run" / "metrics.jsonl")[-1]["step"] >= 5


@SAVING
def test_kill_9_loses_nothing_older_than_the_last_checkpoint(flags, tmp_path, saving) -> None:
    """Killed at random moments, often inside a save; resumed each time; the end equals the uninterrupted run."""
    total, every = 60, 2
    whole = {
        **flags,
        "--train-iters": total,
        "--save-interval": every,
        "--eval-interval": 1000,
        "--log-interval": every,
    }
    assert run(as_arguments({**whole, "--save": tmp_path / "whole"})).returncode == 0
    parts = {**whole, "--save": tmp_path / "parts", "--load": tmp_path / "parts", **saving}
    random = np.random.RandomState(1)
    seen = 0
    for _ in range(3):
        process = _start(parts)
        try:
            _wait_for_step(tmp_path / "parts", seen + every)
            time.sleep(random.uniform(0, 0.3))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        entries = list_checkpoints(tmp_path / "parts")
        assert all(entry.problem is None for entry in entries), "no half-written checkpoint has a checkpoint's name"
        # In the background, the first one may not be complete yet.
        newest = entries[0].step if entries else 0
        assert newest >= seen, "an older state than before the kill"
        if entries:
            verify(entries[0].path)
        seen = newest
        if seen >= total:
            break
    assert run(as_arguments(parts)).returncode == 0
    ends = [read_manifest(tmp_path / name / "checkpoints" / f"step_{total:08d}") for name in ("whole", "parts")]
    assert ends[0].files["rank_00000.safetensors"].sha256 == ends[1].files["rank_00000.safetensors"].sha256
    losses = [
        [r["loss"] for r in read_records(tmp_path / name / "metrics.jsonl") if r["kind"] == "train"]
        for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1]


def test_the_newest_checkpoint_is_not_silently_passed_over(flags, tmp_path) -> None:
    """Going on from an older checkpoint of the same run directory would mix two histories."""
    save = tmp_path / "run"
    assert run(as_arguments({**flags, "--save": save, "--save-interval": 3})).returncode == 0
    older = save / "checkpoints" / "step_00000003"
    refused = run(as_arguments({**flags, "--save": save, "--load": older}))
    assert refused.returncode == 2
    assert "step_00000006" in refused.stderr
    shutil.rmtree(save / "checkpoints" / "step_00000006")
    assert run(as_arguments({**flags, "--save": save, "--load": older})).returncode == 0


def _convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_ROOT / "tools" / "convert_checkpoint.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=120)


def test_a_flipped_byte_is_refused_and_passed_over_when_asked(flags, tmp_path) -> None:
    """Two ranks; the damage lies in what rank 1 wrote."""
    save = tmp_path / "run"
    settings = {**flags, "--tensor-model-parallel-size": 2, "--save": save, "--load": save, "--save-interval": 3}
    assert run(as_arguments(settings), _TORCHRUN).returncode == 0
    damaged = save / "checkpoints" / "step_00000006" / "rank_00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)

    refused = run(as_arguments({**settings, "--train-iters": 8}), _TORCHRUN)
    assert refused.returncode != 0
    assert "rank_00001.safetensors is not what was saved" in refused.stderr
    assert "--load-policy newest-intact" in refused.stderr
    assert "step_00000003" in refused.stderr

    taken = run(as_arguments({**settings, "--train-iters": 8, "--load-policy": "newest-intact"}), _TORCHRUN)
    assert taken.returncode == 0, taken.stderr
    assert "not taken: checkpoint of step 6" in taken.stdout
    assert "resuming after step 3" in taken.stdout
    checked = _convert("verify", save)
    assert checked.returncode == 0, "step 6 was reached again and written anew"


def test_a_converted_checkpoint_trains_on_as_the_original(flags, tmp_path) -> None:
    """Saved with ZeRO-1 on two ranks, recut into 4 files for tensor-parallel size 2: the same run from there on."""
    zero = {**flags, "--use-distributed-optimizer": True, "--save": tmp_path / "run", "--save-interval": 2}
    assert run(as_arguments({**zero, "--train-iters": 4}), _TORCHRUN).returncode == 0
    source = tmp_path / "run" / "checkpoints" / "step_00000004"
    done = _convert("reshard", source, tmp_path / "cut", "--tensor-model-parallel-size", 2, "--num-files", 4)
    assert done.returncode == 0, done.stderr
    on = {**flags, "--micro-batch-size": 8}
    ends = []
    for name, start in (("from-original", source), ("from-cut", tmp_path / "cut")):
        finished = run(as_arguments({**on, "--load": start, "--save": tmp_path / name}))
        assert finished.returncode == 0, finished.stderr
        ends.append(verify(find_latest(tmp_path / name)))
    assert ends[0].step == 6
    assert ends[0].files["rank_00000.safetensors"] == ends[1].files["rank_00000.safetensors"]

    mean = _convert("average", tmp_path / "run", tmp_path / "mean", "--num-checkpoints", 2)
    assert mean.returncode == 0, mean.stderr
    assert "copied from step 4, not averaged" in mean.stdout
    finished = run(as_arguments({**on, "--load": tmp_path / "mean", "--save": tmp_path / "from-mean"}))
    assert finished.returncode == 0, finished.stderr
    shown = _convert("show", tmp_path / "run")
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:]] == ["4", "2"]
    refused = _convert("average", tmp_path / "run", tmp_path / "more", "--num-checkpoints", 3)
    assert refused.returncode == 2
    assert "holds 2 complete checkpoints" in refused.stderr
