"""Saving while training goes on: a copy of the tensors in host memory, and one thread that writes it.

    save at step n      wait for the save before it | copy to host memory | start the thread
    steps n+1, n+2 ..   train                                             | write, agree, publish

Only the first row stops the training. The copy goes into a buffer that is used for every save, so a rank needs as much
host memory more as it saves. The thread must agree with those of the other ranks through a process group of its own:
collectives of two threads on one group would mix.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from megascale.checkpoint.tensors import TensorSlice

_logger = logging.getLogger(__name__)

# Every tensor starts at a multiple of this in the buffer: enough for any element type and a cache line.
_ALIGNMENT = 64

# Seconds after which waiting for a save is told, again and again.
_PATIENCE_SECONDS = 30.0


class HostBuffer:
    """Holds copies of a rank's slices in host memory, page-locked when they come from a GPU; grows to the largest set.

    A copy is valid until the next `copy`.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_locked = False

    def copy(self, slices: Sequence[TensorSlice]) -> list[TensorSlice]:
        """Return the slices with their data copied into the buffer; done when this returns, whatever the device."""
        starts, end = [], 0
        for item in slices:
            starts.append(end)
            size = item.data.numel() * item.data.element_size()
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        cuda = {item.data.device for item in slices if item.data.is_cuda}
        if end > self._bytes.numel():
            self._release()  # the former one goes first: there may be no room for both
            self._bytes = torch.empty(end, dtype=torch.uint8)
            self._is_locked = bool(cuda) and _lock_pages(self._bytes)
        copies = []
        with torch.no_grad():
            for item, start in zip(slices, starts, strict=True):
                size = item.data.numel() * item.data.element_size()
                target = self._bytes[start : start + size].view(item.data.dtype).view(item.data.shape)
                target.copy_(item.data, non_blocking=True)
                copies.append(TensorSlice(item.name, item.global_shape, item.offset, target))
        for device in cuda:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _release(self) -> None:
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_locked = False


def _lock_pages(buffer: torch.Tensor) -> bool:
    """Lock the buffer's pages in memory, for copies at the full speed of the bus; False where the system refuses.

    Not `pin_memory`, whose allocator rounds up to a power of two: up to twice the memory.
    """
    status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
    if int(status) != 0:
        _logger.warning("%d bytes of host memory could not be page-locked: saving will be slower", buffer.numel())
        return False
    return True


class BackgroundTask:
    """Runs one function at a time in a thread; what it raised is raised again by the next `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._what = ""
        self._failure: BaseException | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, what: str, act: Callable[[], object]) -> None:
        """Start `act`, called `what` in messages; the one before must have been waited for."""
        assert self._thread is None, f"{self._what} was not waited for"
        self._what, self._failure = what, None
        self._thread = threading.Thread(target=self._run, args=(act,), name=what)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is running; at once when nothing was started.

        Raises:
            BaseException: what the function raised, once.
        """
        if self._thread is None:
            return
        started = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_PATIENCE_SECONDS)
            if self._thread.is_alive():
                _logger.warning("still waiting for %s after %.0f s", self._what, time.monotonic() - started)
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BaseException as error:  # it must reach the thread that waits, whatever it is
            self._failure = error
            # Said now as well: the next save, where the run ends with it, may be hours away.
            _logger.error("%s failed: %s", self._what, error)
