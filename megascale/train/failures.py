"""The first failure of a run, told once.

When one rank fails, the others fail a moment later because their collectives break. So each failing rank tries to
create one file, which only the first can: it prints its traceback, the others stay silent. Every rank's traceback is
kept beside that file.

    <run>/failures/20260131-235959-123/first.json      rank, host, time and message of the first failure
    <run>/failures/20260131-235959-123/rank_00003.txt  the traceback of each rank that failed

The folder is named after the moment at which the ranks were started, so that each restart has its own. A run without a
directory uses one in the host's temporary files instead; then each host tells its first failure.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megascale.parallel.context import Axis
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import USER_ERROR_EXIT_CODE, UserError

FIRST_FAILURE_FILE = "first.json"
FAILURE_EXIT_CODE = 1


class RunStopped(RuntimeError):
    """The run ends by a rule that it was given; the message says all there is to say."""


def failure_directory(run_directory: str | None, world: Axis) -> Path:
    """Return where the failures of this start are told, the same on every rank; all ranks call this together."""
    (started,) = world.sum_floats([time.time() if world.rank == 0 else 0.0])
    name = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started)) + f"-{int(started * 1000) % 1000:03d}"
    if run_directory is not None:
        return Path(run_directory) / "failures" / name
    return Path(tempfile.gettempdir()) / f"megascale-failures-{os.getuid()}" / name


@contextmanager
def first_failure_told_once(directory: Path, environment: LaunchEnvironment) -> Iterator[None]:
    """End the process, should the `with` block raise, so that of all ranks only the first to fail prints anything.

    Raises:
        SystemExit: With 2 for a `UserError`, else with 1, in place of whatever the block raised.
    """
    try:
        yield
    except Exception as error:
        text = traceback.format_exc()
        if _is_first(directory, environment, error, text):
            where = f"rank {environment.rank} of {environment.world_size} on {environment.hostname}"
            speaks_for_itself = isinstance(error, UserError | RunStopped)
            told = f"error: {error}\n" if speaks_for_itself else f"{where} failed first:\n{text}"
            # One write of one string: lines of two ranks cannot interleave inside a message.
            sys.stderr.write(told)
            sys.stderr.flush()
        raise SystemExit(USER_ERROR_EXIT_CODE if isinstance(error, UserError) else FAILURE_EXIT_CODE) from None


def _is_first(directory: Path, environment: LaunchEnvironment, error: Exception, text: str) -> bool:
    """Keep a rank's traceback; return whether no rank failed before. Where nothing can be written, every rank is."""
    facts = {
        "rank": environment.rank,
        "host": environment.hostname,
        "time": time.time(),
        "error": f"{type(error).__name__}: {error}",
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with (directory / FIRST_FAILURE_FILE).open("x", encoding="utf-8") as file:
                json.dump(facts, file)
            is_first = True
        except FileExistsError:
            is_first = False
        (directory / f"rank_{environment.rank:05d}.txt").write_text(text, encoding="utf-8")
    except OSError:
        return True
    return is_first
