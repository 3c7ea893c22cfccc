"""Which checkpoints of a run are kept, and how the others go. No torch.

Removing takes two steps: the checkpoint is renamed to `.step_N.removed`, which nobody loads, then its files are
deleted. A process killed in between leaves the hidden directory, which the next save deletes.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.checkpoint.holding import take_away
from megascale.checkpoint.manifest import (
    CheckpointEntry,
    list_checkpoints,
    published_path,
    read_manifest,
    removed_path,
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept; a checkpoint that any of the rules keeps is kept.

    Attributes:
        keep_last: The newest this many; None: all of them.
        keep_every: Those whose step is a multiple of this.
        keep_best: The one with the lowest validation loss, of equal ones the oldest.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: bool = False

    def __post_init__(self) -> None:
        # With nothing kept by its age, the newest checkpoint could go.
        assert self.keep_last is None or self.keep_last >= 1, f"keep_last is {self.keep_last}"
        assert self.keep_every is None or self.keep_every >= 1, f"keep_every is {self.keep_every}"


def surplus(retention: Retention, losses: dict[int, float | None]) -> list[int]:
    """Return the steps that `retention` does not keep, oldest first; `losses` is by step the validation loss."""
    if retention.keep_last is None:
        return []
    steps = sorted(losses)
    kept = set(steps[-retention.keep_last :])
    if retention.keep_every is not None:
        kept |= {step for step in steps if step % retention.keep_every == 0}
    if retention.keep_best:
        # A nan compares with nothing, so it must not be among the candidates.
        known = [(loss, step) for step, loss in losses.items() if loss is not None and not math.isnan(loss)]
        kept |= {step for _, step in sorted(known)[:1]}
    return [step for step in steps if step not in kept]


def remove_surplus(checkpoints_dir: Path, retention: Retention, saved_step: int) -> list[int]:
    """Remove what `retention` does not keep; the steps removed. One process calls this, after it saved `saved_step`.

    The checkpoint of `saved_step` is the newest intact one: it was just written, hashed and synced. Without it nothing
    is removed. Checkpoints that are damaged, that somebody is loading, or that are of a later step (left from before a
    fallback to an older one) do not count as kept ones and stay. What cannot be removed gives a warning, no error.
    """
    if retention.keep_last is None:
        return []
    losses = validation_losses(list_checkpoints(checkpoints_dir), saved_step)
    if saved_step not in losses:
        _logger.warning("%s is not complete: no older one is removed", published_path(checkpoints_dir, saved_step))
        return []
    return [step for step in surplus(retention, losses) if _remove_checkpoint(checkpoints_dir, step)]


def validation_losses(entries: Iterable[CheckpointEntry], up_to_step: int) -> dict[int, float | None]:
    """Return the validation loss of each complete, published checkpoint up to a step; None where it tells none."""
    return {
        entry.step: validation_loss(read_manifest(entry.path).state)
        for entry in entries
        if entry.problem is None and entry.step <= up_to_step and not entry.path.name.startswith(".")
    }


def validation_loss(state: dict[str, Any]) -> float | None:
    """Return the validation loss in the state of a checkpoint, None when nothing was measured at its very step."""
    train = state.get("train", {})
    loss = train.get("validation_loss") if train.get("validated") == train.get("step") else None
    return None if loss is None else float(loss)


def remove_directory(directory: Path) -> None:
    """Remove a hidden directory. What cannot be removed costs space, not correctness, and gives a warning."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        _logger.warning("%s is not needed any more and could not be removed: %s", directory, error)


def _remove_checkpoint(checkpoints_dir: Path, step: int) -> bool:
    path, hidden = published_path(checkpoints_dir, step), removed_path(checkpoints_dir, step)
    try:
        remove_directory(hidden)
        if not take_away(path, hidden):
            _logger.info("%s is being loaded and stays for now", path)
            return False
    except OSError as error:
        _logger.warning("%s is not needed any more and could not be removed: %s", path, error)
        return False
    remove_directory(hidden)
    return True
