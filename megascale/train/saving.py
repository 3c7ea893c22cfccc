"""How a run saves its checkpoints: at once or in the background, and removing those that are not kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from megascale.checkpoint.background import BackgroundTask, HostBuffer
from megascale.checkpoint.records import plain_json
from megascale.checkpoint.retention import Retention, remove_surplus
from megascale.checkpoint.save import save_checkpoint
from megascale.checkpoint.tensors import TensorSlice
from megascale.config.schema import RunConfig
from megascale.config.serialization import to_dict
from megascale.optim.build import ModelOptimizer
from megascale.parallel.context import Axis, ParallelContext, open_host_axis
from megascale.train.snapshot import saved_slices, saved_state
from megascale.train.state import TrainState

_logger = logging.getLogger(__name__)


class Saving:
    """Saves nothing, for a run without a directory; what all kinds of saving look like.

    Use as `with build_saving(..) as saving:`. Every rank does the same at the same time.
    """

    def __call__(self, state: TrainState) -> None:
        """Save a checkpoint of the run as it stands."""

    def finish(self) -> None:
        """Return once every checkpoint is complete on disk."""

    def __enter__(self) -> Saving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
            return
        try:
            self.finish()
        except Exception as failure:  # told, but what ended the run first is what the user must see
            _logger.error("the last checkpoint was not saved either: %s", failure)


class DirectSaving(Saving):
    """Saves a checkpoint before it returns.

    Raises:
        SaveError: on every rank, when any could not do its part.
    """

    def __init__(
        self, run_directory: Path, optimizer: ModelOptimizer, config: RunConfig, context: ParallelContext
    ) -> None:
        checkpoint = config.checkpoint
        self._directory = run_directory / "checkpoints"
        self._optimizer, self._context = optimizer, context
        self._config = to_dict(config)
        self._retention = Retention(checkpoint.keep_last, checkpoint.keep_every, checkpoint.save_best)

    def __call__(self, state: TrainState) -> None:
        content = saved_slices(self._optimizer), saved_state(state, self._optimizer)
        self._save(state.step, *content, self._context.world)

    def _save(self, step: int, slices: Sequence[TensorSlice], state: Mapping[str, Any], world: Axis) -> None:
        save_checkpoint(self._directory, step, slices, state, self._config, world.rank, world.size, world.barrier)
        if world.rank == 0:
            removed = remove_surplus(self._directory, self._retention, step)
            _logger.debug("removed the checkpoints of steps %s", removed)


class BackgroundSaving(DirectSaving):
    """Copies what a checkpoint holds to host memory and writes it while training goes on; one save at a time.

    The threads of the ranks agree through a process group of their own. A save that failed is told at once in the log,
    and raised on every rank by the next save or by `finish`.

    Raises:
        SaveError: on every rank, when the save before this one failed.
    """

    def __init__(
        self, run_directory: Path, optimizer: ModelOptimizer, config: RunConfig, context: ParallelContext
    ) -> None:
        super().__init__(run_directory, optimizer, config, context)
        self._world = open_host_axis(context, "saving", config.parallel.distributed_timeout_minutes)
        self._buffer = HostBuffer()
        self._task = BackgroundTask()

    def __call__(self, state: TrainState) -> None:
        # The save before this one still reads the buffer.
        self._task.wait()
        slices = self._buffer.copy(saved_slices(self._optimizer))
        numbers = plain_json(saved_state(state, self._optimizer), "state")
        self._task.start(
            f"saving the checkpoint of step {state.step}", partial(self._save, state.step, slices, numbers, self._world)
        )

    def finish(self) -> None:
        self._task.wait()


def build_saving(
    run_directory: Path | None, optimizer: ModelOptimizer, config: RunConfig, context: ParallelContext
) -> Saving:
    """Return how the run saves: not at all, at once, or in the background (--async-save)."""
    if run_directory is None:
        return Saving()
    kind = BackgroundSaving if config.checkpoint.async_save else DirectSaving
    return kind(run_directory, optimizer, config, context)
