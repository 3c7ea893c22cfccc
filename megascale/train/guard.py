"""What to do with a bad step: gradients or a loss that are nan or inf, or a loss far above those before it.

Before an update is applied, `UpdateGuard` looks at it. A bad one is not applied, on any rank; the micro-batches are run
again to find out where the trouble starts (`train.diagnosis`), a record is written to `incidents.jsonl`, and then

    stop     the run ends; earlier checkpoints stay as they are
    skip     the weights stay as they are and the run goes on, at most --max-skipped-steps times
    rewind   the run goes back to its newest checkpoint and on with the samples that follow the bad batch, as in
             Chowdhery et al. 2022 (PaLM, section 5.1), at most --max-rewinds times

A loss is a spike when it exceeds the mean of the last --loss-spike-window losses by more than --loss-spike-threshold of
their standard deviations. An overflow under a dynamic loss scale is the scaler's business and no incident.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from megascale.config.schema import FaultConfig, RunConfig
from megascale.data.loader import Batch
from megascale.optim.build import ModelOptimizer, NonFiniteGradients, StepResult
from megascale.optim.schedule import learning_rate
from megascale.parallel.context import ParallelContext
from megascale.train.diagnosis import MicroBatchRuns, diagnose
from megascale.train.failures import RunStopped
from megascale.train.metrics import RunMetrics
from megascale.train.state import Health, TrainState


class Rewind(Exception):
    """Go back to the newest checkpoint, and on with sample number `next_sample`."""

    def __init__(self, next_sample: int) -> None:
        super().__init__(f"the run goes back to its newest checkpoint, then on with sample {next_sample}")
        self.next_sample = next_sample


class UpdateGuard:
    """Applies the updates that are sound; the same decision on every rank.

    Args:
        config: A resolved configuration.
        context, model, optimizer, runner: The rank's own.
        metrics: Where incidents are told.
        health: What is remembered of the run so far; the attribute of that name is kept up to date.
    """

    def __init__(
        self,
        config: RunConfig,
        context: ParallelContext,
        model: nn.Module,
        optimizer: ModelOptimizer,
        runner: MicroBatchRuns,
        metrics: RunMetrics,
        health: Health,
    ) -> None:
        self._config, self._faults = config, config.faults
        self._context, self._model, self._optimizer = context, model, optimizer
        self._runner, self._metrics = runner, metrics
        self._looks_for_spikes = config.faults.on_loss_spike != "ignore"
        self.health = health

    def update(self, state: TrainState, batch: Batch, loss: float, normaliser: float) -> StepResult:
        """Update the weights, or do what the policy says.

        Args:
            state: Before the step.
            loss: Mean loss of the global batch, the same on every rank.
            normaliser: For `ModelOptimizer.step`.

        Raises:
            RunStopped: A policy ends the run, or has reached its limit.
            Rewind: A policy takes the run back.
        """
        if self._looks_for_spikes and is_spike(loss, self.health.recent_losses, self._faults):
            return self._refuse("loss spike", self._faults.on_loss_spike, state, batch, loss)
        if not math.isfinite(loss) and not self._optimizer.scaler.dynamic:
            return self._refuse("loss not finite", self._faults.on_nonfinite, state, batch, loss)
        try:
            result = self._optimizer.step(normaliser)
        except NonFiniteGradients:
            return self._refuse("gradients not finite", self._faults.on_nonfinite, state, batch, loss)
        if self._looks_for_spikes and not result.skipped:
            recent = (*self.health.recent_losses, loss)[-self._faults.loss_spike_window :]
            self.health = replace(self.health, recent_losses=recent)
        return result

    def rewound(self, restored: Health) -> None:
        """Take over what a checkpoint remembers; what was counted since then still counts."""
        self.health = replace(self.health, recent_losses=restored.recent_losses)

    def _refuse(self, kind: str, policy: str, state: TrainState, batch: Batch, loss: float) -> StepResult:
        samples = [batch.first_sample, batch.first_sample + self._config.train.global_batch_size - 1]
        nominal = float(self._config.train.global_batch_size * self._config.data.seq_length)
        findings = diagnose(
            self._context, self._model, self._optimizer, self._runner, batch, state.step, nominal, kind == "loss spike"
        )
        action, limit = self._action(policy)
        record: dict[str, Any] = {
            "step": state.step + 1,
            "kind": kind,
            "loss": loss,
            "samples": samples,
            "action": action,
            "reproduced": bool(findings),
            "findings": findings,
        }
        text = describe_incident(record)
        self._metrics.incident(record, text)
        if action == "skip":
            self.health = replace(self.health, num_skipped=self.health.num_skipped + 1)
            lr = learning_rate(self._config.schedule, self._optimizer.num_updates + 1)
            return StepResult(math.nan, lr, skipped=True)
        if action == "rewind":
            self.health = replace(self.health, num_rewinds=self.health.num_rewinds + 1)
            raise Rewind(samples[1] + 1)
        raise RunStopped(text + (f"\n{limit}" if limit else ""))

    def _action(self, policy: str) -> tuple[str, str]:
        """Return what is done under a policy: the policy itself or, once its limit is reached, to stop and why."""
        done, most, flag = {
            "skip": (self.health.num_skipped, self._faults.max_skipped_steps, "--max-skipped-steps"),
            "rewind": (self.health.num_rewinds, self._faults.max_rewinds, "--max-rewinds"),
        }.get(policy, (0, 1, ""))
        if done < most:
            return policy, ""
        return "stop", f"the run has done so {done} times already and {flag} is {most}"


def is_spike(loss: float, recent: Sequence[float], faults: FaultConfig) -> bool:
    """Return whether a finite loss stands out from the recent ones; False while fewer than half a window are known."""
    if not math.isfinite(loss) or 2 * len(recent) < faults.loss_spike_window:
        return False
    return loss > float(np.mean(recent) + faults.loss_spike_threshold * np.std(recent))


def describe_incident(record: dict[str, Any]) -> str:
    """Return an incident as a few lines for people."""
    first, last = record["samples"]
    lines = [
        f"step {record['step']}: {record['kind']} (loss {record['loss']:.6g}) on samples {first} to {last}; "
        f"action: {record['action']}"
    ]
    if not record["reproduced"]:
        lines.append(
            "  no micro-batch shows it when it is run again by itself: their sum overflowed, or a fault of the "
            "hardware has passed"
        )
    for finding in record["findings"]:
        where = (
            f"rank {finding['rank']} on {finding['host']}, micro-batch {', '.join(map(str, finding['micro_batches']))}"
        )
        text = f"  {where} (samples {finding['samples'][0]} to {finding['samples'][1]}): loss {finding['loss']:.6g}"
        for key, title in (
            ("nonfinite_weights", "weights"),
            ("first_nonfinite_output", "first output not finite"),
            ("nonfinite_gradients", "gradients"),
        ):
            if finding[key]:
                names = finding[key] if isinstance(finding[key], list) else [finding[key]]
                text += f"; {title}: {', '.join(names)}"
        lines.append(text)
    return "\n".join(lines)
