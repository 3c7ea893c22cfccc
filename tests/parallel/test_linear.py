"""Products with their communication: the same numbers as torch's own, and one runs while the other computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megascale.config.layout import ParallelLayout
from megascale.config.schema import ParallelConfig
from megascale.parallel.boundary import Boundary, build_boundary
from megascale.parallel.collective_log import WAIT, Collective
from megascale.parallel.context import Axis, ParallelContext, Pending
from megascale.parallel.random import RandomStreams
from tests.full import difference, gradient_of

EXACT = 1e-12
# s, b, i, o: all different, so that a product is known by the shape of its result.
SEQUENCE, BATCH, INPUTS, OUTPUTS = 8, 3, 12, 20


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _boundary(context: ParallelContext, sequence_parallel: bool, overlap: bool) -> Boundary:
    parallel = ParallelConfig(sequence_parallel=sequence_parallel, async_tensor_model_parallel_allreduce=overlap)
    return build_boundary(context.tp, RandomStreams(1, context.tp, context.device), parallel)


def _product(
    context: ParallelContext, boundary: Boundary, has_bias: bool = True
) -> tuple[torch.Tensor, list[torch.Tensor], Callable[[], None]]:
    """Return this rank's y, its [x, weight, bias] (leaves), and what runs the backward pass."""
    axis = context.tp
    leaves = [
        boundary.outside(_random(SEQUENCE, BATCH, INPUTS, seed=1)),
        axis.shard(_random(OUTPUTS, INPUTS, seed=2), 0),
    ]
    if has_bias:
        leaves.append(axis.shard(_random(OUTPUTS, seed=3), 0))
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    y = boundary.enter_linear(leaves[0], leaves[1], leaves[2] if has_bias else None)
    cotangent = axis.shard(_random(SEQUENCE, BATCH, OUTPUTS, seed=4), -1)
    return y, leaves, lambda: y.backward(cotangent)


def _compare(context: ParallelContext, sequence_parallel: bool, overlap: bool, has_bias: bool) -> dict[str, float]:
    axis, boundary = context.tp, _boundary(context, sequence_parallel, overlap)
    y, leaves, backward = _product(context, boundary, has_bias)
    backward()
    whole = [_random(SEQUENCE, BATCH, INPUTS, seed=1), _random(OUTPUTS, INPUTS, seed=2)] + (
        [_random(OUTPUTS, seed=3)] if has_bias else []
    )
    whole = [leaf.requires_grad_() for leaf in whole]
    expected = F.linear(*whole)
    expected.backward(_random(SEQUENCE, BATCH, OUTPUTS, seed=4))
    dx = gradient_of(leaves[0])
    found = {
        "y": difference(axis.all_gather(y.detach(), -1), expected.detach()),
        "dx": difference(axis.all_gather(dx, 0) if sequence_parallel else dx, whole[0].grad),
    }
    for name, leaf, reference in zip(("weight", "bias"), leaves[1:], whole[1:], strict=False):
        found[name] = difference(axis.all_gather(gradient_of(leaf), 0), reference.grad)
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_it_equals_torchs_linear(ranks, tp: int, sequence_parallel: bool, overlap: bool) -> None:
    for has_bias in (True, False):
        for differences in ranks(ParallelLayout(tp=tp), _compare, sequence_parallel, overlap, has_bias):
            assert len(differences) == 3 + has_bias
            assert max(differences.values()) < EXACT, differences


def _gradients(context: ParallelContext, sequence_parallel: bool, overlap: bool) -> list[list[float]]:
    _, leaves, backward = _product(context, _boundary(context, sequence_parallel, overlap))
    backward()
    return [gradient_of(leaf).flatten().tolist() for leaf in leaves]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_overlap_changes_no_bit(ranks, sequence_parallel: bool) -> None:
    layout = ParallelLayout(tp=2)
    assert ranks(layout, _gradients, sequence_parallel, True) == ranks(layout, _gradients, sequence_parallel, False)


def _compare_with_bug(context: ParallelContext, bug: str) -> dict[str, float]:
    if bug == "no reduction":
        with mock.patch.object(Axis, "start_all_reduce_", return_value=Pending()):
            return _compare(context, False, True, True)
    if bug == "weight gradient from the slice":
        # The gathered input is another rank's everywhere: the slice, repeated.
        with mock.patch.object(Axis, "start_all_gather", _repeat_the_slice):
            return _compare(context, True, True, True)
    assert bug == "only this rank's gradient"
    with mock.patch.object(Axis, "start_reduce_scatter", _keep_the_slice):
        return _compare(context, True, True, True)


def _repeat_the_slice(axis: Axis, x: torch.Tensor, output: torch.Tensor) -> Pending:
    output.copy_(torch.cat([x] * axis.size))
    return Pending()


def _keep_the_slice(axis: Axis, x: torch.Tensor, output: torch.Tensor) -> Pending:
    output.copy_(axis.shard(x, 0))
    return Pending()


@pytest.mark.parametrize(
    ("bug", "noticed_by"),
    [
        ("no reduction", "dx"),
        ("weight gradient from the slice", "weight"),
        ("only this rank's gradient", "dx"),
    ],
)
def test_the_comparison_notices(ranks, bug: str, noticed_by: str) -> None:
    for differences in ranks(ParallelLayout(tp=2), _compare_with_bug, bug):
        assert differences[noticed_by] > 1e-2


