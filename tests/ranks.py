"""A persistent pool of processes that run functions as the ranks of a layout, over real gloo collectives.

Importing torch takes seconds, so the processes are started once and kept; each call opens fresh process groups. A rank
that raises fails the call with its traceback, and the pool is started anew, since its peers may hang in a collective.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megascale.config.layout import ParallelLayout

# A collective that waits this long has lost its peers.
_COLLECTIVE_TIMEOUT_MINUTES = 1.0
_CALL_TIMEOUT_SECONDS = 240.0


class RankFailure(AssertionError):
    """A function raised on some rank; the message is that rank's traceback."""


class RankPool:
    """Runs `function(context, *args)` on every rank of a layout and returns the results in rank order."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def __call__(self, layout: ParallelLayout, function: Callable[..., Any], *args: Any) -> list[Any]:
        self._grow(layout.world_size)
        with tempfile.TemporaryDirectory() as directory:
            rendezvous = f"file://{Path(directory) / 'rendezvous'}"
            for rank in range(layout.world_size):
                self._workers[rank][1].send((function, layout, rank, rendezvous, args))
            return self._collect(layout.world_size)

    def _collect(self, world_size: int) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + _CALL_TIMEOUT_SECONDS
        while len(results) + len(failures) < world_size and time.monotonic() < deadline:
            for rank in range(world_size):
                if rank in results or rank in failures:
                    continue
                process, connection = self._workers[rank]
                if connection.poll(0.002):
                    succeeded, value = connection.recv()
                    (results if succeeded else failures)[rank] = value
                    if not succeeded:
                        # Its peers get a moment to fail with a message of their own.
                        deadline = min(deadline, time.monotonic() + 2.0)
                elif not process.is_alive():
                    failures[rank] = f"the process of rank {rank} died with exit code {process.exitcode}"
        if len(results) == world_size:
            return [results[rank] for rank in range(world_size)]
        self.close()
        silent = [rank for rank in range(world_size) if rank not in results and rank not in failures]
        told = "\n".join(f"rank {rank} raised:\n{text}" for rank, text in sorted(failures.items()))
        raise RankFailure(f"{told}\n(ranks that gave no answer: {silent})")

    def _grow(self, num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < num_workers:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.terminate()
        for process, _ in self._workers:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
        self._workers = []


def _serve(connection: Connection) -> None:
    """Run calls until the parent goes away."""
    import torch

    from megascale.parallel.context import launch

    torch.set_num_threads(1)
    while True:
        try:
            function, layout, rank, rendezvous, args = connection.recv()
        except (EOFError, OSError):
            return
        try:
            device = torch.device("cpu")
            with launch(layout, rank, device, "gloo", _COLLECTIVE_TIMEOUT_MINUTES, init_method=rendezvous) as context:
                result = function(context, *args)
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
