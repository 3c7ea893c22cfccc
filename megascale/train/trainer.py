"""The training loop.

One step: each rank runs its micro-batches forward and backward, the data-parallel ranks sum their gradients once, and
every rank updates its own slice. The loss is the sum over all scored tokens of the global batch divided by their count,
so accumulation, ragged masks and every layout give the same update:

    backward of   sum_loss * loss_scale / nominal        nominal = global batch x sequence length, known beforehand
    then          gradients * nominal / counted          counted = tokens that were scored, known when all ranks are
    done
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import exp

from torch import nn

from megascale.config.schema import RunConfig
from megascale.data.loader import Batch, BatchLoader
from megascale.optim.build import ModelOptimizer
from megascale.parallel.context import ParallelContext
from megascale.parallel.random import RandomStreams
from megascale.train.clock import StepClock
from megascale.train.faults import StopSignals
from megascale.train.guard import Rewind, UpdateGuard
from megascale.train.metrics import RunMetrics
from megascale.train.observers import Observer, Observers, TrainingStep
from megascale.train.pipeline import build_runner
from megascale.train.state import TrainState
from megascale.train.validate import ValidationResult, validate


@dataclass(frozen=True)
class TrainResult:
    """How `fit` ended: the progress made, the last validation, why it stopped before the end, and if by a signal."""

    state: TrainState
    validation: ValidationResult | None
    stopped_by: str | None
    by_signal: bool


class Trainer:
    """Trains a model from where its state stands to `train_iters`.

    Args:
        config: A resolved configuration.
        context: Where this rank stands.
        model, optimizer, streams: The rank's own.
        train_loader: Gives this rank's part of the global batch at any sample number.
        valid_loader: The same over the validation samples; None: no validation.
        state: Progress so far.
        metrics: Where records go.
        save: Called with the state when a checkpoint is due.
        finish_saving: Called at the end; returns once all checkpoints are complete.
        restore: Loads the newest checkpoint and returns its progress, for the policy rewind.
        observers: Told how the run goes.
    """

    def __init__(
        self,
        config: RunConfig,
        context: ParallelContext,
        model: nn.Module,
        optimizer: ModelOptimizer,
        streams: RandomStreams,
        train_loader: BatchLoader,
        valid_loader: BatchLoader | None,
        state: TrainState,
        metrics: RunMetrics,
        save: Callable[[TrainState], object],
        finish_saving: Callable[[], object] = lambda: None,
        restore: Callable[[], TrainState] | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.config, self.context = config, context
        self.model, self.optimizer = model, optimizer
        self.runner = build_runner(model, streams, context)
        self.train_loader, self.valid_loader = train_loader, valid_loader
        self.state, self.metrics, self.restore = state, metrics, restore
        self.save, self.finish_saving = save, finish_saving
        self.guard = UpdateGuard(config, context, model, optimizer, self.runner, metrics, state.health)
        self.observers = Observers(observers)
        self._signals = StopSignals()
        self._clock = StepClock()

    def fit(self) -> TrainResult:
        """Train to the end, or until told to stop; save, validate and log as the configuration says."""
        with self._signals:
            while True:
                try:
                    result = self._fit()
                except Rewind as rewind:
                    self._rewind(rewind)
                else:
                    with self._in_phase("saving"):
                        self.finish_saving()
                    return result

    def _fit(self) -> TrainResult:
        train, save_interval = self.config.train, self.config.checkpoint.save_interval
        self.model.train()
        validation, told_to_stop = None, False
        if self._validation_is_due():  # a signal cut it short before this start
            validation = self._validate()
            told_to_stop = validation is None or (self._is_done and self._save())
        steps_left = 0 if told_to_stop else train.train_iters - self.state.step
        with closing(self.train_loader.iterate(self.state.samples, steps_left)) as batches:
            self._clock.start()
            for batch in batches:
                step = self._train_step(batch)
                self._clock.count()
                self.metrics.advance()
                if self._is_done or self._due(self.config.logging.log_interval):
                    self._log(step)
                self.observers.after_step(self.state, batch, step)
                told_to_stop = step.stop
                if self._validation_is_due() and not told_to_stop:
                    validation = self._validate()
                    told_to_stop = validation is None
                is_exit = self._due(train.exit_interval)
                is_best = self.config.checkpoint.save_best and self.state.is_best
                if self._is_done or told_to_stop or is_exit or is_best or self._due(save_interval):
                    told_to_stop |= self._save()
                if told_to_stop or is_exit:
                    break
        if self._is_done and not self._validation_is_due():
            return TrainResult(self.state, validation, None, by_signal=False)
        return TrainResult(
            self.state, validation, self._signals.reason if told_to_stop else "--exit-interval", by_signal=told_to_stop
        )

    @property
    def _is_done(self) -> bool:
        return self.state.step >= self.config.train.train_iters

    @property
    def samples_per_step(self) -> int:
        return self.train_loader.global_batch_size

    @property
    def _seq_length(self) -> int:
        return self.config.data.seq_length

    def _train_step(self, batch: Batch) -> TrainingStep:
        self.optimizer.zero_gradients()
        nominal = float(self.samples_per_step * self._seq_length)
        gradient_scale = self.optimizer.scaler.scale / nominal
        local_loss = self.runner.run(
            batch.micro_batches, self.state.step, gradient_scale, before_last=self.optimizer.expect_last_backward
        )
        local_tokens = sum(float(micro_batch.loss_weights.sum()) for micro_batch in batch.micro_batches)
        # Ranks of one replica computed the same loss, or another stage did: one of them counts it.
        counts = self.context.counts_loss
        sum_loss, counted, stop = self.context.world.sum_floats(
            [local_loss if counts else 0.0, local_tokens if counts else 0.0, self._signals.raised]
        )
        # A batch without a scored token has zero gradients and loss 0.
        loss = sum_loss / max(counted, 1.0)
        update = self.guard.update(self.state, batch, loss, nominal / max(counted, 1.0))
        self.state = self.state.after(self.samples_per_step, int(nominal), self.guard.health)
        return TrainingStep(loss, update, stop > 0)

    def _validation_is_due(self) -> bool:
        wanted = self._is_done or self._due(self.config.train.eval_interval)
        return self.valid_loader is not None and wanted and self.state.validated < self.state.step

    def _validate(self) -> ValidationResult | None:
        """Validate and take note of it; None when the ranks agreed to stop before the end."""
        loader = self.valid_loader
        assert loader is not None
        with self._in_phase("validation"):
            started = time.perf_counter()
            batches = loader.validation_batches(self.config.train.eval_iters * loader.global_batch_size)
            stop = partial(self._signals.agreed, self.context.world)
            result = validate(self.model, self.runner, batches, self.context, stop)
            if result is None:
                return None
            self.metrics.validation(
                {
                    **self.state.counters(),
                    "loss": result.loss,
                    "perplexity": exp(min(result.loss, 700.0)),
                    "num_scored_tokens": result.num_scored_tokens,
                    "seconds": time.perf_counter() - started,
                }
            )
        self.state = self.state.after_validation(result.loss)
        return result

    def _save(self) -> bool:
        """Save a checkpoint; return whether a rank was told to stop by then."""
        with self._in_phase("saving"):
            self.save(self.state)
        return self._signals.agreed(self.context.world)

    def _rewind(self, rewind: Rewind) -> None:
        """Go back to the newest checkpoint and on with the samples after the bad ones."""
        assert self.restore is not None, "a configuration with the policy rewind gives a way back"
        with self._in_phase("saving"):
            self.finish_saving()
            self.finish_saving()
            restored = self.restore()
        self.guard.rewound(restored.health)
        self.state = replace(
            restored,
            samples=rewind.next_sample,
            tokens=rewind.next_sample * self._seq_length,
            health=self.guard.health,
        )
        self.metrics.rewind(self.state.step)
        self.observers.rewound(self.state)

    @contextmanager
    def _in_phase(self, phase: str) -> Iterator[None]:
        """Tell the observers what the rank does inside the `with` block, and leave it out of the time per step."""
        self.observers.entered_phase(phase)
        with self._clock.paused():
            yield
        self.observers.entered_phase("training")

    def _log(self, step: TrainingStep) -> None:
        seconds = self._clock.seconds_per_step()
        self.metrics.train(
            {
                **self.state.counters(),
                "loss": step.loss,
                "lr": step.update.lr,
                "grad_norm": step.update.grad_norm,
                "loss_scale": self.optimizer.scaler.scale,
                "skipped": step.update.skipped,
                "seconds": seconds,
                "tokens_per_second": self.samples_per_step * self._seq_length / seconds,
            }
        )

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self.state.step % interval == 0
