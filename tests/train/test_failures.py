"""Failures of real processes: restarts that resume by themselves, exit codes, one traceback, audits, layout checks."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from megascale.checkpoint.manifest import read_manifest
from megascale.config.cli import parse_run_config
from megascale.train.elastic import resumed_after_restart
from megascale.train.failures import FIRST_FAILURE_FILE, RunStopped, first_failure_told_once
from megascale.train.heartbeat import heartbeat_file, read_heartbeat
from megascale.train.metrics import read_records
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError
from tests.train import test_command_line
from tests.train.test_command_line import _ROOT, _TORCHRUN, _start, _wait_for_step, as_arguments, run

data, flags = test_command_line.data, test_command_line.flags

_CHECK_LAYOUT = str(_ROOT / "tools" / "check_layout.py")


def test_torchrun_restarts_and_the_run_resumes_by_itself(flags, tmp_path) -> None:
    """Rank 1 is killed with SIGKILL; --load is not even given. The end equals that of the run that nobody killed."""
    steps = 150
    whole = {**flags, "--train-iters": steps, "--eval-interval": 1000, "--save-interval": 10, "--hidden-dropout": 0.1}
    whole |= {"--tensor-model-parallel-size": 2, "--log-interval": 5}
    assert run(as_arguments({**whole, "--save": tmp_path / "whole"}), _TORCHRUN).returncode == 0
    process = _start({**whole, "--save": tmp_path / "parts"}, [*_TORCHRUN, "--max-restarts", "2"])
    _wait_for_step(tmp_path / "parts", 30)
    victim = read_heartbeat(heartbeat_file(tmp_path / "parts", 1))
    assert victim is not None
    os.kill(victim.process, signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    resumed = re.search(r"resuming after step (\d+)", output)
    assert resumed, output
    assert "connectFullMesh" not in output, "the second start looked for the ranks of the first"
    assert int(resumed.group(1)) >= 20
    ends = [read_manifest(tmp_path / name / "checkpoints" / f"step_{steps:08d}") for name in ("whole", "parts")]
    assert ends[0].state == ends[1].state
    hashes = [{n: f.sha256 for n, f in end.files.items() if n.endswith("tensors")} for end in ends]
    assert hashes[0] == hashes[1]
    losses = [[r["loss"] for r in read_records(tmp_path / n / "metrics.jsonl")] for n in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_only_a_restarted_attempt_resumes_unasked(flags, tmp_path) -> None:
    save = tmp_path / "run"
    assert run(as_arguments({**flags, "--train-iters": 1, "--save": save})).returncode == 0
    parsed = parse_run_config(as_arguments({**flags, "--save": save}), LaunchEnvironment())
    assert resumed_after_restart(parsed, LaunchEnvironment()).config.checkpoint.load is None
    restarted = LaunchEnvironment(restart_count=1)
    assert resumed_after_restart(parsed, restarted).config.checkpoint.load == str(save)
    fresh = parse_run_config(as_arguments({**flags, "--save": tmp_path / "empty"}), LaunchEnvironment())
    assert resumed_after_restart(fresh, restarted) == fresh


@pytest.mark.parametrize(("extra", "code"), [({}, 75), ({"--exit-code-on-signal": 0}, 0)])
def test_the_exit_code_tells_a_scheduler_to_try_again(flags, tmp_path, extra, code) -> None:
    process = _start({**flags, "--train-iters": 100000, "--eval-interval": 100000, "--save": tmp_path / "run", **extra})
    _wait_for_step(tmp_path / "run", 3)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert "stopped by SIGUSR1" in output


def test_ids_outside_the_vocabulary_are_told_once_by_the_rank_that_reads_them(flags, data, tmp_path) -> None:
    """An error of the data on one rank alone, met while training: no other rank's broken collective is shown."""
    wrong = {**flags, "--vocab-size": 60, "--make-vocab-size-divisible-by": 4, "--save": tmp_path / "run"}
    finished = run(as_arguments(wrong), _TORCHRUN)
    assert finished.returncode != 0
    assert finished.stderr.count("is not below the vocabulary size 60") == 1, finished.stderr
    assert finished.stderr.count("Traceback") == 1, "torchrun's own, for a worker that failed"
    (folder,) = (tmp_path / "run" / "failures").iterdir()
    assert json.loads((folder / FIRST_FAILURE_FILE).read_text())["error"].startswith("UserError")


