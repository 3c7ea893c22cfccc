"""What looks at a run, as its configuration asks: one line per observer, nothing for those that are off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import nn

from megascale.config.schema import RunConfig
from megascale.optim.build import ModelOptimizer
from megascale.parallel.context import ParallelContext
from megascale.train.digests import DigestLog
from megascale.train.drift import DriftCheck
from megascale.train.hang import HangDetector
from megascale.train.metrics import RunMetrics
from megascale.train.observers import Observer
from megascale.train.stragglers import RankTimes, WaitingTime


@contextmanager
def observing(
    config: RunConfig,
    run_directory: Path | None,
    context: ParallelContext,
    model: nn.Module,
    optimizer: ModelOptimizer,
    metrics: RunMetrics,
    first_step: int,
) -> Iterator[list[Observer]]:
    """Yield the observers of a run that starts after `first_step`; those with threads or hooks end with the block."""
    faults, logging = config.faults, config.logging
    observers: list[Observer] = []
    with ExitStack() as stack:
        minutes = faults.hang_timeout_minutes
        minutes = config.parallel.distributed_timeout_minutes / 2 if minutes is None else minutes
        if minutes > 0 and context.world.size > 1:
            detector = HangDetector(60.0 * minutes, run_directory, context.layout, context.rank)
            stack.enter_context(detector.watching(context))
            observers.append(detector)
        if logging.log_rank_times_interval is not None:
            waiting = WaitingTime(context.device)
            stack.enter_context(context.watching(waiting))
            observers.append(RankTimes(logging.log_rank_times_interval, run_directory, context, metrics, waiting))
        if logging.log_digests:
            assert run_directory is not None, "a constraint of the configuration"
            observers.append(DigestLog(run_directory, config, context, model, optimizer, first_step))
        if faults.check_weight_hash_interval is not None:
            observers.append(DriftCheck(faults.check_weight_hash_interval, context, model, optimizer, metrics))
        yield observers
