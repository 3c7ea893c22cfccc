"""Which ranks are slow: each rank's own time per step, without what it waits for others.

All ranks end a step together, so a step takes equally long on each of them. What tells them apart is how long a rank
is inside collectives: the slow one arrives last and waits the least. A rank's own time is the step's minus that. On
CUDA, collectives are timed on the device by events (a collective runs until the last rank has come); their own transfer
time counts as waiting too, on every rank alike.

Written to `rank_times.jsonl`, a record per report: `step`, `median_seconds` (of the ranks' own medians), `slow` (ranks)
and per rank its `rank`, `host`, `p50` and `p95` of own seconds, and `step_p50` and `step_p95` of whole steps.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megascale.data.loader import Batch
from megascale.parallel.collective_log import Collective
from megascale.parallel.context import ParallelContext
from megascale.train.gathering import gather_facts
from megascale.train.metrics import RunMetrics
from megascale.train.observers import Observer, TrainingStep
from megascale.train.state import TrainState

RANK_TIMES_FILE = "rank_times.jsonl"
# A rank is slow when it needs this much longer than the median rank, by itself and per step.
SLOW_RATIO = 1.2


class WaitingTime:
    """Adds up the time that a rank is inside collectives; a watcher of `CollectiveLog`."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._entered = 0.0
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def entered(self, collective: Collective) -> None:
        if self._on_device:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self._events.append(pair)
        self._entered = time.perf_counter()

    def left(self) -> None:
        if self._on_device:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._entered

    def take(self) -> float:
        """Return the seconds since the last call; for CUDA all work must be done."""
        seconds, self._seconds = self._seconds, 0.0
        # A started collective is left when it is waited for; one never waited for has no second event.
        seconds += sum(a.elapsed_time(b) / 1000.0 for a, b in self._events if a.query() and b.query())
        self._events = []
        return seconds


class RankTimes(Observer):
    """Reports every `interval` steps; between reports it costs two clock readings per collective.

    Args:
        waiting: A watcher of this context's collectives.
    """

    def __init__(
        self,
        interval: int,
        run_directory: Path | None,
        context: ParallelContext,
        metrics: RunMetrics,
        waiting: WaitingTime,
    ) -> None:
        self._interval, self._context, self._metrics, self._waiting = interval, context, metrics, waiting
        self._path = run_directory / RANK_TIMES_FILE if run_directory is not None and context.speaks else None
        self._own: list[float] = []
        self._whole: list[float] = []
        self._begin()

    def entered_phase(self, phase: str) -> None:
        if phase == "training":
            self._begin()  # validation and saving are no part of a step

    def after_step(self, state: TrainState, batch: Batch, step: TrainingStep) -> None:
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)
        seconds = time.perf_counter() - self._since
        self._whole.append(seconds)
        self._own.append(max(0.0, seconds - self._waiting.take()))
        if state.step % self._interval == 0:
            self._report(state.step)
        self._begin()

    def _begin(self) -> None:
        self._waiting.take()
        self._since = time.perf_counter()

    def _report(self, step: int) -> None:
        mine = {"rank": self._context.rank, "host": socket.gethostname()}
        for name, values in (("", self._own), ("step_", self._whole)):
            mine |= {f"{name}p{percent}": float(np.percentile(values, percent)) for percent in (50, 95)}
        self._own, self._whole = [], []
        ranks = gather_facts(self._context.world, mine)
        median, slow = slow_ranks(ranks)
        record = {"step": step, "median_seconds": median, "slow": [r["rank"] for r in slow], "ranks": ranks}
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        self._metrics.say(describe_ranks(step, median, slow, ranks))


def slow_ranks(ranks: list[dict[str, Any]]) -> tuple[float, list[dict[str, Any]]]:
    """Return the median of the ranks' own p50 and the ranks that exceed it by `SLOW_RATIO`, slowest first.

    The lower median: of two ranks, the slower one is measured by the faster.
    """
    median = statistics.median_low([r["p50"] for r in ranks])
    slow = [r for r in ranks if r["p50"] > SLOW_RATIO * median]
    return median, sorted(slow, key=lambda r: -r["p50"])


def describe_ranks(step: int, median: float, slow: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> str:
    """Return a report as a line, and one more per slow rank."""
    fastest, slowest = (pick(ranks, key=lambda r: r["p50"]) for pick in (min, max))
    lines = [
        f"own time per step up to step {step}: median {median:.4f} s, from {fastest['p50']:.4f} s (rank "
        f"{fastest['rank']}) to {slowest['p50']:.4f} s (rank {slowest['rank']}); whole steps "
        f"{max(r['step_p50'] for r in ranks):.4f} s"
    ]
    for r in slow:
        lines.append(
            f"  slow: rank {r['rank']} on {r['host']} needs {r['p50']:.4f} s (p95 {r['p95']:.4f} s), "
            f"{r['p50'] / max(median, 1e-9):.2f} x the median"
        )
    return "\n".join(lines)
