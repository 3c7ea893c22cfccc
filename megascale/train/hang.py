"""A watchdog thread per rank that notices when a run stands still and says where each rank is.

Progress is a step, a change of phase or a collective entered or left. A rank without any for the whole timeout writes
its heartbeat; the first of the ranks to notice also waits a moment for the others', then writes the report to
`<run>/heartbeats/hang_00.txt` and prints it. The run is not ended: the collectives' own timeout
(--distributed-timeout-minutes) does that, and a report may be about something that is just slow. Without a run
directory each rank prints its own whereabouts.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megascale.config.layout import ParallelLayout
from megascale.data.loader import Batch
from megascale.parallel.collective_log import WAIT, Collective
from megascale.parallel.context import ParallelContext
from megascale.train.heartbeat import (
    HEARTBEATS_DIRECTORY,
    Heartbeat,
    hang_report,
    heartbeat_file,
    read_heartbeat,
    write_heartbeat,
)
from megascale.train.observers import Observer, TrainingStep
from megascale.train.state import TrainState

# Looks per timeout; the longest between two heartbeats, in seconds.
_LOOKS_PER_TIMEOUT = 8
_LONGEST_SILENCE = 60.0


def _print_to_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class HangDetector(Observer):
    """Notes where its rank is, and watches; as an observer of steps and a watcher of collectives.

    Args:
        tell: Where a report goes, besides its file.
    """

    def __init__(
        self,
        timeout_seconds: float,
        run_directory: Path | None,
        layout: ParallelLayout,
        rank: int,
        tell: Callable[[str], None] = _print_to_stderr,
    ) -> None:
        self._timeout, self._directory, self._layout, self._rank = timeout_seconds, run_directory, layout, rank
        self._tell = tell
        self._main_thread = threading.get_ident()
        self._finished = threading.Event()
        self._started = self._progress = time.time()
        self._step, self._phase = 0, "starting"
        self._last: Collective | None = None
        self._inside = False
        self._counts: dict[str, int] = {}
        self._lasts: dict[str, Collective] = {}

    def entered(self, collective: Collective) -> None:
        self._last, self._inside = collective, True
        if collective.op != WAIT:
            self._counts[collective.axis] = self._counts.get(collective.axis, 0) + 1
            self._lasts[collective.axis] = collective
        self._progress = time.time()

    def left(self) -> None:
        self._inside = False
        self._progress = time.time()

    def entered_phase(self, phase: str) -> None:
        self._phase = phase
        self._progress = time.time()

    def after_step(self, state: TrainState, batch: Batch, step: TrainingStep) -> None:
        self._step, self._phase = state.step, "training"
        self._progress = time.time()

    @contextmanager
    def watching(self, context: ParallelContext) -> Iterator[None]:
        """Watch a context's collectives, and the clock, inside the `with` block."""
        thread = threading.Thread(target=self._run, name="megascale-watchdog", daemon=True)
        with context.watching(self):
            self._write()
            thread.start()
            try:
                yield
            finally:
                self._finished.set()
                thread.join()

    def _run(self) -> None:
        pause = self._timeout / _LOOKS_PER_TIMEOUT
        written, told_of = time.time(), 0.0
        while not self._finished.wait(pause):
            stalled = time.time() - self._progress
            if stalled > self._timeout and told_of != self._progress:
                told_of = self._progress
                self._write()
                self._report(pause)
                written = time.time()
            elif time.time() - written > min(_LONGEST_SILENCE, self._timeout / 2):
                self._write()
                written = time.time()

    def _write(self) -> None:
        if self._directory is not None:
            try:
                write_heartbeat(heartbeat_file(self._directory, self._rank), self._heartbeat())
            except OSError as error:  # a full disk must not end the watchdog
                self._tell(f"rank {self._rank}: the heartbeat cannot be written: {error}")

    def _report(self, pause: float) -> None:
        stalled = time.time() - self._progress
        if self._directory is None:
            mine: list[Heartbeat | None] = [self._heartbeat()]
            alone = hang_report(mine, ParallelLayout(), stalled, time.time()).split("\n")[1:]
            self._tell(f"no progress for {stalled:.0f} s\n" + "\n".join(alone))
            return
        claimed = self._claim()
        if claimed is None:
            return
        self._finished.wait(2 * pause)  # for the heartbeats of ranks that stalled a little later
        ranks = range(self._layout.world_size)
        heartbeats = [read_heartbeat(heartbeat_file(self._directory, rank)) for rank in ranks]
        # Of a former start of the run: this rank has not come as far as writing one.
        heartbeats = [h if h is not None and h.time >= self._started - 60.0 else None for h in heartbeats]
        text = hang_report(heartbeats, self._layout, stalled, time.time())
        claimed.write_text(text + "\n", encoding="utf-8")
        self._tell(f"{text}\n  (also in {claimed})")

    def _claim(self) -> Path | None:
        """Return a new file for a report, None when another rank has just begun one."""
        assert self._directory is not None
        folder = self._directory / HEARTBEATS_DIRECTORY
        for number in range(100):
            path = folder / f"hang_{number:02d}.txt"
            try:
                path.open("x").close()
                return path
            except FileExistsError:
                if path.stat().st_mtime >= self._progress:
                    return None
            except OSError:
                return None
        return None

    def _heartbeat(self) -> Heartbeat:
        frame = sys._current_frames().get(self._main_thread)
        stack = traceback.extract_stack(frame) if frame is not None else []
        return Heartbeat(
            rank=self._rank,
            host=socket.gethostname(),
            process=os.getpid(),
            time=time.time(),
            progress=self._progress,
            step=self._step,
            phase=self._phase,
            last=_in_words(self._last) if self._last else "",
            inside=self._inside,
            counts=dict(self._counts),
            lasts={axis: _in_words(collective) for axis, collective in list(self._lasts.items())},
            stack=[f"{entry.filename}:{entry.lineno} {entry.name}" for entry in stack[-8:]],
        )


def _in_words(collective: Collective) -> str:
    shape = "x".join(map(str, collective.shape)) or "1"
    return f"{collective.op} over {collective.axis} ({shape} {str(collective.dtype).removeprefix('torch.')})"
