"""Which checkpoint a run starts from. No torch; `agreed_start.py` makes all ranks agree on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megascale.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointEntry,
    find_latest,
    list_checkpoints,
    read_manifest,
)
from megascale.checkpoint.records import summary
from megascale.config.schema import RunConfig
from megascale.utils.errors import UserError

NEWEST_INTACT = "newest-intact"


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        path: The checkpoint to go on from; None: from initial weights.
        passed_over: Newer checkpoints that are not taken, and what is wrong with each, newest first.
    """

    path: Path | None
    passed_over: tuple[str, ...] = ()


def find_start(config: RunConfig, damaged: Mapping[Path, str] | None = None) -> Start:
    """Return the checkpoint that --load names under the --load-policy.

    --load may name the run directory of --save before it holds anything, so that one command both starts and resumes.
    Nothing is hashed here.

    Args:
        config: Need not be resolved.
        damaged: Checkpoints whose content proved not to be what was saved, and what is wrong with each.

    Raises:
        UserError: --load names nothing that can be loaded; or --save holds checkpoints that this run does not start
            from and would mix with its own.
    """
    load, save = config.checkpoint.load, config.checkpoint.save
    start = _choose(Path(load), config.checkpoint.load_policy, damaged or {}) if load else Start(None)
    is_own = bool(load and save and Path(load).resolve() == Path(save).resolve())
    if load and start.path is None and not is_own:
        raise UserError(
            f"--load {load} holds no checkpoint: give a run directory that does, or one checkpoint; "
            "with the same directory as --save, a run that has not begun starts from step 0"
        )
    if save:
        _require_own_checkpoints(save, load, start.path, damaged or {})
    return start


def names_one_checkpoint(load: Path) -> bool:
    """Whether --load names one checkpoint, not a directory of several."""
    return (load / MANIFEST_NAME).exists() or load.name.startswith(("step_", ".step_"))


def offer_older(checkpoint: Path) -> str:
    """Return what the user can load instead of a damaged checkpoint, as a sentence."""
    entries = list_checkpoints(checkpoint.parent)
    step = next((entry.step for entry in entries if entry.path.resolve() == checkpoint.resolve()), None)
    older = [entry for entry in entries if entry.problem is None and step is not None and entry.step < step]
    if not older:
        return "There is no older one beside it: restore it from a copy, or start anew in another directory."
    return (
        f"The one before it that is complete is {older[0].path}: add --load-policy {NEWEST_INTACT} to take the newest "
        "one whose content is proven, or restore the damaged one from a copy."
    )


def _choose(load: Path, policy: str, damaged: Mapping[Path, str]) -> Start:
    """The newest checkpoint of `load`, or the newest that is neither incomplete nor among `damaged`."""
    if names_one_checkpoint(load) or not load.is_dir():
        path = find_latest(load)  # refuses by name what is not complete
        if path is not None and path in damaged:
            raise UserError(f"{damaged[path]}. {offer_older(path)}")
        return Start(path)
    problems: list[str] = []
    for entry in list_checkpoints(load):
        problem = entry.problem or damaged.get(entry.path)
        if problem is None:
            return Start(entry.path, tuple(problems))
        if policy != NEWEST_INTACT:
            raise UserError(f"{_named(entry, problem)}. {offer_older(entry.path)}")
        problems.append(_named(entry, problem))
    if problems:
        raise UserError(
            f"no checkpoint in {load} can be loaded: {summary(problems)}. Restore one, or remove them to start anew."
        )
    return Start(None)


def _named(entry: CheckpointEntry, problem: str) -> str:
    return f"checkpoint of step {entry.step}: {problem}"


def _require_own_checkpoints(save: str, load: str | None, start: Path | None, damaged: Mapping[Path, str]) -> None:
    """Refuse to write into a directory whose checkpoints are of another line of training than the one begun here."""
    existing = list_checkpoints(save)
    if not existing:
        return
    directory = existing[0].path.parent.resolve()
    if start is None or start.parent.resolve() != directory:
        raise UserError(
            f"--save {save} already holds checkpoints up to step {existing[0].step}: "
            f"add --load {save} to go on from there, or give another directory"
        )
    intact = [entry for entry in existing if entry.problem is None and entry.path not in damaged]
    later = [entry for entry in intact if entry.path.resolve() != start.resolve()]
    if later and later[0].step > read_manifest(start).step:
        raise UserError(
            f"--load {load} is older than checkpoint {later[0].path} in --save {save}: "
            "give another --save directory to branch off, or --load the run directory to go on from the newest"
        )
