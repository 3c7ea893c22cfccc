"""Copies that later steps do not change, in memory used again; one task at a time, whose failure is not lost."""

from __future__ import annotations

import itertools
import logging
import threading

import pytest
import torch

from megascale.checkpoint import background
from megascale.checkpoint.background import BackgroundTask, HostBuffer
from megascale.checkpoint.tensors import TensorSlice


def slices(value: float) -> list[TensorSlice]:
    """Types of every size, a scalar, an empty one, a view with holes, and two boxes of one tensor."""
    return [
        TensorSlice.whole("byte", torch.full((3,), int(value), dtype=torch.uint8)),
        TensorSlice.whole("double", torch.full((5, 2), value, dtype=torch.float64)),
        TensorSlice.whole("half", torch.full((7,), value, dtype=torch.bfloat16)),
        TensorSlice.whole("scalar", torch.tensor(value)),
        TensorSlice.whole("empty", torch.empty(0, 4)),
        TensorSlice.whole("strided", torch.full((6, 4), value)[::2, 1:3]),
        TensorSlice("boxes", (4, 2), (0, 0), torch.full((1, 2), value)),
        TensorSlice("boxes", (4, 2), (1, 0), torch.full((3, 2), value)),
    ]


def test_a_copy_is_what_was_there_and_stays_so() -> None:
    live = slices(3)
    copies = HostBuffer().copy(live)
    for item in live:
        item.data.zero_()
    for copy, original in zip(copies, slices(3), strict=True):
        assert (copy.name, copy.global_shape, copy.offset) == (original.name, original.global_shape, original.offset)
        assert copy.data.dtype == original.data.dtype
        assert torch.equal(copy.data, original.data), copy.name


def test_memory_is_used_again() -> None:
    buffer = HostBuffer()
    first = [item.data.data_ptr() for item in buffer.copy(slices(1))]
    again = buffer.copy(slices(2))
    assert [item.data.data_ptr() for item in again] == first
    assert all((item.data == 2).all() for item in again)
    larger = buffer.copy([TensorSlice.whole("large", torch.ones(1000))])
    assert larger[0].data.sum() == 1000


def test_tensors_are_aligned_and_do_not_meet() -> None:
    copies = [item.data for item in HostBuffer().copy(slices(1)) if item.data.numel()]
    ranges = sorted((c.data_ptr(), c.data_ptr() + c.numel() * c.element_size()) for c in copies)
    assert all(start % 8 == 0 for start, _ in ranges)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_from_a_gpu_are_done_when_copy_returns() -> None:
    big = torch.full((1 << 24,), 5.0, device="cuda")
    (copy,) = HostBuffer().copy([TensorSlice.whole("big", big)])
    big.zero_()
    assert copy.data.device.type == "cpu"
    assert (copy.data == 5).all()


def test_a_task_runs_beside_and_is_waited_for() -> None:
    task, go, done = BackgroundTask(), threading.Event(), []
    task.wait()  # nothing to wait for
    task.start("a save", lambda: done.append(go.wait(30)))
    assert task.is_running
    assert not done
    with pytest.raises(AssertionError, match="a save was not waited for"):
        task.start("another", lambda: None)
    go.set()
    task.wait()
    assert done == [True]


def test_a_failure_is_told_at_once_and_raised_once(caplog: pytest.LogCaptureFixture) -> None:
    task = BackgroundTask()

    def fail() -> None:
        raise OSError("no space left")

    with caplog.at_level(logging.ERROR):
        task.start("saving step 3", fail)
        while task.is_running:
            pass
    assert "saving step 3 failed: no space left" in caplog.text
    with pytest.raises(OSError, match="no space left"):
        task.wait()
    task.wait()


def test_a_long_wait_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(background, "_PATIENCE_SECONDS", 0.01)
    task, go = BackgroundTask(), threading.Event()
    task.start("saving step 3", lambda: go.wait(30))
    threading.Timer(0.1, go.set).start()
    with caplog.at_level(logging.WARNING):
        task.wait()
    assert "still waiting for saving step 3" in caplog.text
