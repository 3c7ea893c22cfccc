"""Checkpoints on disk: their names, which are complete, which is newest, and the proof of their content. No torch.

    <run>/checkpoints/
        step_00000100/              published: complete, and never written to again
            manifest.json               what the checkpoint holds, with size and sha256 of every other file
            rank_00000.json             what one rank wrote
            rank_00000.safetensors      its tensors (absent for a rank that had none)
        .step_00000200.partial/     a save under way, or one that was killed: never loaded, removed by the next save
        .step_00000100.replaced/    the former checkpoint of a step while a new one of that step takes its name
        .step_00000050.removed/     one that is not kept, being deleted (see retention.py)

A directory gets its published name by one rename, after everything in it is on disk. Saving a step a second time takes
two renames: the old directory is set aside, the new one takes its name, the old one is removed. A process killed
between the two leaves no directory of the published name, and the one set aside counts as the checkpoint of its step.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megascale.checkpoint.records import (
    FORMAT_VERSION,
    FileRecord,
    Manifest,
    SliceRecord,
    TensorRecord,
    from_text,
    manifest_problems,
    summary,
)
from megascale.utils.errors import UserError
from megascale.utils.files import sha256_of

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "CheckpointEntry",
    "DamagedCheckpoint",
    "FileRecord",
    "Manifest",
    "SliceRecord",
    "TensorRecord",
    "find_latest",
    "list_checkpoints",
    "partial_path",
    "problem_with",
    "published_path",
    "read_manifest",
    "removed_path",
    "replaced_path",
    "verify",
    "verify_files",
]

MANIFEST_NAME = "manifest.json"

_PUBLISHED = re.compile(r"step_(\d{8,})")
_REPLACED = re.compile(r"\.step_(\d{8,})\.replaced")

_logger = logging.getLogger(__name__)


class DamagedCheckpoint(UserError):
    """Files of a checkpoint are missing or are not what was saved; another checkpoint may be intact."""


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint found in a directory; `problem` says why it cannot be loaded, None when it is complete."""

    step: int
    path: Path
    problem: str | None


