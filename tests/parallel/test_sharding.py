"""Initial values are a pure function of (seed, name, global index), and normal; declarations say where a slice lies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from megascale.parallel import sharding
from megascale.parallel.context import Axis, single_process
from megascale.parallel.sharding import (
    Constant,
    Normal,
    ParallelModule,
    ParameterSpec,
    declared_parameters,
    initialise,
    standard_normal,
)
from tests.axes import lone_axis

CPU = torch.device("cpu")


class _Weights(ParallelModule):
    """One parameter of each kind."""

    def __init__(self, axis: Axis, std: float = 0.02, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(axis)
        self.declare("rows", ParameterSpec((8, 6), 0, Normal(std), True), dtype, CPU)
        self.declare("columns", ParameterSpec((6, 8), 1, Normal(std), True), dtype, CPU)
        self.declare("cube", ParameterSpec((3, 8, 5), 1, Normal(std), True), dtype, CPU)
        self.declare("whole", ParameterSpec((5, 7), None, Normal(std), True), dtype, CPU)
        self.declare("ones", ParameterSpec((8,), 0, Constant(1.0), False), dtype, CPU)


def _full_initial_weights(tp: int, seed: int) -> dict[str, torch.Tensor]:
    """Initialise every rank's slices and put them at their declared offsets."""
    full: dict[str, torch.Tensor] = {}
    for rank in range(tp):
        axis = lone_axis(rank, tp)
        model = _Weights(axis)
        initialise(model, seed)
        for d in declared_parameters(model):
            target = full.setdefault(d.name, torch.full(d.spec.shape, math.nan, dtype=torch.float64))
            for dim, start in enumerate(d.spec.offset(axis)):
                target = target.narrow(dim, start, d.spec.local_shape(axis)[dim])
            target.copy_(d.parameter.detach())
    return full


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("block", [1 << 20, 16, 1])
def test_every_layout_starts_from_the_same_full_weights(tp: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    serial = _full_initial_weights(1, seed=1234)
    # Drawn in blocks of this many elements.
    monkeypatch.setattr(sharding, "_BLOCK_ELEMENTS", block)
    parallel = _full_initial_weights(tp, seed=1234)
    for name, weight in serial.items():
        assert torch.equal(parallel[name], weight), name
        assert torch.isfinite(weight).all(), name


def test_a_generator_per_rank_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the stream counted from the slice's start, both halves would be equal and the full weight another."""
    serial = _full_initial_weights(1, seed=1234)
    monkeypatch.setattr(
        sharding, "standard_normal", lambda seed, name, start, count: standard_normal(seed, name, 0, count)
    )
    parallel = _full_initial_weights(2, seed=1234)
    assert not torch.equal(parallel["rows"], serial["rows"])
    assert torch.equal(parallel["rows"][:4], parallel["rows"][4:])


def test_the_stream_is_a_pure_function_of_the_index() -> None:
    whole = standard_normal(7, "w", 0, 4000)
    generator = np.random.default_rng(0)
    for _ in range(300):
        start, count = int(generator.integers(0, 3900)), int(generator.integers(1, 100))
        assert np.array_equal(standard_normal(7, "w", start, count), whole[start : start + count])
    far = standard_normal(7, "w", 10**12, 8)
    assert np.array_equal(standard_normal(7, "w", 10**12 + 3, 5), far[3:])
    assert standard_normal(7, "w", 5, 0).size == 0


def test_seeds_and_names_give_unrelated_streams() -> None:
    count = 20_000
    streams = [standard_normal(seed, name, 0, count) for seed, name in ((1, "a"), (2, "a"), (1, "b"), (12, "a"))]
    correlation = np.corrcoef(streams)
    # The standard deviation of a correlation of independent streams is 1/sqrt(count).
    assert np.abs(correlation - np.eye(4)).max() < 5 / math.sqrt(count)
    # "1:2a" and "12:a" must not meet.
    assert standard_normal(1, "2:a", 0, 1) != standard_normal(12, "a", 0, 1)


def test_the_values_are_normal() -> None:
    count = 400_000
    values = np.sort(standard_normal(1234, "blocks.0.attention.qkv.weight", 0, count))
    assert abs(values.mean()) < 5 / math.sqrt(count)
    assert abs(values.std() - 1) < 5 / math.sqrt(2 * count)
    # Kolmogorov-Smirnov: the largest distance between the two distribution functions; 1.95/sqrt(n) has p = 0.001.
    exact = 0.5 * (1 + torch.erf(torch.from_numpy(values) / math.sqrt(2)).numpy())
    assert np.abs(exact - (np.arange(count) + 0.5) / count).max() < 1.95 / math.sqrt(count)
    # Far out as well.
    assert np.mean(np.abs(values) > 3) == pytest.approx(0.0027, rel=0.1)
    # Neighbours are independent.
    raw = standard_normal(1234, "blocks.0.attention.qkv.weight", 0, count)
    for lag in (1, 2, 3, 4):
        assert abs(np.mean(raw[:-lag] * raw[lag:])) < 5 / math.sqrt(count)


def test_a_wrong_transform_would_not_pass_for_normal() -> None:
    """The distance above of a uniform of the right mean and deviation is over 15 times its bound."""
    count = 400_000
    uniform = np.sort(np.random.default_rng(0).uniform(-math.sqrt(3), math.sqrt(3), count))
    exact = 0.5 * (1 + torch.erf(torch.from_numpy(uniform) / math.sqrt(2)).numpy())
    assert np.abs(exact - (np.arange(count) + 0.5) / count).max() > 15 * 1.95 / math.sqrt(count)


def test_half_and_single_precision_are_the_same_values_rounded() -> None:
    models = {dtype: _Weights(single_process().tp, dtype=dtype) for dtype in (torch.float64, torch.float32)}
    for model in models.values():
        initialise(model, 1)
    for double, single in zip(models[torch.float64].parameters(), models[torch.float32].parameters(), strict=True):
        assert torch.equal(double.float(), single)


def test_constants_are_constant() -> None:
    model = _Weights(lone_axis(1, 2))
    initialise(model, 1)
    assert model.get_parameter("ones").tolist() == [1.0] * 4


def test_slices_lie_where_they_are_declared() -> None:
    spec = ParameterSpec((3, 8, 5), 1, Normal(1.0), True)
    assert [spec.local_shape(lone_axis(rank, 4)) for rank in range(4)] == [(3, 2, 5)] * 4
    assert [spec.offset(lone_axis(rank, 4)) for rank in range(4)] == [(0, 0, 0), (0, 2, 0), (0, 4, 0), (0, 6, 0)]
    replicated = ParameterSpec((3, 8), None, Normal(1.0), True)
    assert replicated.local_shape(lone_axis(3, 4)) == (3, 8)
    assert replicated.offset(lone_axis(3, 4)) == (0, 0)


def test_a_shared_parameter_is_declared_once() -> None:
    model = nn.Module()
    model.first = _Weights(single_process().tp)
    model.again = model.first
    assert [d.name for d in declared_parameters(model)] == [
        "first.rows",
        "first.columns",
        "first.cube",
        "first.whole",
        "first.ones",
    ]


def test_a_parameter_without_a_declaration_is_refused() -> None:
    model = nn.Module()
    model.rogue = nn.Linear(2, 2)
    with pytest.raises(AssertionError, match=r"rogue\.weight has no declared layout"):
        declared_parameters(model)


def test_a_split_that_does_not_divide_is_refused() -> None:
    module = ParallelModule(lone_axis(0, 4))
    with pytest.raises(ValueError, match=r"dim 1 of \[4, 6\] does not divide over the 4 ranks"):
        module.declare("weight", ParameterSpec((4, 6), 1, Normal(1.0), True), torch.float32, CPU)
