"""Safetensors files: written durably in one pass that also hashes them, and read in parts. Nothing in them is executed.

Layout (https://github.com/huggingface/safetensors#format): 8 bytes little-endian length of the header; the header, a
JSON object {key: {dtype, shape, data_offsets}} padded with spaces; then the bytes of the tensors without holes. The
library's own writer first copies every tensor to host memory at once; this one stages a single tensor at a time, which
matters when a rank's share fills most of the memory there is.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megascale.checkpoint.records import FileRecord
from megascale.checkpoint.tensors import DeferredTensor
from megascale.utils.errors import UserError
from megascale.utils.files import atomic_writer

# Bytes written and hashed at a time.
_CHUNK_BYTES = 1 << 24

# The header is padded so that the tensors start at a multiple of the largest element size.
_ALIGNMENT = 8


def write_tensor_file(path: Path, tensors: Mapping[str, torch.Tensor | DeferredTensor]) -> FileRecord:
    """Write `tensors` under their keys to the safetensors file `path`, durable on return; its size and sha256.

    The bytes depend on keys, types, shapes and values only: the same tensors give the same file.

    Raises:
        ValueError: for an element type that safetensors has no name for.
    """
    assert sys.byteorder == "little", "safetensors stores little-endian numbers; this machine is big-endian"
    # Larger elements first keeps every tensor aligned to its own element size, as readers that map the file expect.
    keys = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header: dict[str, Any] = {}
    position = 0
    for key in keys:
        tensor = tensors[key]
        end = position + tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": _stored_dtype(key, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    digest = hashlib.sha256()
    num_bytes = 0
    with atomic_writer(path, "wb") as file:
        for chunk in _chunks(struct.pack("<Q", len(text)) + text, keys, tensors):
            digest.update(chunk)
            file.write(chunk)
            num_bytes += len(chunk)
    return FileRecord(num_bytes, digest.hexdigest())


class TensorFile:
    """A safetensors file open for reading parts of its tensors; see `open_tensor_file`."""

    def __init__(self, path: Path, handle: Any) -> None:
        self._path = path
        self._handle = handle

    def read(self, key: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> torch.Tensor:
        """Part `index` of tensor `key`, which must be of `shape`, on the CPU; only that part is copied from the file.

        Raises:
            UserError: when the file has no such tensor, or it is of another shape.
        """
        try:
            stored = self._handle.get_slice(key)
        except SafetensorError:
            raise UserError(f"{self._path} has no tensor {key!r}, though the manifest says so") from None
        if tuple(stored.get_shape()) != shape:
            raise UserError(
                f"{self._path}: tensor {key!r} has shape {stored.get_shape()}, the manifest says {list(shape)}"
            )
        # A scalar has no dim to index.
        part: torch.Tensor = stored[index] if index else self._handle.get_tensor(key)
        return part


@contextmanager
def open_tensor_file(path: Path) -> Iterator[TensorFile]:
    """Open the safetensors file `path` for reading parts of its tensors.

    Raises:
        UserError: when it is not there or not a safetensors file.
    """
    try:
        handle = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as a safetensors file: {error}") from None
    with handle as opened:
        yield TensorFile(path, opened)


def _stored_dtype(key: str, tensor: torch.Tensor | DeferredTensor) -> str:
    """The name that the safetensors format gives to the element type."""
    names = {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
    if tensor.dtype not in names:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in names)
        raise ValueError(f"tensor {key} is of type {tensor.dtype}, a checkpoint can hold {supported}")
    return names[tensor.dtype]


def _chunks(
    head: bytes, keys: list[str], tensors: Mapping[str, torch.Tensor | DeferredTensor]
) -> Iterator[bytes | memoryview]:
    yield head
    for key in keys:
        tensor = tensors[key]
        if isinstance(tensor, DeferredTensor):
            content = tensor.read()
            assert (content.dtype, tuple(content.shape)) == (tensor.dtype, tensor.shape), f"{key} is not as declared"
            tensor = content
        on_host = tensor.detach().to("cpu")
        if on_host.numel() > 0:
            stored = on_host.reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(stored), _CHUNK_BYTES):
                yield stored[start : start + _CHUNK_BYTES]
