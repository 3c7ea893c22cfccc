"""Time per step, without what is not a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Seconds per step since they were last asked for, pauses left out."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin anew, now."""
        self._since = time.perf_counter()
        self._num_steps = 0

    def count(self) -> None:
        """A step is done."""
        self._num_steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time inside the `with` block."""
        entered = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - entered

    def seconds_per_step(self) -> float:
        """Return the mean and begin anew."""
        seconds = (time.perf_counter() - self._since) / max(1, self._num_steps)
        self.start()
        return seconds
