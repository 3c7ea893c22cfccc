"""The seam for everything that looks at a run and does not change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megascale.data.loader import Batch
from megascale.optim.build import StepResult
from megascale.train.state import TrainState


@dataclass(frozen=True)
class TrainingStep:
    """What one step told: its mean loss in nats per scored token, the update, and whether a rank was told to stop."""

    loss: float
    update: StepResult
    stop: bool


class Observer:
    """Told by the trainer, on every rank, how the run goes; does nothing by itself. Subclasses override what they need.

    An observer that raises ends the run before the next checkpoint is written.
    """

    def entered_phase(self, phase: str) -> None:
        """The rank goes over to "training", "validation" or "saving"."""

    def after_step(self, state: TrainState, batch: Batch, step: TrainingStep) -> None:
        """A step is done; `state` is the one after it, `batch` this rank's part of what it read."""

    def rewound(self, state: TrainState) -> None:
        """The run went back to `state`: later steps will be done again."""


class Observers(Observer):
    """Passes everything on to several observers, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def entered_phase(self, phase: str) -> None:
        for observer in self._observers:
            observer.entered_phase(phase)

    def after_step(self, state: TrainState, batch: Batch, step: TrainingStep) -> None:
        for observer in self._observers:
            observer.after_step(state, batch, step)

    def rewound(self, state: TrainState) -> None:
        for observer in self._observers:
            observer.rewound(state)
