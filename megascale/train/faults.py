"""Being told to stop: signals are noted when they come and acted on between steps, by all ranks together.

The ranks ask each other once per training step (one more number in a sum they take anyway), after each batch of a
validation and after each save, so none is left behind in a collective and none runs on for longer than a step.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

from megascale.parallel.context import Axis

# What schedulers send before they take the machine away: SIGTERM by default, SIGUSR1 where it was asked for.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Notes SIGTERM and SIGUSR1 while it is entered; `received` is the name of the first, or None."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def raised(self) -> float:
        """1 when this rank was told to stop, else 0: to be added up over the ranks."""
        return float(self.received is not None)

    @property
    def reason(self) -> str:
        """Who told the ranks to stop, once they have agreed to."""
        return self.received or "a signal to another rank"

    def agreed(self, world: Axis) -> bool:
        """Return whether any rank was told to stop; all ranks ask together."""
        return world.any(self.received is not None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
