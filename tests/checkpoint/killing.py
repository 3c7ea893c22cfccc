"""Kills saves with SIGKILL and tells what a reader finds afterwards; run as a program by test_killed_saves.py.

The program imports torch once and forks a process for each save, so that hundreds of them can die in a few seconds.
One JSON object per line on standard output for each kill. Modes:

    points DIRECTORY SCENARIO [--lose-name]   one kill before and one after every change that a save makes to the disk
    loop DIRECTORY SECONDS                    kills at random moments of a process that saves without a pause
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megascale.checkpoint import retention as retention_module
from megascale.checkpoint import save as save_module
from megascale.checkpoint.boxes import Box
from megascale.checkpoint.load import find_latest, list_checkpoints, load_tensors, verify
from megascale.checkpoint.tensors import TensorSlice

# Every call through which a save changes the disk; the bytes of a file count as one change, at its fsync.
CALLS = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync")


def save_value(directory: Path, step: int, value: int) -> None:
    """A checkpoint whose every part says `value`, in two files' worth of slices."""
    slices = [
        TensorSlice("weight", (4, 3), (0, 0), torch.full((2, 3), float(value))),
        TensorSlice("weight", (4, 3), (2, 0), torch.full((2, 3), float(value))),
    ]
    save_module.save_checkpoint(directory, step, slices, {"value": value}, {}, 0, 1, lambda: None)


def observe(directory: Path) -> dict[str, Any]:
    """What a reader gets: the name and value of the newest checkpoint, proven whole, or the error."""
    names = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    damaged = [entry.step for entry in list_checkpoints(directory) if entry.problem is not None]
    try:
        path = find_latest(directory)
        if path is None:
            return {"names": names, "latest": None, "damaged": damaged}
        value = verify(path).state["value"]
        for box in (Box((0, 0), (4, 3)), Box((1, 1), (2, 2))):
            wanted = TensorSlice("weight", (4, 3), box.offset, torch.zeros(box.shape))
            load_tensors(path, [wanted])
            assert (wanted.data == value).all(), f"{path} holds {wanted.data.tolist()}, its state says {value}"
    except Exception as error:
        return {"names": names, "error": f"{type(error).__name__}: {error}", "damaged": damaged}
    return {"names": names, "latest": path.name, "value": value, "damaged": damaged}


def save_and_remove(directory: Path) -> None:
    """Save step 3, then keep the newest only, as rank 0 of a run does."""
    save_value(directory, 3, 3)
    retention_module.remove_surplus(directory, retention_module.Retention(keep_last=1), 3)


def in_process(act: Callable[[], None]) -> int:
    """Run `act` in a forked process; 0 when it finished, the signal that killed it otherwise."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(process, 0)
    assert not (os.WIFEXITED(status) and os.WEXITSTATUS(status)), "the save raised: see standard error"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def die_at(point: int) -> None:
    """Count the changes of the disk from now on; SIGKILL before (even point) or after (odd) number point // 2."""
    counter = itertools.count()

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            number = next(counter)
            if point == 2 * number:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*arguments, **keywords)
            finally:  # a call that fails (the directory is already there) is a moment to die at too
                if point == 2 * number + 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        return counted

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))


def kill_at_every_point(prepared: Path, work: Path, act: Callable[[Path], None]) -> Iterator[int]:
    """Yield after each kill of `act` in `work`, each time a new copy of `prepared`; the last time it was not killed."""
    for point in itertools.count():
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(prepared, work)

        def killed(point: int = point) -> None:
            die_at(point)
            act(work)

        survived = in_process(killed) == 0
        yield point
        if survived:
            return


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "first": lambda directory: save_value(directory, 1, 1),
    "next": lambda directory: save_value(directory, 2, 2),
    "again": lambda directory: save_value(directory, 1, 2),
    "retain": save_and_remove,
}


def points(directory: Path, scenario: str, with_recovery: bool) -> None:
    """Kill the scenario's save everywhere; for each different sight it leaves, kill the next save everywhere too."""
    prepared, work, second_work = directory / "prepared", directory / "work", directory / "second"
    prepared.mkdir(parents=True)
    if scenario != "first":
        save_value(prepared, 1, 1)
    if scenario == "retain":
        save_value(prepared, 2, 2)
    seen: set[tuple[str, ...]] = set()
    for point in kill_at_every_point(prepared, work, SCENARIOS[scenario]):
        sight = observe(work)
        print(json.dumps({"point": point, "then": None, **sight}))
        if not with_recovery or tuple(sight["names"]) in seen:
            continue
        seen.add(tuple(sight["names"]))
        for then in kill_at_every_point(work, second_work, lambda path: save_value(path, 3, 3)):
            print(json.dumps({"point": point, "then": then, "before": sight.get("value", 0), **observe(second_work)}))


def loop(directory: Path, seconds: float) -> None:
    """Kill a saving process again and again; each goes on where the last stopped. Every step is saved three times.

    It goes on for `seconds`, and on a busy machine for a minute more, until it has seen a dozen saves and half a one.
    """
    source = random.Random(20190812)
    deadline = time.monotonic() + seconds
    value = returned = 0
    seen_half_a_save = False
    while time.monotonic() < deadline + (0.0 if returned > 10 and seen_half_a_save else 60.0):
        reader, writer = os.pipe()

        def keep_saving(first: int = value + 1, writer: int = writer) -> None:
            for number in itertools.count(first):
                save_value(directory, number // 3, number)
                os.write(writer, number.to_bytes(8, "little"))

        process = os.fork()
        if process == 0:
            try:
                keep_saving()
            finally:
                os._exit(1)
        os.close(writer)
        time.sleep(source.uniform(0.0, 0.08))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        while select.select([reader], [], [], 0)[0] and (told := os.read(reader, 8)):
            returned = int.from_bytes(told, "little")
        os.close(reader)
        sight = observe(directory)
        value = sight.get("value", 0)
        hidden = [name for name in sight.pop("names") if name.startswith(".")]
        seen_half_a_save = seen_half_a_save or bool(hidden)
        signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        print(json.dumps({"returned": returned, "signal": signal_number, "hidden": hidden, **sight}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["points", "loop"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("what")
    parser.add_argument("--lose-name", action="store_true", help="planted bug: set aside under a name nobody looks for")
    parser.add_argument("--only", action="store_true", help="do not kill the save that comes after a killed one")
    parser.add_argument("--remove-in-place", action="store_true", help="planted bug: delete without renaming first")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.lose_name:
        save_module.replaced_path = lambda root, step: root / ".trash"
    if given.remove_in_place:
        retention_module.take_away = lambda path, to: shutil.rmtree(path) is None
    if given.mode == "points":
        points(given.directory, given.what, with_recovery=not (given.lose_name or given.only))
    else:
        loop(given.directory, float(given.what))


if __name__ == "__main__":
    main()
