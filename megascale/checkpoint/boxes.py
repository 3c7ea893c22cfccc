"""Arithmetic on rectangular parts of a tensor: where two parts meet, and whether parts cover a whole exactly. No torch.

A box is (offset, shape): one start index and one length for each dim of the whole tensor. A scalar is the box ((), ()).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular part of a tensor, in elements of the whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def fits_in(self, global_shape: Sequence[int]) -> bool:
        """True when the box has one entry per dim of `global_shape` and lies inside it."""
        return len(self.offset) == len(self.shape) == len(global_shape) and all(
            start >= 0 and length >= 0 and start + length <= size
            for start, length, size in zip(self.offset, self.shape, global_shape, strict=True)
        )

    def __str__(self) -> str:
        ranges = ", ".join(f"{start}:{start + length}" for start, length in zip(self.offset, self.shape, strict=True))
        return f"[{ranges}]"


def intersection(first: Box, second: Box) -> Box | None:
    """The part that two boxes of one tensor share, or None when they share no element."""
    starts = tuple(max(pair) for pair in zip(first.offset, second.offset, strict=True))
    lengths = tuple(
        min(a_start + a_length, b_start + b_length) - start
        for a_start, a_length, b_start, b_length, start in zip(*first, *second, starts, strict=True)
    )
    return Box(starts, lengths) if all(length > 0 for length in lengths) else None


def slices_within(part: Box, outer: Box) -> tuple[slice, ...]:
    """The index that selects `part` from a tensor that holds exactly `outer`."""
    return tuple(
        slice(start - base, start - base + length)
        for start, length, base in zip(part.offset, part.shape, outer.offset, strict=True)
    )


def cover_problem(global_shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """None when `boxes` hold every element of `global_shape` exactly once, else one sentence saying what is wrong.

    Boxes inside the bounds, no two of which meet, cover the whole exactly when their sizes add up to its size.
    Pairs are compared only where they meet along the dim that is cut most often, so a plain split costs a sort.
    """
    for box in boxes:
        if not box.fits_in(global_shape):
            return f"the part {box} does not fit in the shape {list(global_shape)}"
    solid = [box for box in boxes if box.num_elements > 0]
    if global_shape:
        sweep_dim = max(range(len(global_shape)), key=lambda dim: len({box.offset[dim] for box in solid}))
        solid.sort(key=lambda box: box.offset[sweep_dim])
        for index, box in enumerate(solid):
            end = box.offset[sweep_dim] + box.shape[sweep_dim]
            for other in solid[index + 1 :]:
                if other.offset[sweep_dim] >= end:
                    break
                if intersection(box, other) is not None:
                    return f"the parts {box} and {other} overlap: these elements are stored more than once"
    elif len(solid) > 1:
        return f"a scalar is stored {len(solid)} times"
    num_missing = math.prod(global_shape) - sum(box.num_elements for box in solid)
    if num_missing:
        return f"{num_missing} of its {math.prod(global_shape)} elements are stored in no part (gap)"
    return None
