"""One mistake is printed once, however many processes found it."""

import signal
import subprocess
import sys
import time

import pytest

from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError, exit_with

_PROGRAM = """
import sys
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError, exit_with
environment = LaunchEnvironment(rank=int(sys.argv[1]), local_rank=0, world_size=4, local_world_size=2, hostname="node7")
print("ready", flush=True)
exit_with(UserError("--lr -1 is out of range."), environment, grace_seconds=float(sys.argv[2]))
"""


def _start(rank: int, grace_seconds: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", _PROGRAM, str(rank), str(grace_seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_user_error_is_a_value_error():
    assert issubclass(UserError, ValueError)


def test_rank_zero_prints_and_exits_with_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        exit_with(UserError("--lr -1 is out of range."), LaunchEnvironment())
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: --lr -1 is out of range.\n"


def test_rank_zero_does_not_wait():
    process = _start(rank=0, grace_seconds=60)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (2, "error: --lr -1 is out of range.\n")


def test_another_rank_is_silent_when_the_launcher_ends_it():
    process = _start(rank=1, grace_seconds=60)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)  # it is waiting now
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert errors == ""
    assert process.returncode in (2, -signal.SIGTERM)


def test_a_rank_alone_with_its_error_tells_who_it_is():
    process = _start(rank=3, grace_seconds=0.1)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (2, "error: rank 3 on node7: --lr -1 is out of range.\n")
