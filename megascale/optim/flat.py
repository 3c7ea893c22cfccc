"""Where parameters lie in a flat buffer, and which stretches of it one rank updates.

Every flat buffer of a model (gradients, master weights, half-precision parameters) has the same layout: the parameters
in reverse model order, which is about the order in which a backward pass finishes their gradients, so that the buffer
fills from the front; last the parameters whose gradients take one more sum after that: those that other pipeline stages
hold as well, then those with partial gradients (see `parallel.sharding`). So each of these sums is one message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megascale.parallel.sharding import DeclaredParameter

# Each parameter starts at a multiple of this many elements: vectorised kernels see aligned memory at any dtype, and
# each row of so many elements belongs to one parameter.
ROW = 64

# A box inside a tensor: its offset and its shape.
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Piece:
    """A run of one parameter's elements: start .. stop of the rank's slice of it, in C order.

    Attributes:
        position: Where the run starts in a flat buffer.
        own_position: Where it starts in a buffer that holds a rank's stretches only.
    """

    declared: DeclaredParameter
    start: int
    stop: int
    position: int
    own_position: int

    @property
    def is_whole(self) -> bool:
        """Whether the run is all of the rank's slice."""
        return self.stop - self.start == self.declared.parameter.numel()

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's own shape if the run is whole, one dim otherwise."""
        return tuple(self.declared.parameter.shape) if self.is_whole else (self.stop - self.start,)

    def of_parameter(self) -> torch.Tensor:
        """Return the run as a view of the parameter."""
        return self.declared.parameter.data.view(-1)[self.start : self.stop].view(self.shape)

    def boxes(self) -> list[Box]:
        """Return the run as boxes of the rank's slice, which follow each other in the run."""
        return boxes_of_run(tuple(self.declared.parameter.shape), self.start, self.stop)


