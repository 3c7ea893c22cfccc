"""Ranks and groups, against the lists of the paper and against a plain enumeration."""

import itertools

import pytest

from megascale.config.layout import Coordinates, ParallelLayout
from megascale.utils.errors import UserError

# (tp, dp, pp)
LAYOUTS = [
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (2, 2, 1),
    (4, 1, 1),
    (3, 5, 1),
    (8, 64, 1),
    (1, 1, 2),
    (2, 3, 4),
    (8, 4, 16),
]


def test_512_ranks_as_in_the_paper():
    """Shoeybi et al. 2019, appendix B: groups of 8 consecutive GPUs; data parallel 1, 9, ..., 505 (counted from 1)."""
    layout = ParallelLayout(tp=8, dp=64)
    assert layout.world_size == 512
    assert layout.tp_groups()[0] == (0, 1, 2, 3, 4, 5, 6, 7)
    assert layout.tp_groups()[63] == (504, 505, 506, 507, 508, 509, 510, 511)
    assert layout.dp_groups()[0] == tuple(range(0, 505, 8))
    assert len(layout.tp_groups()) == 64
    assert len(layout.dp_groups()) == 8


def test_pipeline_stages_are_farthest_apart():
    """Narayanan et al. 2021: tensor parallelism inside a host, pipelines across hosts."""
    layout = ParallelLayout(tp=2, dp=2, pp=4)
    assert layout.world_size == 16
    assert layout.pp_groups() == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert layout.tp_groups()[:2] == ((0, 1), (2, 3))
    assert layout.dp_groups()[:2] == ((0, 2), (1, 3))
    assert layout.pp_end_groups() == ((0, 12), (1, 13), (2, 14), (3, 15))
    assert ParallelLayout(tp=2, dp=2).pp_end_groups() == ()


@pytest.mark.parametrize(("tp", "dp", "pp"), LAYOUTS)
def test_coordinates_are_the_rank_in_mixed_radix(tp, dp, pp):
    layout = ParallelLayout(tp, dp, pp)
    expected = [Coordinates(*position) for position in itertools.product(range(pp), range(dp), range(tp))]
    assert [layout.coordinates(rank) for rank in range(pp * tp * dp)] == expected
    assert [layout.rank_of(coordinates) for coordinates in expected] == list(range(pp * tp * dp))


@pytest.mark.parametrize(("tp", "dp", "pp"), LAYOUTS)
def test_groups_partition_the_ranks_and_meet_in_one(tp, dp, pp):
    layout = ParallelLayout(tp, dp, pp)
    axes = ((layout.tp_groups(), tp), (layout.dp_groups(), dp), (layout.pp_groups(), pp))
    for groups, size in axes:
        assert sorted(rank for group in groups for rank in group) == list(range(pp * tp * dp))
        assert {len(group) for group in groups} == {size}
    for (one, _), (other, _) in itertools.combinations(axes, 2):
        meetings = [len(set(a) & set(b)) for a in one for b in other]
        assert max(meetings) == 1
        assert sum(meetings) == layout.world_size, "each rank is where two of its groups meet"


@pytest.mark.parametrize(("tp", "dp", "pp"), LAYOUTS)
def test_the_place_in_a_group_is_the_coordinate(tp, dp, pp):
    layout = ParallelLayout(tp, dp, pp)
    for group in layout.tp_groups():
        assert [layout.coordinates(rank).tp_rank for rank in group] == list(range(tp))
    for group in layout.dp_groups():
        assert [layout.coordinates(rank).dp_rank for rank in group] == list(range(dp))
    for group in layout.pp_groups():
        assert [layout.coordinates(rank).pp_rank for rank in group] == list(range(pp))


def test_a_world_is_cut_into_whole_groups():
    assert ParallelLayout.of_world(12, tp=4) == ParallelLayout(tp=4, dp=3)
    with pytest.raises(UserError, match=r"world size 6 .* --tensor-model-parallel-size 4"):
        ParallelLayout.of_world(6, tp=4)
    assert ParallelLayout.of_world(12, tp=2, pp=3) == ParallelLayout(tp=2, dp=2, pp=3)
    with pytest.raises(UserError, match=r"world size 6 .*-size 2 x --pipeline-model-parallel-size 2"):
        ParallelLayout.of_world(6, tp=2, pp=2)


def test_what_is_outside_of_the_world_is_refused():
    layout = ParallelLayout(2, 2)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=str(wrong)):
            layout.coordinates(wrong)
    with pytest.raises(ValueError, match="position 2"):
        layout.rank_of((0, 0, 2))
    with pytest.raises(ValueError, match="tp=0"):
        ParallelLayout(0, 1)


def test_a_small_table_shows_every_rank():
    assert ParallelLayout(tp=2, dp=3).rank_table().splitlines() == [
        "      tp 0  tp 1",
        "dp 0     0     1",
        "dp 1     2     3",
        "dp 2     4     5",
    ]


def test_a_table_with_stages():
    assert ParallelLayout(tp=2, dp=2, pp=2).rank_table().splitlines() == [
        "           tp 0  tp 1",
        "pp 0 dp 0     0     1",
        "pp 0 dp 1     2     3",
        "pp 1 dp 0     4     5",
        "pp 1 dp 1     6     7",
    ]


def test_a_large_table_loses_its_middle_only():
    table = ParallelLayout(tp=16, dp=512).rank_table(max_rows=4, max_columns=4)
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["tp", "0", "tp", "1", "...", "tp", "15"]
    assert rows[1] == ["dp", "0", "0", "1", "...", "15"]
    assert rows[3] == ["...", "...", "...", "...", "..."]
    assert rows[4] == ["dp", "511", "8176", "8177", "...", "8191"]