def _frozen(context: ParallelContext, sequence_parallel: bool) -> tuple[list[str], bool]:
    """Collectives of a backward pass that needs neither the weight's gradient nor the bias's; whether they are None."""
    _, leaves, _ = _product(context, _boundary(context, sequence_parallel, True))
    for leaf in leaves[1:]:
        leaf.requires_grad_(False)
    y = _boundary(context, sequence_parallel, True).enter_linear(*leaves)
    with context.recording() as records:
        y.backward(torch.ones_like(y))
    return [record.op for record in records], all(leaf.grad is None for leaf in leaves[1:])


def test_what_needs_no_gradient_is_not_communicated(ranks) -> None:
    assert ranks(ParallelLayout(tp=2), _frozen, False)[0] == (["all_reduce"], True)
    assert ranks(ParallelLayout(tp=2), _frozen, True)[0] == (["reduce_scatter"], True)


class _Watched(TorchDispatchMode):
    """Notes every matrix product by what it computes, after it is done."""

    def __init__(self, axis: Axis, note: Callable[[str], None]) -> None:
        super().__init__()
        self._names = {(SEQUENCE * BATCH, INPUTS): "dx", (OUTPUTS // axis.size, INPUTS): "dW"}
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self._note(self._names[tuple(result.shape)])
        return result


class _Watcher:
    """Notes every collective when it is started, and every wait for one."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def entered(self, collective: Collective) -> None:
        self._note(collective.op)

    def left(self) -> None:
        pass


def _order(context: ParallelContext, sequence_parallel: bool, overlap: bool) -> list[str]:
    _, _, backward = _product(context, _boundary(context, sequence_parallel, overlap))
    events: list[str] = []
    with context.tp.log.watching(_Watcher(events.append)), _Watched(context.tp, events.append):
        backward()
    return events


def test_the_weight_gradient_is_computed_between_start_and_wait(ranks) -> None:
    layout = ParallelLayout(tp=2)
    assert ranks(layout, _order, False, True)[0] == ["dx", "all_reduce", "dW", WAIT]
    assert ranks(layout, _order, True, True)[0] == ["all_gather", "dx", "reduce_scatter", WAIT, "dW", WAIT]
    # The order of before.
    assert ranks(layout, _order, False, False)[0] == ["dx", "dW", "all_reduce"]
    assert ranks(layout, _order, True, False)[0] == ["all_gather", WAIT, "dx", "reduce_scatter", WAIT, "dW"]


def _is_done_while_under_way(
    context: ParallelContext,
    sequence_parallel: bool,
    op: str,
    product: str,
    signal: Path,
    overlap: bool,
    patience: float,
) -> bool:
    """Rank 1 joins `op` only when rank 0 has computed `product`, or after its patience; return whether it has."""
    _, _, backward = _product(context, _boundary(context, sequence_parallel, overlap))
    if context.tp.rank == 0:
        with _Watched(context.tp, lambda name: signal.touch() if name == product else None):
            backward()
        return True
    start, seen = getattr(Axis, op), []

    def start_late(axis: Axis, *tensors: torch.Tensor) -> Pending:
        deadline = time.monotonic() + patience
        while not signal.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(signal.exists())
        return start(axis, *tensors)

    with mock.patch.object(Axis, op, start_late):
        backward()
    return seen[0]


@pytest.mark.parametrize(
    ("sequence_parallel", "op", "product"),
    [
        (False, "start_all_reduce_", "dW"),
        (True, "start_reduce_scatter", "dW"),
        (True, "start_all_gather", "dx"),
    ],
)
def test_a_rank_computes_while_its_collective_waits_for_the_others(
    ranks, tmp_path, sequence_parallel: bool, op: str, product: str
) -> None:
    """A collective that one rank has not entered cannot be complete on the other, which goes on computing."""
    arguments = (sequence_parallel, op, product)
    assert ranks(ParallelLayout(tp=2), _is_done_while_under_way, *arguments, tmp_path / "signal", True, 30.0) == [
        True,
        True,
    ]


def _eagerly_waiting(context: ParallelContext, *arguments: Any) -> bool:
    """The same with the order of before: each collective is waited for where it starts."""
    start = Axis.start_all_reduce_

    def start_and_wait(axis: Axis, x: torch.Tensor) -> Pending:
        start(axis, x).wait()
        return Pending()

    with mock.patch.object(Axis, "start_all_reduce_", start_and_wait):
        return _is_done_while_under_way(context, *arguments)


def test_without_overlap_the_rank_would_stand_still(ranks, tmp_path) -> None:
    layout = ParallelLayout(tp=2)
    for op, product in (("start_reduce_scatter", "dW"), ("start_all_gather", "dx")):
        arguments = (True, op, product, tmp_path / op, False, 0.5)
        assert ranks(layout, _is_done_while_under_way, *arguments) == [True, False]
    arguments = (False, "start_all_reduce_", "dW", tmp_path / "all_reduce", True, 0.5)
    assert ranks(layout, _eagerly_waiting, *arguments) == [True, False]
