"""Save a checkpoint from all ranks so that it is either complete under its name or not there.

Three phases with a barrier after each. Every rank passes all three barriers whatever goes wrong on it, so a full disk
on one host ends in `SaveError` on every rank, never in a hang:

    prepare   rank 0   removes what killed saves left behind; makes an empty `.step_N.partial`
    write     all      `rank_R.safetensors`, then `rank_R.json`, each durable before the next
    publish   rank 0   checks that the slices cover every tensor exactly, writes the manifest, renames the directory

A process killed at any point leaves the checkpoints published before as they were; what it leaves half-written in a
hidden directory, the next save removes.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megascale
from megascale.checkpoint.manifest import (
    MANIFEST_NAME,
    partial_path,
    problem_with,
    published_path,
    replaced_path,
)
from megascale.checkpoint.records import (
    FORMAT_VERSION,
    FileRecord,
    Manifest,
    RankPart,
    SliceRecord,
    TensorRecord,
    from_text,
    manifest_problems,
    plain_json,
    summary,
    to_text,
)
from megascale.checkpoint.retention import remove_directory
from megascale.checkpoint.tensor_file import write_tensor_file
from megascale.checkpoint.tensors import DeferredSlice, TensorSlice
from megascale.utils.files import atomic_writer, fsync_directory

__all__ = ["SaveError", "TensorSlice", "save_checkpoint", "write_checkpoint"]

# How long a rank looks for what rank 0 published before it calls the save failed: a network file system may show
# another host's rename some seconds late.
VISIBLE_WITHIN_SECONDS = 10.0


class SaveError(RuntimeError):
    """A checkpoint was not saved; earlier ones are untouched. Raised on every rank, with the reason where known."""


def save_checkpoint(
    checkpoints_dir: str | Path,
    step: int,
    slices: Iterable[TensorSlice],
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    rank: int,
    world_size: int,
    barrier: Callable[[], None],
) -> Path:
    """Save the checkpoint of `step` under `checkpoints_dir`, a directory that all ranks share; its path, on every rank.

    All ranks call this with their own `slices`, possibly none; together these must hold each element of each tensor
    exactly once. `state` and `config` are JSON objects; those of rank 0 are stored. `barrier` returns when all ranks
    have called it; it is called three times. Where this returns, the checkpoint is complete and durable. A checkpoint
    of the same step that is already there is replaced, and stays until the new one is complete.

    Raises:
        SaveError: on every rank, when any of them could not do its part; chained to the cause.
        ValueError: for a rank, world size or step that cannot be.
    """
    if step < 0 or not 0 <= rank < world_size:
        raise ValueError(f"step {step} must be >= 0 and rank {rank} in 0..{world_size - 1}")
    save = _Save(Path(checkpoints_dir), step, rank, world_size)
    failure: Exception | None = None
    for phase in (
        lambda: save.prepare(state, config),
        lambda: save.write(list(slices)),
        save.publish,
    ):
        if failure is None:
            try:
                phase()
            except Exception as error:  # whatever it is, the other ranks wait at the barrier
                failure = error
        barrier()
    if failure is None and rank != 0:
        failure = save.not_published()
    if failure is not None:
        raise SaveError(f"the checkpoint of step {step} was not saved in {save.root}: {failure}") from failure
    return save.published


def write_checkpoint(
    checkpoints_dir: str | Path,
    step: int,
    slices_by_file: Sequence[Sequence[DeferredSlice]],
    state: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Path:
    """Save the checkpoint of `step` from one process as that many ranks would, one file after the other; its path.

    Raises:
        SaveError: it could not be written; chained to the cause.
    """
    saves = [_Save(Path(checkpoints_dir), step, rank, len(slices_by_file)) for rank in range(len(slices_by_file))]
    try:
        saves[0].prepare(state, config)
        for save, slices in zip(saves, slices_by_file, strict=True):
            save.write(slices)
        saves[0].publish()
    except Exception as error:
        raise SaveError(f"the checkpoint of step {step} was not written to {checkpoints_dir}: {error}") from error
    return saves[0].published


@dataclass
class _Save:
    """One rank's side of one save."""

    root: Path
    step: int
    rank: int
    world_size: int
    state: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    part_text: bytes = b""

    @property
    def partial(self) -> Path:
        return partial_path(self.root, self.step)

    @property
    def published(self) -> Path:
        return published_path(self.root, self.step)

    def prepare(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Rank 0: refuse what JSON cannot hold before anything is written; leave an empty partial directory."""
        if self.rank != 0:
            return
        self.state = plain_json(dict(state), "state")
        self.config = plain_json(dict(config), "config")
        self.root.mkdir(parents=True, exist_ok=True)
        fsync_directory(self.root.parent)
        _clear_leftovers(self.root)
        self.partial.mkdir()

    def write(self, slices: Sequence[TensorSlice | DeferredSlice]) -> None:
        """Write this rank's tensors, if any, then its part record; both are durable on return."""
        # Normally there already; made here too so that each host's view of a shared disk need not be up to date.
        self.partial.mkdir(exist_ok=True)
        tensors: dict[str, TensorRecord] = {}
        by_key: dict[str, TensorSlice | DeferredSlice] = {}
        file_name = f"{_rank_stem(self.rank)}.safetensors"
        num_parts: Counter[str] = Counter()
        for item in slices:
            # A tensor that the rank holds in one piece keeps its plain name, readable by any safetensors tool.
            key = f"{item.name}#{num_parts[item.name]}" if num_parts[item.name] else item.name
            num_parts[item.name] += 1
            if key in by_key:
                raise ValueError(f"two slices of rank {self.rank} would both be stored as {key!r}: rename the tensor")
            by_key[key] = item
            own = TensorRecord(
                item.dtype_name, item.global_shape, (SliceRecord(file_name, key, item.offset, item.box.shape),)
            )
            tensors[item.name] = _joined(item.name, tensors.get(item.name), own)
        files: dict[str, FileRecord] = {}
        if by_key:
            content = {key: item.data for key, item in by_key.items()}
            files[file_name] = write_tensor_file(self.partial / file_name, content)
        part = RankPart(FORMAT_VERSION, self.step, self.rank, self.world_size, tensors, files)
        self.part_text = to_text(part).encode("utf-8")
        with atomic_writer(self.partial / f"{_rank_stem(self.rank)}.json", "wb") as file:
            file.write(self.part_text)

    def publish(self) -> None:
        """Rank 0: check the whole, write the manifest, give the directory its name."""
        if self.rank != 0:
            return
        manifest = self._assembled()
        with atomic_writer(self.partial / MANIFEST_NAME, "wb") as file:
            file.write(to_text(manifest).encode("utf-8"))
        # Everything in the directory is on disk now; from here on only names change.
        if self.published.exists():
            os.rename(self.published, replaced_path(self.root, self.step))
        try:
            os.rename(self.partial, self.published)
        except OSError:
            _put_back_or_remove_replaced(self.root, self.step)
            raise
        fsync_directory(self.root)
        _put_back_or_remove_replaced(self.root, self.step)

    def not_published(self) -> Exception | None:
        """Other ranks, after the last barrier: None when what this rank wrote now stands published."""
        name = f"{_rank_stem(self.rank)}.json"
        deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
        while True:
            # Both conditions: a former checkpoint of this step may hold the very same part. That is also why a failed
            # save leaves its partial directory to the next one.
            if _content(self.published / name) == self.part_text and not (self.partial / name).exists():
                return None
            if time.monotonic() >= deadline:
                return RuntimeError(f"rank 0 did not publish {self.published}; its own message says why")
            time.sleep(0.05)

    def _assembled(self) -> Manifest:
        """The manifest of what all ranks wrote, checked: sizes on disk, one shape and type per tensor, exact cover."""
        tensors: dict[str, TensorRecord] = {}
        files: dict[str, FileRecord] = {}
        missing = []
        for rank in range(self.world_size):
            path = self.partial / f"{_rank_stem(rank)}.json"
            text = _content(path)
            if text is None:
                missing.append(rank)
                continue
            part = from_text(text, path, RankPart)
            if (part.step, part.rank, part.world_size) != (self.step, rank, self.world_size):
                raise ValueError(
                    f"{path} is of step {part.step}, rank {part.rank} of {part.world_size}; expected step {self.step}, "
                    f"rank {rank} of {self.world_size}: is a second run saving into this directory?"
                )
            files[path.name] = FileRecord(len(text), hashlib.sha256(text).hexdigest())
            files.update(part.files)
            for name, tensor in part.tensors.items():
                tensors[name] = _joined(name, tensors.get(name), tensor)
        if missing:
            raise ValueError(
                f"ranks {missing} of {self.world_size} wrote nothing into {self.partial}: either writing failed there, "
                "or the directory is not on a file system that all hosts share"
            )
        for name, record in files.items():
            num_bytes = (self.partial / name).stat().st_size
            if num_bytes != record.bytes:
                raise ValueError(f"{self.partial / name} has {num_bytes} bytes, its rank wrote {record.bytes}")
        manifest = Manifest(
            FORMAT_VERSION,
            self.step,
            megascale.__version__,
            self.world_size,
            self.config,
            self.state,
            dict(sorted(tensors.items())),
            dict(sorted(files.items())),
        )
        problems = manifest_problems(manifest)
        if problems:
            raise ValueError(f"the slices of the ranks do not make whole tensors: {summary(problems)}")
        return manifest


def _rank_stem(rank: int) -> str:
    return f"rank_{rank:05d}"


def _joined(name: str, known: TensorRecord | None, more: TensorRecord) -> TensorRecord:
    """One record of a tensor from two that describe parts of it."""
    if known is None:
        return more
    if (known.dtype, known.shape) != (more.dtype, more.shape):
        raise ValueError(
            f"tensor {name} is {known.dtype} of shape {list(known.shape)} in {known.slices[0].file} and {more.dtype} "
            f"of shape {list(more.shape)} in {more.slices[0].file}: the ranks disagree"
        )
    return TensorRecord(known.dtype, known.shape, known.slices + more.slices)


def _clear_leftovers(root: Path) -> None:
    """Put the directory right after kills: what was under way goes, one set aside comes back or goes."""
    for pattern in (".step_*.partial", ".step_*.removed"):
        for path in sorted(root.glob(pattern)):
            remove_directory(path)
    for path in sorted(root.glob(".step_*.replaced")):
        digits = path.name.removeprefix(".step_").removesuffix(".replaced")
        if digits.isdecimal():
            _put_back_or_remove_replaced(root, int(digits))


def _put_back_or_remove_replaced(root: Path, step: int) -> None:
    """A former checkpoint of `step` that was set aside: back to its name when nothing took it, else removed."""
    replaced = replaced_path(root, step)
    if not replaced.exists():
        return
    published = published_path(root, step)
    if not published.exists() and problem_with(replaced) is None:
        os.rename(replaced, published)
        fsync_directory(root)
    else:
        remove_directory(replaced)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