def _fail(folder: Path, rank: int, error: Exception) -> int:
    with (
        pytest.raises(SystemExit) as ended,
        first_failure_told_once(folder, LaunchEnvironment(rank, rank, 4, 4, "host")),
    ):
        raise error
    return int(str(ended.value.code))


def test_the_first_failure_is_told_and_the_others_are_kept(tmp_path, capsys) -> None:
    assert _fail(tmp_path, 2, ZeroDivisionError("the cause")) == 1
    assert _fail(tmp_path, 0, RuntimeError("connection closed by peer")) == 1
    told = capsys.readouterr().err
    assert told.startswith("rank 2 of 4 on host failed first:\nTraceback")
    assert "the cause" in told
    assert "connection closed" not in told
    assert "connection closed" in (tmp_path / "rank_00000.txt").read_text()
    assert json.loads((tmp_path / FIRST_FAILURE_FILE).read_text())["rank"] == 2


@pytest.mark.parametrize(("error", "code"), [(UserError("a mistake"), 2), (RunStopped("a limit"), 1)])
def test_messages_need_no_traceback(tmp_path, capsys, error, code) -> None:
    assert _fail(tmp_path, 1, error) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_where_nothing_can_be_written_nothing_is_lost(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("in the way")
    _fail(tmp_path / "file" / "folder", 3, ZeroDivisionError("the cause"))
    assert "the cause" in capsys.readouterr().err


def test_an_audit_names_the_documents_of_a_step(flags, data, tmp_path) -> None:
    import numpy as np

    from megascale.data.indexed import IndexedDataset

    arguments = as_arguments({**flags, "--save": tmp_path / "run"})
    audited = run([*arguments, "--audit-data", "3"])
    assert audited.returncode == 0, audited.stderr
    first, *lines = audited.stdout.splitlines()
    assert first == "step 3 reads samples 8 to 11"
    assert len(lines) == 4
    # The documents it names hold the very tokens that a run of these flags reads.
    from megascale.config.resolution import resolve
    from megascale.data.build import build_sources

    config = resolve(parse_run_config(as_arguments(flags), LaunchEnvironment()).config, 1)
    train = build_sources(config, None).train
    dataset = IndexedDataset(data)
    for number, line in zip(range(8, 12), lines, strict=True):
        assert line.startswith(f"sample {number}: {data} epoch 0: document ")
        spans = re.findall(r"document (\d+) \[(\d+):(\d+)\]", line)
        tokens = np.concatenate([dataset.tokens(int(d), int(a), int(b)) for d, a, b in spans])
        assert np.array_equal(tokens, train.sample(number))
    refused = run([*arguments, "--audit-data", "0"])
    assert refused.returncode == 2
    assert "steps count from 1" in refused.stderr


def _check(flags, *own: str):
    started = time.monotonic()
    launcher = [test_command_line.sys.executable, _CHECK_LAYOUT, *own, "--"]
    command = [*launcher, *as_arguments({**flags, "--global-batch-size": 8})]
    finished = test_command_line.subprocess.run(
        command, capture_output=True, text=True, env=test_command_line._environment(), timeout=200
    )
    return finished, time.monotonic() - started


def test_check_layout_gives_its_verdict_both_ways(flags) -> None:
    layouts = ("--steps", "3", "--layout", "tp=1", "--layout", "tp=2")
    finished, _ = _check(flags, *layouts)
    assert finished.returncode == 0, finished.stderr + finished.stdout
    assert "tp=2 against tp=1: the same model" in finished.stdout
    assert "1e-10 (sums in another order differ by about 1e-16 each" in finished.stdout
    finished, _ = _check(flags, *layouts, "--program", str(_ROOT / "tests" / "train" / "planted_bug.py"))
    assert finished.returncode == 1, finished.stderr + finished.stdout
    assert "tp=2 against tp=1: NOT THE SAME MODEL" in finished.stdout
    assert "gradient norm of step 1" in finished.stdout
    assert "weights of" in finished.stdout


def test_check_layout_says_what_it_cannot_run(flags) -> None:
    finished, _ = _check(flags, "--layout", "tp=1", "--layout", "tq=2")
    assert finished.returncode == 2
    assert "'tq=2' is not one of tp=N, dp=N and pp=N" in finished.stderr
