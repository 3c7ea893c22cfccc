"""The conjugate ops are linear maps: forward as promised, and backward its transpose."""

from __future__ import annotations

import pytest
import torch

from megascale.config.layout import ParallelLayout
from megascale.parallel.collectives import (
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    reduce_from_ranks,
    reduce_scatter_sequence,
    scatter_to_ranks,
)
from megascale.parallel.context import ParallelContext, single_process
from tests.full import gradient_of

OPS = {
    "copy": copy_to_ranks,
    "reduce": reduce_from_ranks,
    "scatter": scatter_to_ranks,
    "gather": gather_from_ranks,
    "gather sequence": gather_sequence,
    "reduce-scatter sequence": reduce_scatter_sequence,
}
# Which side of an op is replicated (counted once in the inner product) and which is per rank (summed over ranks).
REPLICATED_INPUT = {"copy", "scatter"}
REPLICATED_OUTPUT = {"reduce", "gather"}


def _forward_and_transpose(context: ParallelContext, name: str) -> tuple[float, float]:
    """Return <A x, y> and <x, A^T y> for random x, y; A^T by autograd."""
    axis = context.tp

    def draw(replicated: bool, shape: torch.Size) -> torch.Tensor:
        seed = 1 if replicated else 10 + axis.rank
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    x = draw(name in REPLICATED_INPUT, torch.Size((4, 8))).requires_grad_()
    y = OPS[name](x, axis)
    cotangent = draw(name in REPLICATED_OUTPUT, y.shape)
    y.backward(cotangent)
    left, right = (y * cotangent).sum().detach(), (gradient_of(x) * x).sum().detach()
    if name not in REPLICATED_OUTPUT:
        left = axis.all_reduce(left)
    if name not in REPLICATED_INPUT:
        right = axis.all_reduce(right)
    return left.item(), right.item()


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("tp", [2, 4])
def test_backward_is_the_transpose_of_forward(ranks, name: str, tp: int) -> None:
    for left, right in ranks(ParallelLayout(tp=tp), _forward_and_transpose, name):
        assert left == pytest.approx(right, rel=1e-12)
        assert abs(left) > 1e-3


def _values(context: ParallelContext) -> dict[str, torch.Tensor]:
    axis = context.tp
    mine = torch.arange(4.0, dtype=torch.float64) + 10 * axis.rank
    shared = torch.arange(8.0, dtype=torch.float64)
    before = mine.clone()
    result = {
        "reduce": reduce_from_ranks(mine, axis),
        "gather": gather_from_ranks(mine, axis),
        "scatter": scatter_to_ranks(shared, axis),
        "gather sequence": gather_sequence(mine, axis),
        "reduce-scatter sequence": reduce_scatter_sequence(mine, axis),
    }
    assert torch.equal(mine, before), "the ops are out of place"
    return result


def test_forward_values(ranks) -> None:
    first, second = ranks(ParallelLayout(tp=2), _values)
    assert first["reduce"].tolist() == second["reduce"].tolist() == [10.0, 12.0, 14.0, 16.0]
    assert first["gather"].tolist() == second["gather"].tolist() == [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
    assert first["scatter"].tolist() + second["scatter"].tolist() == list(range(8))
    assert torch.equal(first["gather sequence"], first["gather"])
    assert first["reduce-scatter sequence"].tolist() == [10.0, 12.0]
    assert second["reduce-scatter sequence"].tolist() == [14.0, 16.0]


class _InPlaceReduce(torch.autograd.Function):
    """g as picotron and Megatron-LM write it: the all-reduce changes its input, unmarked."""

    @staticmethod
    def forward(ctx, x, axis):
        axis.all_reduce_(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _gradient_after_a_saving_producer(context: ParallelContext, in_place: bool) -> float:
    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    produced = torch.exp(x)  # saves its output for the backward pass
    reduced = _InPlaceReduce.apply(produced, context.tp) if in_place else reduce_from_ranks(produced, context.tp)
    reduced.backward()
    return gradient_of(x).item()


def test_an_in_place_all_reduce_would_double_gradients(ranks) -> None:
    correct = torch.tensor(0.5, dtype=torch.float64).exp().item()
    ours = ranks(ParallelLayout(tp=2), _gradient_after_a_saving_producer, False)
    broken = ranks(ParallelLayout(tp=2), _gradient_after_a_saving_producer, True)
    assert ours == pytest.approx([correct, correct])
    assert broken == pytest.approx([2 * correct, 2 * correct])


def test_one_process_needs_no_torch_distributed() -> None:
    axis = single_process().tp
    x = torch.randn(2, 4)
    for op in OPS.values():
        assert op(x, axis) is x
    assert axis.sum_floats([1.5]) == [1.5]
    assert not torch.distributed.is_initialized()


def _scatter_unevenly(context: ParallelContext) -> str:
    with pytest.raises(ValueError, match="does not divide") as caught:
        scatter_to_ranks(torch.zeros(2, 7), context.tp)
    with pytest.raises(ValueError, match="dim 0 of size 3 does not divide over the 2 ranks"):
        reduce_scatter_sequence(torch.zeros(3, 2), context.tp)
    return str(caught.value)


def test_a_dim_that_does_not_divide_is_refused_with_both_numbers(ranks) -> None:
    assert "size 7" in ranks(ParallelLayout(tp=2), _scatter_unevenly)[0]


def _axes(context: ParallelContext) -> tuple[int, int, int, list[float], list[float]]:
    rank = float(context.rank)
    return context.rank, context.dp.rank, context.tp.rank, context.tp.sum_floats([rank]), context.dp.sum_floats([rank])


def test_consecutive_ranks_share_a_model(ranks) -> None:
    assert ranks(ParallelLayout(tp=2, dp=2), _axes) == [
        (0, 0, 0, [1.0], [2.0]),
        (1, 0, 1, [1.0], [4.0]),
        (2, 1, 0, [5.0], [2.0]),
        (3, 1, 1, [5.0], [4.0]),
    ]
