"""A tensor as a checkpoint knows it: a named rectangular part of a logical tensor that belongs to no layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megascale.checkpoint.boxes import Box


@dataclass(frozen=True, eq=False)
class TensorSlice:
    """The part [offset, offset + data.shape) of logical tensor `name`, whose whole shape is `global_shape`.

    `data` lies on any device. On saving it is read; on loading it is filled in place.

    Raises:
        ValueError: when the part does not lie inside the whole, or `data` is a meta tensor.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: torch.Tensor

    def __post_init__(self) -> None:
        # Callers pass torch.Size and lists too; equality with the records on disk wants plain tuples of int.
        object.__setattr__(self, "global_shape", tuple(int(size) for size in self.global_shape))
        object.__setattr__(self, "offset", tuple(int(start) for start in self.offset))
        if not self.name:
            raise ValueError("a tensor slice needs a name")
        if self.data.is_meta:
            raise ValueError(f"slice of {self.name}: a meta tensor holds no values to save and keeps none when loaded")
        if not self.box.fits_in(self.global_shape):
            raise ValueError(
                f"slice of {self.name}: offset {list(self.offset)} with shape {list(self.data.shape)} does not lie in "
                f"the whole shape {list(self.global_shape)}"
            )

    @classmethod
    def whole(cls, name: str, data: torch.Tensor) -> TensorSlice:
        """The slice that is the whole tensor."""
        return cls(name, tuple(data.shape), (0,) * data.dim(), data)

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.data.shape))

    @property
    def dtype_name(self) -> str:
        """The element type without `torch.`: `float32`, `bfloat16`, `int64`, ..."""
        return str(self.data.dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class DeferredTensor:
    """A tensor that is put together when it is written, so that a file larger than the memory can be."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class DeferredSlice:
    """A `TensorSlice` for saving only, whose content is read when it is its turn to be written."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: DeferredTensor

    @property
    def box(self) -> Box:
        return Box(self.offset, self.data.shape)

    @property
    def dtype_name(self) -> str:
        """The element type without `torch.`."""
        return str(self.data.dtype).removeprefix("torch.")
