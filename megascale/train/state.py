"""How far a run has come: beside the optimizer's state all that a resume needs, as data and dropout follow from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class TrainState:
    """Progress of a run, the same on every rank.

    Attributes:
        step: Iterations done, skipped ones included.
        samples: Samples consumed: the position in the sample stream, whatever the data-parallel size.
        tokens: Tokens consumed (samples times sequence length).
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0

    def after(self, num_samples: int, num_tokens: int) -> TrainState:
        """Return the state one step later."""
        return replace(self, step=self.step + 1, samples=self.samples + num_samples, tokens=self.tokens + num_tokens)

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
