"""Being told to stop: signals are noted when they come and acted on between steps, by all ranks together."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

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

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
