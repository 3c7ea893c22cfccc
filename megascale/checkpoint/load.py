"""Load tensors from a checkpoint into any layout: each wanted slice is put together from the stored slices it meets.

Nothing is written into a tensor before all wanted slices are known to match the checkpoint and every file that holds a
part of them has been read once and found to be what was saved.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from megascale.checkpoint.boxes import Box, intersection, slices_within
from megascale.checkpoint.holding import held
from megascale.checkpoint.manifest import (
    CheckpointEntry,
    Manifest,
    SliceRecord,
    find_latest,
    list_checkpoints,
    read_manifest,
    verify,
    verify_files,
)
from megascale.checkpoint.records import summary
from megascale.checkpoint.tensor_file import open_tensor_file
from megascale.checkpoint.tensors import TensorSlice
from megascale.utils.errors import UserError

__all__ = [
    "CheckpointEntry",
    "Manifest",
    "TensorSlice",
    "find_latest",
    "list_checkpoints",
    "load_tensors",
    "read_manifest",
    "verify",
]


class _Copy(NamedTuple):
    """One copy from disk to memory: the part of the logical tensor, where it is stored and where it goes."""

    part: Box
    stored: SliceRecord
    wanted: TensorSlice


def load_tensors(path: str | Path, wanted: Iterable[TensorSlice]) -> Manifest:
    """Fill the `data` of every wanted slice in place from the checkpoint directory `path`; its manifest.

    The slices may be cut in any way, whatever the layout that saved them, and lie on any device. Tensors of the
    checkpoint that nobody wants are left alone; a caller to whom that matters compares names with `manifest.tensors`.
    While it is read, no retention policy removes it.

    Raises:
        UserError: naming the tensor and both values when a name, whole shape or element type differs; naming the file
            when one that holds a wanted part is missing or damaged. No tensor was changed then.
    """
    directory = Path(path)
    with held(directory):
        manifest = read_manifest(directory)
        slices = list(wanted)
        problems = [problem for tensor_slice in slices if (problem := _mismatch(tensor_slice, manifest))]
        if problems:
            raise UserError(f"checkpoint {directory} does not fit this run: {summary(problems)}")
        copies_by_file = _plan(slices, manifest)
        verify_files(directory, manifest, copies_by_file)
        for name in sorted(copies_by_file):
            with open_tensor_file(directory / name) as file:
                for part, stored, target in copies_by_file[name]:
                    content = file.read(stored.key, stored.shape, slices_within(part, stored.box))
                    assert content.dtype == target.data.dtype, (
                        f"{name}: {stored.key} is not of the type in the manifest"
                    )
                    with torch.no_grad():
                        target.data.detach()[slices_within(part, target.box)].copy_(content)
    return manifest


def _plan(slices: list[TensorSlice], manifest: Manifest) -> dict[str, list[_Copy]]:
    """The copies that fill `slices`, by file. The manifest covers each tensor once, so each element is copied once."""
    copies: dict[str, list[_Copy]] = defaultdict(list)
    for wanted in slices:
        num_elements = 0
        for stored in manifest.tensors[wanted.name].slices:
            part = intersection(wanted.box, stored.box) if stored.box.num_elements else None
            if part is not None:
                copies[stored.file].append(_Copy(part, stored, wanted))
                num_elements += part.num_elements
        assert num_elements == wanted.data.numel(), f"{wanted.name}: the stored slices do not cover {wanted.box}"
    return dict(copies)


def _mismatch(wanted: TensorSlice, manifest: Manifest) -> str | None:
    """Why the wanted slice cannot come from this checkpoint, or None."""
    stored = manifest.tensors.get(wanted.name)
    if stored is None:
        nearest = difflib.get_close_matches(wanted.name, manifest.tensors, n=1)
        hint = f" (nearest name: {nearest[0]})" if nearest else ""
        return f"tensor {wanted.name} is not in it{hint}"
    if stored.shape != wanted.global_shape:
        return f"tensor {wanted.name} has shape {list(stored.shape)} in it, this run has {list(wanted.global_shape)}"
    if stored.dtype != wanted.dtype_name:
        return f"tensor {wanted.name} is {stored.dtype} in it, this run has {wanted.dtype_name}"
    return None
