"""A run that stands still: the report says where each rank is and which one keeps the others waiting."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from megascale.config.layout import ParallelLayout
from megascale.parallel.context import ParallelContext
from megascale.train.hang import HangDetector
from megascale.train.heartbeat import Heartbeat, hang_report, heartbeat_file, read_heartbeat, suspects

TIMEOUT = 0.6


def _stall(context: ParallelContext, run: Path, stalls: int, axis: str) -> list[str]:
    """All ranks do a few collectives; then one stays away from the next on an axis for a while."""
    told: list[str] = []
    detector = HangDetector(TIMEOUT, run, context.layout, context.rank, told.append)
    with detector.watching(context):
        detector.entered_phase("training")
        for _ in range(3):
            context.tp.all_reduce(torch.ones(4, 2))
            context.dp.all_reduce(torch.ones(3))
        if context.rank == stalls:
            stay_away(3 * TIMEOUT)
        getattr(context, axis).all_reduce(torch.ones(7, 5))
        context.world.barrier()
    return told


def stay_away(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize(("stalls", "axis"), [(1, "tp"), (2, "dp"), (3, "tp")])
def test_the_rank_that_stays_away_is_named(ranks, tmp_path, stalls, axis) -> None:
    layout = ParallelLayout(tp=2, dp=2)
    told = [text for texts in ranks(layout, _stall, tmp_path, stalls, axis) for text in texts]
    assert len(told) == 1, "one rank reports for all"
    report = told[0]
    assert f"ranks that keep the others waiting: {stalls}\n" in report
    (group,) = (g for g in (layout.tp_groups() if axis == "tp" else layout.dp_groups()) if stalls in g)
    (peer,) = (rank for rank in group if rank != stalls)
    lines = {rank: line for rank in range(4) for line in report.split("\n") if line.startswith(f"  rank {rank} on")}
    assert "last collective all_reduce over dp (3 float32), out of it again" in lines[stalls]
    assert f"last collective all_reduce over {axis} (7x5 float32), in it still" in lines[peer]
    assert "in it still" in lines[peer]
    assert "<-- suspect" in lines[stalls]
    assert "stay_away" in report, "where the suspect stands in the program"
    assert (tmp_path / "heartbeats" / "hang_00.txt").read_text().startswith("no progress for")


def _steady(context: ParallelContext, run: Path) -> list[str]:
    told: list[str] = []
    detector = HangDetector(TIMEOUT, run, context.layout, context.rank, told.append)
    with detector.watching(context):
        for _ in range(8):
            time.sleep(TIMEOUT / 5)
            context.world.barrier()
    return told


def test_a_run_that_is_only_slow_is_left_alone(ranks, tmp_path) -> None:
    assert ranks(ParallelLayout(tp=2), _steady, tmp_path) == [[], []]
    heartbeat = read_heartbeat(heartbeat_file(tmp_path, 1))
    assert heartbeat is not None
    assert heartbeat.rank == 1
    assert heartbeat.process > 0


def _beat(rank: int, world: int, tp: int, dp: int, inside: bool = True) -> Heartbeat:
    counts = {"world": world, "tp": tp, "dp": dp}
    return Heartbeat(rank, "h", 1, 1000.0, 900.0, 5, "training", "all_reduce over tp (1 float32)", inside, counts)


def test_a_rank_that_waits_for_a_suspect_is_none() -> None:
    """Rank 1 stays away from its tp group; rank 0 waits for it, and 2 and 3 wait for both in dp."""
    layout = ParallelLayout(tp=2, dp=2)
    beats = [_beat(0, 3, 8, 2), _beat(1, 3, 7, 2, inside=False), _beat(2, 3, 8, 3), _beat(3, 3, 8, 3)]
    assert suspects(beats, layout) == [1]
    # If waiting ranks were not excepted, rank 0 would be blamed as well: it is behind on dp.
    assert beats[0].counts["dp"] < beats[2].counts["dp"]


def test_a_silent_rank_is_the_suspect() -> None:
    layout = ParallelLayout(dp=2)
    assert suspects([_beat(0, 3, 0, 2), None], layout) == [1]
    assert "rank 1: no heartbeat" in hang_report([_beat(0, 3, 0, 2), None], layout, 60.0, 1000.0)


def test_an_old_heartbeat_means_a_frozen_rank() -> None:
    frozen = Heartbeat(1, "h", 1, 900.0, 890.0, 5, "training", "", False, {"world": 2})
    report = hang_report([_beat(0, 3, 0, 0), frozen], ParallelLayout(dp=2), 100.0, 1000.0)
    assert "HEARTBEAT 100 s OLD: dead or frozen  <-- suspect" in report
