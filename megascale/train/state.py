"""How far a run has come: beside the optimizer's state all that a resume needs, as data and dropout follow from it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Health:
    """What the policies on bad steps remember; see `train.guard`.

    Attributes:
        num_skipped: Updates that a policy left out, in the whole run.
        num_rewinds: Times that the run went back to a checkpoint.
        recent_losses: Of the last steps, oldest first; empty unless loss spikes are looked for.
    """

    num_skipped: int = 0
    num_rewinds: int = 0
    recent_losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class TrainState:
    """Progress of a run, the same on every rank.

    Attributes:
        step: Iterations done, skipped ones included.
        samples: Position in the sample stream, whatever the data-parallel size; a rewind moves it past bad samples.
        tokens: The same in tokens (samples times sequence length).
        validated: The step of the last complete validation, 0 before the first.
        validation_loss: What it measured, None before the first.
        best_loss: The lowest one of the run so far.
        best_step: The step at which that was.
        health: What the policies on bad steps remember.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    validated: int = 0
    validation_loss: float | None = None
    best_loss: float = math.inf
    best_step: int = 0
    health: Health = field(default_factory=Health)

    def after(self, num_samples: int, num_tokens: int, health: Health) -> TrainState:
        """Return the state one step later."""
        samples, tokens = self.samples + num_samples, self.tokens + num_tokens
        return replace(self, step=self.step + 1, samples=samples, tokens=tokens, health=health)

    def after_validation(self, loss: float) -> TrainState:
        """Return the state with the validation loss of its step; a loss of nan is never the best."""
        is_best = loss < self.best_loss
        return replace(
            self,
            validated=self.step,
            validation_loss=loss,
            best_loss=loss if is_best else self.best_loss,
            best_step=self.step if is_best else self.best_step,
        )

    @property
    def is_best(self) -> bool:
        """Whether no earlier step had as low a validation loss as this one."""
        return self.validated == self.step == self.best_step > 0

    def counters(self) -> dict[str, int]:
        """Return the progress as it stands in records."""
        return {"step": self.step, "samples": self.samples, "tokens": self.tokens}

    def as_dict(self) -> dict[str, Any]:
        """Return everything, as a checkpoint holds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> TrainState:
        """Return what `as_dict` gave, read back from JSON; an older checkpoint lacks some."""
        stored = {"validated": stored["step"], **stored}
        health = dict(stored.get("health", {}))
        health["recent_losses"] = tuple(health.get("recent_losses", ()))
        return cls(**{**stored, "health": Health(**health)})
