"""Who is told of the collectives that a rank enters: what tests count, and what a hang is diagnosed from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

# The op under which waiting for a started collective is told to watchers.
WAIT = "wait"


@dataclass(frozen=True)
class Collective:
    """One collective that this rank entered: what, over which axis, and the bytes of the tensor it moved."""

    op: str
    axis: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


class CollectiveWatcher(Protocol):
    """Told of each collective as this rank enters it and once it has left it; must be quick."""

    def entered(self, collective: Collective) -> None:
        """The rank is about to enter a collective, or to wait for one that was started before."""

    def left(self) -> None:
        """The rank is out of it again. For CUDA tensors the host is; the device may not be."""


class CollectiveLog:
    """Tells watchers of the collectives that a rank enters, in order; shared by the axes of one context.

    With nobody watching, a collective costs two calls that do nothing.
    """

    def __init__(self) -> None:
        self._watchers: tuple[CollectiveWatcher, ...] = ()

    def add(self, op: str, axis: str, tensor: torch.Tensor) -> None:
        """Tell that the rank is about to enter a collective that moves `tensor`."""
        for watcher in self._watchers:
            watcher.entered(Collective(op, axis, tuple(tensor.shape), tensor.dtype))

    def left(self) -> None:
        """Tell that the rank has left the collective it entered last."""
        for watcher in self._watchers:
            watcher.left()

    @contextmanager
    def watching(self, watcher: CollectiveWatcher) -> Iterator[None]:
        """Tell `watcher` of every collective inside the `with` block."""
        self._watchers = (*self._watchers, watcher)
        try:
            yield
        finally:
            self._watchers = tuple(other for other in self._watchers if other is not watcher)

    @contextmanager
    def recording(self) -> Iterator[list[Collective]]:
        """Yield a list that fills with every collective entered inside the `with` block."""
        recorder = _Recorder([])
        with self.watching(recorder):
            yield recorder.records


@dataclass(frozen=True, eq=False)
class _Recorder:
    """Keeps the collectives themselves; waiting for one that was started is not another one."""

    records: list[Collective]

    def entered(self, collective: Collective) -> None:
        if collective.op != WAIT:
            self.records.append(collective)

    def left(self) -> None:
        pass