class FlatLayout:
    """The place of each parameter in a flat buffer.

    Args:
        declared: The parameters, in model order.
        num_shards: The size is padded so that this many equal shards of whole rows fit.

    Attributes:
        declared: The parameters in the order of the buffer; `offsets` says where each starts.
        size: Elements of a buffer.
        shared, partial: The stretches of the parameters that other pipeline stages hold, and of the partial gradients.
            Nothing else lies in the granules and buckets of the shared stretch, so that it is cut alike on each stage.
    """

    def __init__(self, declared: Sequence[DeclaredParameter], num_shards: int = 1) -> None:
        backwards = list(reversed(declared))
        shared = [d for d in backwards if d.copies is not None]
        partial = [d for d in backwards if d.spec.gradient_is_partial]
        plain = [d for d in backwards if d.copies is None and not d.spec.gradient_is_partial]
        self.declared = [*plain, *shared, *partial]
        assert len(self.declared) == len(declared), "partial gradients of shared parameters are not summed"
        self.granule = ROW * num_shards
        self.offsets: list[int] = []
        end = self._place(plain, 0)
        shared_start = self._whole_granules(end) if shared else end
        end = self._place(shared, shared_start)
        partial_start = self._whole_granules(end) if shared else end
        end = self._place(partial, partial_start)
        self.size = self._whole_granules(end)
        self.shared = slice(shared_start, partial_start) if shared else slice(self.size, self.size)
        self.partial = slice(partial_start, end)
        self.device = self.declared[0].parameter.device

    @property
    def late_start(self) -> int:
        """Where the gradients begin that are not final as a backward pass leaves them; the size if all are."""
        return self.partial.start if self.partial.start < self.partial.stop else self.size

    def _place(self, parameters: Sequence[DeclaredParameter], start: int) -> int:
        """Give parameters their places one after the other from `start` on; return where the last one's rows end."""
        for d in parameters:
            self.offsets.append(start)
            start += -(-d.parameter.numel() // ROW) * ROW
        return start

    def _whole_granules(self, end: int) -> int:
        return -(-end // self.granule) * self.granule

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a new buffer."""
        return torch.zeros(self.size, dtype=dtype, device=self.device)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part of a buffer, in the parameter's shape."""
        return [
            flat[offset : offset + d.parameter.numel()].view(d.parameter.shape)
            for offset, d in zip(self.offsets, self.declared, strict=True)
        ]

    def cut(self, largest: int) -> list[slice]:
        """Cut a buffer into stretches of at most `largest` elements (at least one granule).

        All are equal but the last, and the last before and in the shared stretch.
        """
        step = max(1, largest // self.granule) * self.granule
        regions = ((0, self.shared.start), (self.shared.start, self.shared.stop), (self.shared.stop, self.size))
        return [slice(start, min(start + step, last)) for first, last in regions for start in range(first, last, step)]

    def inside(self, stretch: slice) -> list[int]:
        """Return the indices of the parameters that have elements in a stretch."""
        return [
            index
            for index, (offset, d) in enumerate(zip(self.offsets, self.declared, strict=True))
            if offset < stretch.stop and offset + d.parameter.numel() > stretch.start
        ]

    def rows(self, holds: Callable[[DeclaredParameter], bool]) -> torch.Tensor:
        """Return for each row of a buffer whether `holds` is true of its parameter, bool [size / ROW]."""
        mask = torch.zeros(self.size // ROW, dtype=torch.bool)
        for offset, d in zip(self.offsets, self.declared, strict=True):
            if holds(d):
                mask[offset // ROW : -(-(offset + d.parameter.numel()) // ROW)] = True
        return mask.to(self.device)


class Shard:
    """The elements of a flat buffer that one rank updates.

    Args:
        layout: Of the buffer.
        stretches: Which elements, in order; all of them for a rank that updates its whole slice of the model.

    Attributes:
        size: How many elements.
        pieces: The runs of parameters in the stretches.
    """

    def __init__(self, layout: FlatLayout, stretches: Sequence[slice]) -> None:
        self.layout, self.stretches = layout, list(stretches)
        self.pieces: list[Piece] = []
        self.size = 0
        for stretch in self.stretches:
            for index in layout.inside(stretch):
                d, offset = layout.declared[index], layout.offsets[index]
                start = max(stretch.start - offset, 0)
                stop = min(stretch.stop - offset, d.parameter.numel())
                position = offset + start
                self.pieces.append(Piece(d, start, stop, position, self.size + position - stretch.start))
            self.size += stretch.stop - stretch.start

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the stretches of a flat buffer."""
        return [flat[stretch] for stretch in self.stretches]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces of a flat buffer."""
        return [flat[p.position : p.position + p.stop - p.start].view(p.shape) for p in self.pieces]

    def own_zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a new buffer for the stretches only."""
        return torch.zeros(self.size, dtype=dtype, device=self.layout.device)

    def own_parts(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return the stretches of a buffer that holds nothing else."""
        return list(own.split([stretch.stop - stretch.start for stretch in self.stretches]))

    def own_views(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces of a buffer that holds the stretches only."""
        return [own[p.own_position : p.own_position + p.stop - p.start].view(p.shape) for p in self.pieces]


def boxes_of_run(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return elements start .. stop of a tensor, counted in C order, as boxes in that order: at most 2 dims - 1."""
    if len(shape) <= 1:
        return [((start,), (stop - start,))] if shape else [((), ())]
    inner = math.prod(shape[1:])
    first_row, last_row = -(-start // inner), stop // inner
    if first_row > last_row:  # inside one row
        return [
            ((last_row, *offset), (1, *size))
            for offset, size in boxes_of_run(shape[1:], start - last_row * inner, stop - last_row * inner)
        ]
    found: list[Box] = []
    if start < first_row * inner:
        before = first_row - 1
        for offset, size in boxes_of_run(shape[1:], start - before * inner, inner):
            found.append(((before, *offset), (1, *size)))
    if first_row < last_row:
        found.append(((first_row, *(0 for _ in shape[1:])), (last_row - first_row, *shape[1:])))
    if stop > last_row * inner:
        for offset, size in boxes_of_run(shape[1:], 0, stop - last_row * inner):
            found.append(((last_row, *offset), (1, *size)))
    return found
