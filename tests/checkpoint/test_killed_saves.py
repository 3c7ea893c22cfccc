"""A save killed at any point leaves a checkpoint that loads, no older than the last one whose save returned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def killing(repository: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.checkpoint.killing", *arguments]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("scenario", "before", "after"),
    [("first", None, 1), ("next", 1, 2), ("again", 1, 2)],
    ids=["the first save", "a later step", "the same step again"],
)
def test_every_point_of_a_save(repository: Path, tmp_path: Path, scenario: str, before: int | None, after: int) -> None:
    """Before and after each of its system calls: the old checkpoint up to some point, the new one from there on."""
    sights = killing(repository, "points", str(tmp_path), scenario)
    assert not [sight for sight in sights if "error" in sight]

    first_kills = [sight for sight in sights if sight["then"] is None]
    assert len(first_kills) > 30, "the kills reach every call"
    values = [sight.get("value") for sight in first_kills]
    turn = values.index(after)
    assert values == [before] * turn + [after] * (len(values) - turn)
    assert 0 < turn < len(values) - 1, "some kills come before the new checkpoint is there and some after"
    assert all(not name.startswith(".") for name in first_kills[-1]["names"]), "the save that was not killed is tidy"

    # The next save, which cleans up after the killed one, is killed everywhere too.
    recoveries = [sight for sight in sights if sight["then"] is not None]
    assert len({tuple(sight["names"]) for sight in first_kills}) == len({sight["point"] for sight in recoveries}) > 2
    for sight in recoveries:
        assert sight.get("value", 0) in (sight["before"], 3), sight
    finished = [
        one for one, following in zip(recoveries, [*recoveries[1:], {"then": 0}], strict=True) if not following["then"]
    ]
    for sight in finished:
        assert sight["value"] == 3
        assert all(not name.startswith(".") for name in sight["names"]), "whatever was left behind is gone"
        if sight["before"]:
            assert {"step_00000003"} < set(sight["names"]), "and what was complete is still there under its name"


def test_the_points_would_show_a_moment_without_a_checkpoint(repository: Path, tmp_path: Path) -> None:
    """Planted bug: the former checkpoint set aside where no reader looks. Some kill must then leave nothing to load."""
    sights = killing(repository, "points", str(tmp_path), "again", "--lose-name")
    assert any(sight.get("value") is None for sight in sights if sight["then"] is None)


def test_kills_at_random_moments(repository: Path, tmp_path: Path) -> None:
    sights = killing(repository, "loop", str(tmp_path / "checkpoints"), "5")
    assert len(sights) > 10
    assert all(sight["signal"] == 9 for sight in sights), "no save failed by itself"
    for sight in sights:
        assert "error" not in sight, sight
        assert sight.get("value", 0) >= sight["returned"], sight
    assert sights[-1]["returned"] > 10
    assert any(sight["hidden"] for sight in sights), "some kills hit a save halfway"
