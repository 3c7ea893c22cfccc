"""The arithmetic of boxes against counting elements one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megascale.checkpoint.boxes import Box, cover_problem, intersection, slices_within
from tests.checkpoint.saving import even_boxes, random_boxes


def counts(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How often each element is covered, by adding ones into an array."""
    total = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        total[slices_within(box, Box((0,) * len(shape), shape))] += 1
    return total


@pytest.mark.parametrize("seed", range(20))
def test_intersection_is_the_elements_covered_twice(seed: int) -> None:
    source = random.Random(seed)
    shape = (5, 6, 4)
    first, second = random_boxes(shape, 6, source)[0], random_boxes(shape, 6, source)[1]
    both = counts(shape, [first, second]) == 2
    common = intersection(first, second)
    if common is None:
        assert not both.any()
    else:
        assert (counts(shape, [common]) == both).all()


@pytest.mark.parametrize("seed", range(20))
def test_a_partition_covers_and_any_change_to_it_does_not(seed: int) -> None:
    source = random.Random(seed)
    shape = (6, 7)
    boxes = random_boxes(shape, 5, source)
    assert (counts(shape, boxes) == 1).all()
    assert cover_problem(shape, boxes) is None

    solid = next(box for box in boxes if box.num_elements)
    without = [box for box in boxes if box is not solid]
    assert "gap" in str(cover_problem(shape, without))
    assert "overlap" in str(cover_problem(shape, [*boxes, solid]))
    # Right number of elements, wrong place: one box moved onto its neighbours.
    moved = Box(tuple(0 if start else 1 for start in solid.offset), solid.shape)
    if moved.fits_in(shape) and moved != solid:
        assert cover_problem(shape, [*without, moved]) is not None


def test_cover_by_two_different_ways_of_cutting_is_an_overlap() -> None:
    """Rows 0-3 and columns 0-1 of an 8 x 4 matrix have 32 elements, as the matrix: counting does not do."""
    rows, columns = even_boxes((8, 4), 0, 2)[0], even_boxes((8, 4), 1, 2)[0]
    assert rows.num_elements + columns.num_elements == 32
    assert "overlap" in str(cover_problem((8, 4), [rows, columns]))


def test_scalars_and_empty_tensors() -> None:
    scalar = Box((), ())
    assert cover_problem((), [scalar]) is None
    assert cover_problem((), []) is not None
    assert cover_problem((), [scalar, scalar]) is not None
    assert intersection(scalar, scalar) == scalar
    assert cover_problem((0, 3), [Box((0, 0), (0, 3))]) is None


@pytest.mark.parametrize(
    "box", [Box((0,), (9,)), Box((-1,), (4,)), Box((5,), (4,)), Box((0, 0), (4, 1)), Box((0,), (-1,))]
)
def test_a_box_outside_the_shape_is_refused(box: Box) -> None:
    assert not box.fits_in((8,))
    assert "does not fit" in str(cover_problem((8,), [box]))
