"""Flat buffers: where parameters lie, what a shard of a buffer holds, and runs of elements as boxes."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from megascale.optim.flat import ROW, FlatLayout, Shard, boxes_of_run
from megascale.parallel.context import single_process
from megascale.parallel.sharding import declared_parameters
from tests.model.tiny import tiny_gpt
from tests.optim.toy import Toy


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (1, 4), (4, 1), (2, 3, 4), (3, 1, 2, 2)])
def test_boxes_hold_the_run_and_nothing_else(shape: tuple[int, ...]) -> None:
    """Every run of every shape: the boxes' elements, one box after the other, are the run's."""
    numel = math.prod(shape)
    whole = torch.arange(numel).view(shape)
    for start, stop in product(range(numel), range(numel + 1)):
        if start < stop:
            boxes = boxes_of_run(shape, start, stop)
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            found = []
            for offset, size in boxes:
                box = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
                assert box.shape == size
                found += box.flatten().tolist()
            assert found == list(range(start, stop)), (start, stop)


def test_a_whole_tensor_is_one_box() -> None:
    for shape in [(), (6,), (3, 5), (2, 3, 4)]:
        assert boxes_of_run(shape, 0, math.prod(shape)) == [((0,) * len(shape), shape)]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
@pytest.mark.parametrize("largest", [1, 200, 1000, 10**9])
def test_shards_hold_every_element_once(num_shards: int, largest: int) -> None:
    """What the ranks write into their pieces is, together, each parameter once."""
    layout = FlatLayout(declared_parameters(tiny_gpt(single_process())), num_shards)
    buckets = layout.cut(largest)
    assert [b.start for b in buckets] == [0, *(b.stop for b in buckets[:-1])]
    assert buckets[-1].stop == layout.size
    step = max(1, largest // (ROW * num_shards)) * ROW * num_shards
    assert len(buckets) == math.ceil(layout.size / step)
    written = layout.zeros(torch.int64)
    for rank in range(num_shards):
        shares = [(b.stop - b.start) // num_shards for b in buckets]
        shard = Shard(
            layout,
            [slice(b.start + rank * n, b.start + (rank + 1) * n) for b, n in zip(buckets, shares, strict=True)],
        )
        own = shard.own_zeros(torch.int64)
        for flat_view, own_view, piece in zip(shard.views(written), shard.own_views(own), shard.pieces, strict=True):
            assert flat_view.shape == own_view.shape == piece.of_parameter().shape == piece.shape
            flat_view += 1
            own_view += 1
        for stretch, part in zip(shard.parts(written), shard.own_parts(own), strict=True):
            assert torch.equal(stretch, part), "a piece lies at the same place of its stretch in both kinds of buffer"
    assert all((view == 1).all() for view in layout.views(written))
    assert written.sum() == sum(d.parameter.numel() for d in layout.declared), "padding belongs to nobody"


def test_rows_tell_whose_elements_they_hold() -> None:
    layout = FlatLayout(declared_parameters(Toy(single_process().tp)))
    rows = layout.rows(lambda d: d.name == "rows")
    assert rows.sum() == 1
    flat = layout.zeros(torch.float32)
    layout.views(flat)[[d.name for d in layout.declared].index("rows")].fill_(1.0)
    assert torch.equal(flat.view(-1, ROW).sum(dim=1) > 0, rows)
