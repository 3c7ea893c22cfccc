"""The axes' own promises: what is logged, what a size of 1 skips, what is agreed on by all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megascale.config.layout import ParallelLayout
from megascale.parallel.collective_log import Collective
from megascale.parallel.context import Axis, ParallelContext, single_process


def _logged(context: ParallelContext) -> list[list[tuple[str, str, int, int]]]:
    x = torch.ones(2, 3, dtype=torch.float16)
    with context.recording() as outer:
        context.tp.all_reduce(x)
        with context.recording() as inner:
            context.dp.all_gather(x, 0)
    context.world.barrier()
    return [[(r.op, r.axis, r.num_elements, r.num_bytes) for r in records] for records in (outer, inner)]


def test_every_collective_inside_a_recording_is_logged_in_order(ranks) -> None:
    gather = ("all_gather", "dp", 6, 12)
    for outer, inner in ranks(ParallelLayout(tp=2, dp=2), _logged):
        assert outer == [("all_reduce", "tp", 6, 12), gather]
        assert inner == [gather]


def test_a_recording_ends_with_its_block() -> None:
    log = single_process().world.log
    with pytest.raises(RuntimeError, match="inside"), log.recording() as records:
        raise RuntimeError("inside")
    log.add("all_reduce", "tp", torch.ones(1))
    assert records == []


class _Notes:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def entered(self, collective: Collective) -> None:
        self.told.append(f"{collective.op} {collective.axis}")

    def left(self) -> None:
        self.told.append("left")


def _watched(context: ParallelContext) -> list[str]:
    x = torch.ones(4)
    notes = _Notes()
    with context.watching(notes):
        context.tp.all_reduce_(x)
        pending = context.tp.start_all_reduce_(x)
        pending.wait()
        context.dp.all_reduce_(x)  # of size 1: nobody to wait for
    context.tp.all_reduce_(x)
    return notes.told


def test_a_watcher_knows_when_a_rank_waits(ranks) -> None:
    """A started collective is entered when it starts; the rank is inside it while it waits for it."""
    told = ["all_reduce tp", "left", "all_reduce tp", "wait tp", "left"]
    assert ranks(ParallelLayout(tp=2), _watched) == [told, told]


def test_bytes_follow_the_dtype() -> None:
    sizes = {torch.float64: 48, torch.float32: 24, torch.bfloat16: 12}
    assert {dtype: Collective("all_reduce", "tp", (2, 3), dtype).num_bytes for dtype in sizes} == sizes


def _agreements(context: ParallelContext) -> tuple[bool, bool, list[float], float]:
    axis = context.world
    largest = axis.all_reduce(torch.tensor(float(axis.rank)), dist.ReduceOp.MAX)
    return axis.any(axis.rank == 1), axis.any(False), axis.sum_floats([1.0, 0.1 * axis.rank]), largest.item()


def test_ranks_agree(ranks) -> None:
    by_rank = ranks(ParallelLayout(tp=4), _agreements)
    assert all(answer == by_rank[0] for answer in by_rank), "bit for bit"
    some, none, sums, largest = by_rank[0]
    assert some
    assert not none
    assert sums == pytest.approx([4.0, 0.6])
    assert largest == 3.0


def _half_sums(context: ParallelContext) -> list[tuple[torch.dtype, list[float]]]:
    sums = [context.tp.all_reduce(torch.full((3,), 1.5, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16)]
    return [(total.dtype, total.tolist()) for total in sums]


def test_half_precision_is_reduced_in_half_precision(ranks) -> None:
    for sums in ranks(ParallelLayout(tp=2), _half_sums):
        assert sums == [(torch.float16, [3.0] * 3), (torch.bfloat16, [3.0] * 3)]


def _strided(context: ParallelContext) -> list[list[list[float]]]:
    """Reduce and gather a transposed tensor."""
    x = (torch.arange(6.0).view(2, 3) + 10 * context.tp.rank).t()
    return [context.tp.all_reduce(x).tolist(), context.tp.all_gather(x, 0).tolist()]


def test_tensors_of_any_stride_are_read_as_they_are_indexed(ranks) -> None:
    for reduced, gathered in ranks(ParallelLayout(tp=2), _strided):
        assert reduced == [[10.0, 16.0], [12.0, 18.0], [14.0, 20.0]]
        assert gathered == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0], [10.0, 13.0], [11.0, 14.0], [12.0, 15.0]]


def _around_the_ring(
    context: ParallelContext,
) -> tuple[list[float], list[float], list[tuple[str, str]], tuple[int, int]]:
    """Send two messages forward and one backward before reading any."""
    assert context.links is not None
    stage = float(context.pp.rank)
    with context.recording() as records:
        sent = [context.links.to_next.start_send(torch.full((2,), 10 * stage + number)) for number in range(2)]
        sent.append(context.links.to_previous.start_send(torch.full((3,), 100 * stage)))
        backward = context.links.from_next.receive((3,), torch.float32)
        forward = [context.links.from_previous.receive((2,), torch.float32) for _ in range(2)]
        for pending in sent:
            pending.wait()
    ends = (context.pp_ends.size, context.pp_ends.rank)
    return [x[1].item() for x in forward], backward.tolist(), [(r.op, r.axis) for r in records], ends


@pytest.mark.parametrize("pp", [2, 3])
def test_links_carry_messages_one_way_in_order(ranks, pp: int) -> None:
    """Also between two stages, which are each other's next and previous."""
    sends = [("send", "pp_forward")] * 2 + [("send", "pp_backward")]
    receives = [("receive", "pp_backward")] + [("receive", "pp_forward")] * 2
    for stage, (forward, backward, records, ends) in enumerate(ranks(ParallelLayout(pp=pp), _around_the_ring)):
        before, after = (stage - 1) % pp, (stage + 1) % pp
        assert forward == [10 * before, 10 * before + 1]
        assert backward == [100 * after] * 3
        assert records == sends + receives
        assert ends == {0: (2, 0), pp - 1: (2, 1)}.get(stage, (1, 0))
    assert single_process().links is None


def test_only_the_first_rank_speaks(ranks) -> None:
    assert ranks(ParallelLayout(tp=2), _speaks) == [True, False]
    assert single_process().speaks


def _speaks(context: ParallelContext) -> bool:
    return context.speaks


def test_an_axis_has_a_group_exactly_when_it_has_company() -> None:
    with pytest.raises(AssertionError, match="a group exists iff"):
        Axis("tp", 0, 2)
    with pytest.raises(AssertionError, match="rank 2 of 2"):
        Axis("tp", 2, 2)
