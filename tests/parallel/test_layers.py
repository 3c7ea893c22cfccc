"""The tensor-parallel layers against torch's own on the full weights, in float64, forward and backward.

Each comparison is repeated with one planted mistake, which it must notice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megascale.config.layout import ParallelLayout
from megascale.parallel import boundary
from megascale.parallel.collectives import gather_from_ranks, reduce_from_ranks
from megascale.parallel.context import ParallelContext, single_process
from megascale.parallel.layers import (
    ColumnParallelLinear,
    LayerNorm,
    PositionEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tests.full import difference, full_gradients, gradient_of, load_full

EXACT = 1e-12
DOUBLE = (torch.float64, torch.device("cpu"))


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _column(context: ParallelContext) -> dict[str, float]:
    reference = nn.Linear(12, 8, dtype=torch.float64)
    layer = ColumnParallelLinear(12, 8, context.tp, 0.02, *DOUBLE)
    return _compare_linear(context, layer, reference, splits_input=False)


def _row(context: ParallelContext) -> dict[str, float]:
    reference = nn.Linear(12, 8, dtype=torch.float64)
    layer = RowParallelLinear(12, 8, context.tp, 0.02, *DOUBLE)
    return _compare_linear(context, layer, reference, splits_input=True)


def _compare_linear(
    context: ParallelContext, layer: nn.Module, reference: nn.Linear, splits_input: bool
) -> dict[str, float]:
    """Compare y, dx, dW and dc; a slice of x goes in and the whole y comes out, or the other way round."""
    axis = context.tp
    weights = {"weight": _random(8, 12, seed=1), "bias": _random(8, seed=2)}
    load_full(layer, weights)
    reference.load_state_dict(weights)
    x, cotangent = _random(3, 2, 12, seed=3), _random(3, 2, 8, seed=4)
    expected_x = x.clone().requires_grad_()
    expected = reference(expected_x)
    expected.backward(cotangent)
    given = (axis.shard(x, -1) if splits_input else x).clone().requires_grad_()
    y = layer(given)
    y.backward(cotangent if splits_input else axis.shard(cotangent, -1))
    gradients = full_gradients(layer)
    full_y = y.detach() if splits_input else axis.all_gather(y.detach(), -1)
    full_dx = axis.all_gather(gradient_of(given), -1) if splits_input else given.grad
    return {
        "y": difference(full_y, expected.detach()),
        "dx": difference(full_dx, expected_x.grad),
        "weight": difference(gradients["weight"], reference.weight.grad),
        "bias": difference(gradients["bias"], reference.bias.grad),
    }


def _embedding(context: ParallelContext) -> dict[str, float]:
    table, tokens = _random(16, 6, seed=5), torch.tensor([[0, 3, 4, 15], [7, 8, 3, 3]])
    cotangent = _random(2, 4, 6, seed=6)
    layer = VocabParallelEmbedding(16, 6, context.tp, 0.02, *DOUBLE)
    load_full(layer, {"weight": table})
    layer(tokens).backward(cotangent)
    expected_table = table.clone().requires_grad_()
    expected = F.embedding(tokens, expected_table)
    expected.backward(cotangent)
    return {
        "y": difference(layer(tokens).detach(), expected.detach()),
        "weight": difference(full_gradients(layer)["weight"], expected_table.grad),
    }


def _row_with_the_bias_on_every_rank(self: RowParallelLinear, x: torch.Tensor) -> torch.Tensor:
    return reduce_from_ranks(F.linear(x, self.weight, self.bias), self.axis)


def _embedding_without_the_mask(self: VocabParallelEmbedding, tokens: torch.Tensor) -> torch.Tensor:
    row = (tokens - self.first_row).clamp(0, self.weight.shape[0] - 1)
    return reduce_from_ranks(F.embedding(row, self.weight), self.axis)


def _identity(x: torch.Tensor, axis: object) -> torch.Tensor:
    return x


# name -> what is replaced, and by what
BUGS: dict[str, tuple[object, str, Callable]] = {
    "no f": (boundary, "copy_to_ranks", _identity),
    "no g": (boundary, "reduce_from_ranks", _identity),
    "bias on every rank": (RowParallelLinear, "forward", _row_with_the_bias_on_every_rank),
    "no mask": (VocabParallelEmbedding, "forward", _embedding_without_the_mask),
}


def _all_layers(context: ParallelContext, bug: str | None) -> dict[str, dict[str, float]]:
    with mock.patch.object(*BUGS[bug]) if bug else nullcontext():
        return {"column": _column(context), "row": _row(context), "embedding": _embedding(context)}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layers_equal_the_unsharded_ones(ranks, tp: int) -> None:
    for by_layer in ranks(ParallelLayout(tp=tp), _all_layers, None):
        for layer, differences in by_layer.items():
            assert max(differences.values()) < EXACT, f"{layer}: {differences}"


@pytest.mark.parametrize(
    ("bug", "layer", "wrong"),
    [
        ("no f", "column", {"dx"}),
        ("no g", "row", {"y"}),
        ("no g", "embedding", {"y"}),
        ("bias on every rank", "row", {"y"}),
        ("no mask", "embedding", {"y", "weight"}),
    ],
)
def test_the_comparison_notices(ranks, bug: str, layer: str, wrong: set[str]) -> None:
    differences = ranks(ParallelLayout(tp=2), _all_layers, bug)[0][layer]
    assert {name for name, value in differences.items() if value > EXACT} == wrong
    assert min(differences[name] for name in wrong) > 1e-2


class _ParallelMLP(nn.Module):
    """Column, tanh, row: replicated in and out, so that what all ranks perturb alike is one perturbation."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(4, 8, context.tp, 0.02, *DOUBLE)
        self.down = RowParallelLinear(8, 4, context.tp, 0.02, *DOUBLE)
        weights = {"up.weight": _random(8, 4, seed=1), "up.bias": _random(8, seed=2)}
        load_full(self, weights | {"down.weight": _random(4, 8, seed=3), "down.bias": _random(4, seed=4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def _check_gradients_numerically(context: ParallelContext, bug: str | None) -> bool:
    with mock.patch.object(*BUGS[bug]) if bug else nullcontext():
        x = _random(2, 1, 4, seed=7).requires_grad_()
        return torch.autograd.gradcheck(_ParallelMLP(context), (x,), raise_exception=False)


def test_finite_differences_agree_through_a_parallel_region(ranks) -> None:
    assert ranks(ParallelLayout(tp=2), _check_gradients_numerically, None) == [True, True]
    assert ranks(ParallelLayout(tp=2), _check_gradients_numerically, "no f") == [False, False]


def _communication(context: ParallelContext) -> list[list[tuple[str, str, tuple[int, ...]]]]:
    """Record the collectives of one forward and backward pass through each layer."""
    axis = context.tp
    x, tokens = _random(3, 2, 12, seed=1), torch.tensor([[0, 3], [1, 2]])
    cases = [
        (ColumnParallelLinear(12, 8, axis, 0.02, *DOUBLE), x),
        (RowParallelLinear(12, 8, axis, 0.02, *DOUBLE), axis.shard(x, -1)),
        (VocabParallelEmbedding(8, 6, axis, 0.02, *DOUBLE), tokens),
        (LayerNorm(12, axis, 1e-5, *DOUBLE), x),
    ]
    found = []
    for layer, given in cases:
        with context.recording() as records:
            y = layer(given.clone().requires_grad_() if given.is_floating_point() else given)
            y.backward(torch.ones_like(y))
        found.append([(r.op, r.axis, r.shape) for r in records])
    return found


def test_each_layer_communicates_what_its_table_says(ranks) -> None:
    expected = [
        [("all_reduce", "tp", (3, 2, 12))],
        [("all_reduce", "tp", (3, 2, 8))],
        [("all_reduce", "tp", (2, 2, 6))],
        [],
    ]
    assert ranks(ParallelLayout(tp=2), _communication) == [expected, expected]
    assert ranks(ParallelLayout(tp=1), _communication) == [[[], [], [], []]]


def _refuse(context: ParallelContext) -> list[str]:
    messages = []
    for build in (
        lambda: ColumnParallelLinear(4, 7, context.tp, 0.02, *DOUBLE),
        lambda: RowParallelLinear(7, 4, context.tp, 0.02, *DOUBLE),
        lambda: VocabParallelEmbedding(7, 4, context.tp, 0.02, *DOUBLE),
    ):
        with pytest.raises(ValueError, match="does not divide") as caught:
            build()
        messages.append(str(caught.value))
    return messages


def test_sizes_that_do_not_divide_are_refused_with_the_shape(ranks) -> None:
    assert all("7" in message and "2 ranks" in message for message in ranks(ParallelLayout(tp=2), _refuse)[0])


def test_replicated_layers_are_torchs_own() -> None:
    axis = single_process().tp
    norm, positions = LayerNorm(6, axis, 1e-3, *DOUBLE), PositionEmbedding(5, 6, axis, 0.02, *DOUBLE)
    load_full(norm, {"weight": _random(6, seed=1), "bias": _random(6, seed=2)})
    load_full(positions, {"weight": _random(5, 6, seed=3)})
    reference = nn.LayerNorm(6, eps=1e-3, dtype=torch.float64)
    reference.load_state_dict({"weight": norm.weight.detach(), "bias": norm.bias.detach()})
    x = _random(3, 2, 6, seed=4)
    assert torch.equal(norm(x), reference(x))
    assert torch.equal(positions(3), F.embedding(torch.arange(3), positions.weight).unsqueeze(1))


def test_gathering_a_column_layer_into_plain_torch_keeps_the_gradient(ranks) -> None:
    for value in ranks(ParallelLayout(tp=2), _gathered_column):
        assert value < EXACT


def _gathered_column(context: ParallelContext) -> float:
    """Column, gather, then something that every rank computes alike."""
    layer = ColumnParallelLinear(4, 8, context.tp, 0.02, *DOUBLE)
    weight, bias = _random(8, 4, seed=1), _random(8, seed=2)
    load_full(layer, {"weight": weight, "bias": bias})
    x, expected_x = (_random(3, 4, seed=3).requires_grad_() for _ in range(2))
    gather_from_ranks(layer(x), context.tp).square().sum().backward()
    F.linear(expected_x, weight, bias).square().sum().backward()
    return difference(x.grad, expected_x.grad)
