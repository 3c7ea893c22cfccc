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
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from math import exp

from torch import nn

from megascale.config.schema import RunConfig
from megascale.data.loader import Batch, BatchLoader
from megascale.optim.build import ModelOptimizer, StepResult
from megascale.parallel.context import ParallelContext
from megascale.parallel.random import RandomStreams
from megascale.train.clock import StepClock
from megascale.train.faults import StopSignals
from megascale.train.metrics import RunMetrics
from megascale.train.pipeline import build_runner
from megascale.train.state import TrainState
from megascale.train.validate import ValidationResult, validate


@dataclass(frozen=True)
class TrainingStep:
    """What one step told: its mean loss in nats per scored token, the update, and whether a rank was told to stop."""

    loss: float
    update: StepResult
    stop: bool


@dataclass(frozen=True)
class TrainResult:
    """How `fit` ended: the progress made, the last validation, and why it stopped before the end, if it did."""

    state: TrainState
    validation: ValidationResult | None
    stopped_by: str | None


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
    ) -> None:
        self.config, self.context = config, context
        self.model, self.optimizer = model, optimizer
        self.runner = build_runner(model, streams, context)
        self.train_loader, self.valid_loader = train_loader, valid_loader
        self.state, self.metrics, self.save = state, metrics, save
        self._signals = StopSignals()
        self._clock = StepClock()

    def fit(self) -> TrainResult:
        """Train to the end, or until told to stop; save, validate and log as the configuration says."""
        train = self.config.train
        validation, stopped_by = None, None
        self.model.train()
        batches = self.train_loader.iterate(self.state.samples, train.train_iters - self.state.step)
        with self._signals, closing(batches):
            self._clock.start()
            for batch in batches:
                step = self._train_step(batch)
                self.state = self.state.after(self.samples_per_step, self.samples_per_step * self._seq_length)
                self._clock.count()
                self.metrics.advance()
                last = self.state.step == train.train_iters
                if last or self._due(self.config.logging.log_interval):
                    self._log(step)
                if self.valid_loader is not None and (last or self._due(train.eval_interval)):
                    with self._clock.paused():
                        validation = self._validate(self.valid_loader)
                stopped_by = self._stop_reason(step) if not last else None
                if last or stopped_by or self._due(self.config.checkpoint.save_interval):
                    with self._clock.paused():
                        self.save(self.state)
                if stopped_by:
                    break
        return TrainResult(self.state, validation, stopped_by)

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
            [
                local_loss if counts else 0.0,
                local_tokens if counts else 0.0,
                float(self._signals.received is not None),
            ]
        )
        # A batch without a scored token has zero gradients and loss 0.
        update = self.optimizer.step(nominal / max(counted, 1.0))
        return TrainingStep(sum_loss / max(counted, 1.0), update, stop > 0)

    def _validate(self, loader: BatchLoader) -> ValidationResult:
        started = time.perf_counter()
        wanted = self.config.train.eval_iters * loader.global_batch_size
        result = validate(self.model, self.runner, loader.validation_batches(wanted), self.context)
        self.metrics.validation(
            {
                **self.state.as_dict(),
                "loss": result.loss,
                "perplexity": exp(min(result.loss, 700.0)),
                "num_scored_tokens": result.num_scored_tokens,
                "seconds": time.perf_counter() - started,
            }
        )
        return result

    def _log(self, step: TrainingStep) -> None:
        seconds = self._clock.seconds_per_step()
        self.metrics.train(
            {
                **self.state.as_dict(),
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

    def _stop_reason(self, step: TrainingStep) -> str | None:
        if step.stop:
            return self._signals.received or "a signal to another rank"
        return "--exit-interval" if self._due(self.config.train.exit_interval) else None