def published_path(checkpoints_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands once it is complete."""
    return checkpoints_dir / f"step_{step:08d}"


def partial_path(checkpoints_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written."""
    return checkpoints_dir / f".step_{step:08d}.partial"


def replaced_path(checkpoints_dir: Path, step: int) -> Path:
    """Where the former checkpoint of `step` stands while a new one takes its name."""
    return checkpoints_dir / f".step_{step:08d}.replaced"


def removed_path(checkpoints_dir: Path, step: int) -> Path:
    """Where a checkpoint that is not kept stands while it is deleted."""
    return checkpoints_dir / f".step_{step:08d}.removed"


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of the checkpoint directory `path`, with format version, digest, structure and consistency checked.

    Whether the other files are there and intact is not looked at: see `problem_with` and `verify`.

    Raises:
        UserError: naming the file, when there is none, or it is damaged, of another version, or inconsistent.
    """
    file = Path(path) / MANIFEST_NAME
    try:
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is not a complete checkpoint: there is no {MANIFEST_NAME} in it") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    manifest = from_text(text, file, Manifest)
    problems = manifest_problems(manifest)
    if problems:
        raise UserError(f"{file} contradicts itself: {summary(problems)}")
    return manifest


def problem_with(path: str | Path) -> str | None:
    """None when the directory is a complete checkpoint (valid manifest, every file there with its size), else why not.

    Reads no tensors, so it costs little; a flipped byte in a tensor is found by `verify` and on loading.
    """
    directory = Path(path)
    try:
        manifest = read_manifest(directory)
    except UserError as error:
        return str(error)
    named_step = _named_step(directory)
    if named_step is not None and named_step != manifest.step:
        return f"{directory} is named after step {named_step}, but its {MANIFEST_NAME} is of step {manifest.step}"
    problems = _size_problems(directory, manifest, manifest.files)
    return f"{directory} is not complete: {summary(problems)}" if problems else None


def list_checkpoints(run_or_checkpoints_dir: str | Path) -> list[CheckpointEntry]:
    """All checkpoints of a run, newest first, each with what is wrong with it; saves that never finished are none."""
    return list(_entries(_checkpoints_dir(Path(run_or_checkpoints_dir))))


def find_latest(
    run_or_checkpoint_dir: str | Path, on_skipped: Callable[[CheckpointEntry], None] | None = None
) -> Path | None:
    """The newest complete checkpoint of a run directory or a `checkpoints` directory; None when it holds no checkpoint.

    A path that is itself a checkpoint is returned when it is complete. Newer checkpoints that are not complete are
    passed over, each with a call of `on_skipped` (by default a warning in the log). The answer can differ between ranks
    while somebody saves: let one rank ask and tell the others.

    Raises:
        UserError: when the path is one checkpoint that is not complete, or when there are checkpoints and none is
            complete (so that a damaged run is never taken for a new one), saying what is wrong with each.
    """
    path = Path(run_or_checkpoint_dir)
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file: give a run directory, its checkpoints directory, or one checkpoint in it")
    if _named_step(path) is not None or (path / MANIFEST_NAME).exists():
        problem = problem_with(path)
        if problem is not None:
            raise UserError(
                f"{problem}. Give another checkpoint, or the run directory to take the newest complete one."
            )
        return path
    skipped = []
    for entry in _entries(_checkpoints_dir(path)):
        if entry.problem is None:
            return entry.path
        skipped.append(entry)
        (on_skipped or _log_skipped)(entry)
    if skipped:
        raise UserError(
            f"no checkpoint in {path} can be loaded: {summary([str(entry.problem) for entry in skipped])}. "
            "Restore one, or remove them to start anew."
        )
    return None


def verify(path: str | Path) -> Manifest:
    """Prove a whole checkpoint: manifest, presence, size and sha256 of every file (reads all of it); its manifest.

    Raises:
        UserError: naming every file that is missing or is not what was saved.
    """
    manifest = read_manifest(path)
    verify_files(path, manifest, manifest.files)
    return manifest


def verify_files(path: str | Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Check size and sha256 of the files `names` of the checkpoint `path` against its manifest.

    Raises:
        DamagedCheckpoint: naming every file that is missing or is not what was saved.
    """
    directory = Path(path)
    checked = sorted(set(names))
    problems = _size_problems(directory, manifest, checked)
    if not problems:
        problems = [problem for name in checked if (problem := _hash_problem(directory / name, manifest.files[name]))]
    if problems:
        raise DamagedCheckpoint(f"checkpoint {directory} is damaged and was not loaded: {summary(problems)}")


def _hash_problem(file: Path, record: FileRecord) -> str | None:
    try:
        found = sha256_of(file)
    except OSError as error:
        return f"{file.name} cannot be read: {error}"
    if found != record.sha256:
        return (
            f"the content of {file.name} is not what was saved (sha256 {found}, {MANIFEST_NAME} says {record.sha256})"
        )
    return None


def _size_problems(directory: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    problems = []
    for name in names:
        expected = manifest.files[name].bytes
        try:
            found = (directory / name).stat().st_size
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error}")
        else:
            if found != expected:
                problems.append(f"{name} has {found} bytes, {MANIFEST_NAME} says {expected}")
    return problems


def _checkpoints_dir(path: Path) -> Path:
    inner = path / "checkpoints"
    return inner if inner.is_dir() else path


def _named_step(path: Path) -> int | None:
    """The step in the name of a checkpoint directory, published or set aside; None for any other name."""
    match = _PUBLISHED.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
    return int(match.group(1)) if match else None


def _entries(checkpoints_dir: Path) -> Iterator[CheckpointEntry]:
    """Checkpoints newest first, looked at one by one; of one step the published before the one set aside."""
    if not checkpoints_dir.is_dir():
        return
    found = [(step, path) for path in checkpoints_dir.iterdir() if (step := _named_step(path)) is not None]
    for step, path in sorted(found, key=lambda pair: (-pair[0], pair[1].name.startswith("."))):
        yield CheckpointEntry(step, path, problem_with(path))


def _log_skipped(entry: CheckpointEntry) -> None:
    _logger.warning("checkpoint of step %d passed over: %s", entry.step, entry.problem)
