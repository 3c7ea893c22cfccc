"""Read any part of any tensor of a checkpoint, one after the other, with no more in memory than that part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from megascale.checkpoint.boxes import Box, intersection, slices_within
from megascale.checkpoint.holding import held
from megascale.checkpoint.manifest import Manifest, read_manifest, verify_files
from megascale.checkpoint.tensor_file import TensorFile, open_tensor_file
from megascale.utils.errors import UserError


class CheckpointReader:
    """An open checkpoint whose files have been verified; see `open_checkpoint`."""

    def __init__(self, path: Path, manifest: Manifest, files: dict[str, TensorFile]) -> None:
        self.path, self.manifest = path, manifest
        self._files = files

    def dtype(self, name: str) -> torch.dtype:
        """Return the element type of tensor `name`."""
        dtype = getattr(torch, self.manifest.tensors[name].dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UserError(
                f"{self.path}: tensor {name} is of type {self.manifest.tensors[name].dtype}, not one of torch"
            )
        return dtype

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the part `box` of tensor `name`, on the CPU, whatever files hold it."""
        content = torch.empty(box.shape, dtype=self.dtype(name))
        for stored in self.manifest.tensors[name].slices:
            part = intersection(box, stored.box) if stored.box.num_elements else None
            if part is not None:
                found = self._files[stored.file].read(stored.key, stored.shape, slices_within(part, stored.box))
                content[slices_within(part, box)] = found
        return content


@contextmanager
def open_checkpoint(path: Path) -> Iterator[CheckpointReader]:
    """Verify every file of the checkpoint and open it; it is not removed by its run meanwhile.

    Raises:
        UserError: it is not complete, or a file is not what was saved.
    """
    with held(path), ExitStack() as stack:
        manifest = read_manifest(path)
        verify_files(path, manifest, manifest.files)
        names = sorted({part.file for tensor in manifest.tensors.values() for part in tensor.slices})
        yield CheckpointReader(
            path, manifest, {name: stack.enter_context(open_tensor_file(path / name)) for name in names}
        )
