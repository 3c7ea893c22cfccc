"""Rewrite checkpoints: the same tensors in other files, or the mean of several.

Both read and write one stored part at a time, so a checkpoint larger than the memory can be converted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megascale.checkpoint.boxes import Box
from megascale.checkpoint.manifest import Manifest, list_checkpoints
from megascale.checkpoint.reading import CheckpointReader, open_checkpoint
from megascale.checkpoint.records import summary
from megascale.checkpoint.save import write_checkpoint
from megascale.checkpoint.tensors import DeferredSlice, DeferredTensor
from megascale.utils.errors import UserError

# Names of the weights start with it; moments of the optimizer and whatever else there is do not.
WEIGHT_PREFIX = "model."


def reshard(
    source: Path, run_directory: Path, num_tp: int, num_files: int, split_dims: Mapping[str, int | None]
) -> Path:
    """Write the checkpoint `source` into `run_directory` as `num_tp` tensor-parallel ranks would cut it; its path.

    Args:
        num_tp: Equal slices of each tensor that is split.
        num_files: Files in all, a multiple of `num_tp`: the tensors of each slice are dealt evenly to so many.
        split_dims: By tensor the dim that is split, None for one that is whole on every rank; it goes into the files
            of the first slice.

    Raises:
        UserError: the source is damaged, something stands at the destination, or the numbers do not fit the tensors.
    """
    if num_tp < 1 or num_files < 1 or num_files % num_tp:
        raise UserError(f"--num-files {num_files} is not a multiple of --tensor-model-parallel-size {num_tp}")
    with open_checkpoint(source) as reader:
        _require_free(run_directory, reader.manifest.step)
        by_rank = _cut(reader.manifest, num_tp, split_dims)
        files: list[list[DeferredSlice]] = []
        for boxes in by_rank:
            files += _dealt(reader, boxes, num_files // num_tp)
        manifest = reader.manifest
        return write_checkpoint(run_directory / "checkpoints", manifest.step, files, manifest.state, manifest.config)


def average(sources: Sequence[Path], run_directory: Path) -> tuple[Path, list[str]]:
    """Write the mean of the weights of several checkpoints into `run_directory`; its path, and what was copied.

    Each element is added up in float64 in order of the steps and rounded once, to the type it is stored in. Whatever is
    no weight (optimizer moments, counters) is that of the newest, as are the step and the cut into files. The state
    tells under `averaged_steps` what it is the mean of.

    Raises:
        UserError: there are fewer than two, one is damaged or given twice, or they are not of one model.
    """
    with ExitStack() as stack:
        readers = [stack.enter_context(open_checkpoint(path)) for path in dict.fromkeys(map(Path.resolve, sources))]
        readers.sort(key=lambda reader: reader.manifest.step)
        _require_averageable(readers, len(sources))
        newest = readers[-1].manifest
        _require_free(run_directory, newest.step)
        copied = sorted(name for name in newest.tensors if not _is_averaged(newest, name))
        by_file: dict[str, list[DeferredSlice]] = {}
        for name, tensor in newest.tensors.items():
            read = readers[-1].read if name in copied else partial(_mean, readers)
            for part in tensor.slices:
                by_file.setdefault(part.file, []).append(_deferred(readers[-1], name, part.box, read))
        steps = [reader.manifest.step for reader in readers]
        # What the newest one's weights lost in validation says nothing of the mean.
        progress = {**newest.state.get("train", {}), "validation_loss": None}
        state: dict[str, Any] = {**newest.state, "train": progress, "averaged_steps": steps}
        files = [by_file[name] for name in sorted(by_file)]
        path = write_checkpoint(run_directory / "checkpoints", newest.step, files, state, newest.config)
        return path, copied


def newest_complete(run: Path, num_checkpoints: int) -> list[Path]:
    """Return the newest `num_checkpoints` complete checkpoints of a run, newest first.

    Raises:
        UserError: there are not as many.
    """
    entries = list_checkpoints(run)
    complete = [entry.path for entry in entries if entry.problem is None]
    if len(complete) < num_checkpoints:
        damaged = [str(entry.problem) for entry in entries if entry.problem is not None]
        more = f" (not complete: {summary(damaged)})" if damaged else ""
        raise UserError(
            f"--num-checkpoints {num_checkpoints}, but {run} holds {len(complete)} complete checkpoints{more}: "
            f"give --num-checkpoints {len(complete)} or less"
        )
    return complete[:num_checkpoints]


def _cut(manifest: Manifest, num_tp: int, split_dims: Mapping[str, int | None]) -> list[list[tuple[str, Box]]]:
    """The parts of all tensors that each of `num_tp` ranks would save."""
    by_rank: list[list[tuple[str, Box]]] = [[] for _ in range(num_tp)]
    problems = []
    for name, tensor in manifest.tensors.items():
        dim = split_dims.get(name)
        if dim is None:
            by_rank[0].append((name, Box((0,) * len(tensor.shape), tensor.shape)))
            continue
        if tensor.shape[dim] % num_tp:
            problems.append(f"dim {dim} of {name} is {tensor.shape[dim]} long")
            continue
        length = tensor.shape[dim] // num_tp
        shape = tuple(length if index == dim else size for index, size in enumerate(tensor.shape))
        for rank in range(num_tp):
            offset = tuple(rank * length if index == dim else 0 for index in range(len(shape)))
            by_rank[rank].append((name, Box(offset, shape)))
    if problems:
        raise UserError(f"--tensor-model-parallel-size {num_tp} does not divide all tensors: {summary(problems)}")
    return by_rank


def _dealt(reader: CheckpointReader, boxes: list[tuple[str, Box]], num_files: int) -> list[list[DeferredSlice]]:
    """The parts dealt to files of about the same size: the largest first, each to the file with the least in it."""
    files: list[list[DeferredSlice]] = [[] for _ in range(num_files)]
    filled = [0] * num_files
    slices = [_deferred(reader, name, box, reader.read) for name, box in boxes]
    for item in sorted(slices, key=lambda item: (-item.data.numel() * item.data.element_size(), item.name)):
        emptiest = filled.index(min(filled))
        files[emptiest].append(item)
        filled[emptiest] += item.data.numel() * item.data.element_size()
    return files


def _deferred(reader: CheckpointReader, name: str, box: Box, read: Callable[[str, Box], torch.Tensor]) -> DeferredSlice:
    tensor = DeferredTensor(reader.dtype(name), box.shape, partial(read, name, box))
    return DeferredSlice(name, reader.manifest.tensors[name].shape, box.offset, tensor)


def _mean(readers: Sequence[CheckpointReader], name: str, box: Box) -> torch.Tensor:
    total = torch.zeros(box.shape, dtype=torch.float64)
    for reader in readers:
        total += reader.read(name, box)
    return (total / len(readers)).to(readers[-1].dtype(name))


def _is_averaged(manifest: Manifest, name: str) -> bool:
    return name.startswith(WEIGHT_PREFIX) and getattr(torch, manifest.tensors[name].dtype).is_floating_point


def _require_averageable(readers: Sequence[CheckpointReader], num_given: int) -> None:
    """Refuse what has no mean: too few, one given twice, other tensors."""
    if len(readers) < num_given:
        raise UserError("a checkpoint is given twice: it would count double")
    if len(readers) < 2:
        raise UserError(f"{len(readers)} checkpoint given: a mean needs two or more")
    newest = readers[-1]
    expected = _shapes(newest.manifest)
    for reader in readers[:-1]:
        found = _shapes(reader.manifest)
        differing = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        if differing:
            told = [f"{name} is {_said(found.get(name))} and {_said(expected.get(name))}" for name in differing]
            raise UserError(f"{reader.path} and {newest.path} are of different models: {summary(told)}")


def _shapes(manifest: Manifest) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (t.dtype, t.shape) for name, t in manifest.tensors.items() if name.startswith(WEIGHT_PREFIX)}


def _said(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if tensor is None else f"{tensor[0]} {list(tensor[1])}"


def _require_free(run_directory: Path, step: int) -> None:
    """Refuse to write among checkpoints of another origin."""
    existing = list_checkpoints(run_directory)
    if existing:
        raise UserError(
            f"{run_directory} already holds checkpoints (newest: step {existing[0].step}): give a new directory for "
            f"the converted one of step {step}"
        )
