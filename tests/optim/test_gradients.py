"""The flat gradients: what they hold, their norm over the whole model, and clipping by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from megascale.config.layout import ParallelLayout
from megascale.optim.build import ModelOptimizer
from megascale.optim.flat import FlatLayout, Shard
from megascale.optim.gradients import GradientBuffer, GradientNorm
from megascale.optim.reduction import BucketSum, GradientReducer
from megascale.parallel.context import Axis, ParallelContext, single_process
from megascale.parallel.sharding import Constant, ParallelModule, ParameterSpec, declared_parameters, initialise
from tests.full import full_gradients, gradient_of
from tests.model.tiny import tiny_batch, tiny_gpt
from tests.optim.toy import Toy, random_gradients, set_gradients, toy_config

GRADIENTS = random_gradients(seed=1, scale=3.0)
SERIAL_NORM = torch.cat([gradient.flatten() for gradient in GRADIENTS.values()]).norm().item()


def _buffer(model: nn.Module, dtype: torch.dtype) -> GradientBuffer:
    return GradientBuffer(FlatLayout(declared_parameters(model)), dtype)


def _norm_of(gradients: GradientBuffer, tp: Axis) -> float:
    everything = Shard(gradients.layout, [slice(0, gradients.layout.size)])
    return GradientNorm(everything, lambda d: d.is_split or tp.rank == 0, [tp])(gradients.flat)


def _norm(context: ParallelContext, bug: str | None) -> float:
    model = Toy(context.tp, torch.float64)
    gradients = _buffer(model, torch.float64)
    set_gradients(model, GRADIENTS)
    if bug == "replicated counted on every rank":
        return _norm_of(gradients, replace(context.tp, rank=0))
    if bug == "not summed over ranks":
        return _norm_of(gradients, single_process().tp)
    return _norm_of(gradients, context.tp)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_norm_is_the_whole_models(ranks, tp: int) -> None:
    assert ranks(ParallelLayout(tp=tp), _norm, None) == pytest.approx([SERIAL_NORM] * tp, rel=1e-14)


@pytest.mark.parametrize("bug", ["replicated counted on every rank", "not summed over ranks"])
def test_a_wrong_count_is_noticed(ranks, bug: str) -> None:
    assert all(abs(norm / SERIAL_NORM - 1) > 0.05 for norm in ranks(ParallelLayout(tp=2), _norm, bug))


def _norm_of_a_gpt(context: ParallelContext) -> tuple[float, float]:
    model = tiny_gpt(context)
    gradients = _buffer(model, torch.float64)
    model(*tiny_batch()).backward()
    serial = torch.cat([gradient.flatten() for gradient in full_gradients(model).values()]).norm().item()
    return _norm_of(gradients, context.tp), serial


def test_the_norm_of_a_gpts_own_gradients(ranks) -> None:
    for norm, serial in ranks(ParallelLayout(tp=4), _norm_of_a_gpt):
        assert norm == pytest.approx(serial, rel=1e-12)


def test_the_norm_of_many_float32_gradients_is_exact() -> None:
    """Torch's own float32 norm stalls: of four million terms on a CPU it is nearly 1e-4 off."""
    model = ParallelModule(single_process().tp)
    model.declare("many", ParameterSpec((1 << 22,), None, Constant(0.0), False), torch.float32, torch.device("cpu"))
    gradients = _buffer(model, torch.float32)
    gradients.flat.copy_(torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)))
    exact = gradients.flat.double().norm().item()
    assert _norm_of(gradients, single_process().tp) == pytest.approx(exact, rel=1e-7)


def _norm_with_an_overflow(context: ParallelContext, where: str, rank: int, value: float) -> float:
    model = Toy(context.tp)
    gradients = _buffer(model, torch.float32)
    if context.tp.rank == rank:
        gradient_of(model.get_parameter(where))[0] = value
    return _norm_of(gradients, context.tp)


@pytest.mark.parametrize("where", ["rows", "norm"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_on_one_rank_is_seen_on_all(ranks, where: str, rank: int) -> None:
    """Also in a replicated parameter, which only rank 0 counts."""
    for value in (float("inf"), float("nan")):
        norms = ranks(ParallelLayout(tp=2), _norm_with_an_overflow, where, rank, value)
        assert not any(torch.isfinite(torch.tensor(norms)))


def _clipped(context: ParallelContext, clip_grad: float) -> tuple[float, dict[str, list[float]]]:
    """Return the reported norm and the full gradients after one step."""
    model = Toy(context.tp, torch.float64)
    initialise(model, 1)
    optimizer = ModelOptimizer(model, toy_config(clip_grad=clip_grad), context.tp, context.dp)
    set_gradients(model, GRADIENTS)
    norm = optimizer.step(1.0).grad_norm
    return norm, {name: gradient.flatten().tolist() for name, gradient in full_gradients(model).items()}


@pytest.mark.parametrize("clip_grad", [1.0, 1e6, 0.0])
def test_clipping_is_torchs_on_the_whole_model(ranks, clip_grad: float) -> None:
    reference = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in GRADIENTS.values()]
    for parameter, gradient in zip(reference, GRADIENTS.values(), strict=True):
        parameter.grad = gradient.clone()
    expected_norm = torch.nn.utils.clip_grad_norm_(reference, clip_grad or float("inf"))
    for norm, gradients in ranks(ParallelLayout(tp=2), _clipped, clip_grad):
        assert norm == pytest.approx(expected_norm.item(), rel=1e-12), "before clipping"
        for parameter, name in zip(reference, GRADIENTS, strict=True):
            assert gradients[name] == pytest.approx(gradient_of(parameter).flatten().tolist(), rel=1e-12)


def test_parameters_lie_in_reverse_order_and_all_are_aligned() -> None:
    model = Toy(single_process().tp)
    buffer = _buffer(model, torch.float32)
    assert [d.name for d in buffer.declared] == ["bias", "positions", "rows", "norm"]
    base = buffer.flat.data_ptr()
    assert all((view.data_ptr() - base) % 256 == 0 for view in buffer.views)
    for view in buffer.views:
        view.fill_(1.0)
    assert buffer.flat.sum() == 8 * 6 + 4 + 5 + 7 * 3


def test_autograd_accumulates_into_the_buffer() -> None:
    model = Toy(single_process().tp)
    buffer = _buffer(model, torch.float32)
    for _ in range(2):
        torch.stack([parameter.sum() for parameter in model.parameters()]).sum().backward()
    assert buffer.flat.sum() == 2 * (8 * 6 + 4 + 5 + 7 * 3)
    buffer.zero_()
    assert not gradient_of(model.get_parameter("rows")).any()


def _reducer(buffer: GradientBuffer, context: ParallelContext) -> GradientReducer:
    return GradientReducer(buffer, [slice(0, buffer.layout.size)], BucketSum(context.dp, False, buffer.flat.dtype))


def test_a_replaced_gradient_is_refused() -> None:
    model = Toy(single_process().tp)
    buffer = _buffer(model, torch.float32)
    model.zero_grad(set_to_none=True)
    with pytest.raises(AssertionError, match="was replaced"):
        _reducer(buffer, single_process()).finish()


def _data_parallel_sum(context: ParallelContext) -> tuple[list[tuple[str, str]], float]:
    model = Toy(context.tp)
    buffer = _buffer(model, torch.float32)
    for _ in range(3):
        (model.get_parameter("rows").sum() * (1.0 + context.dp.rank)).backward()
    with context.recording() as records:
        _reducer(buffer, context).finish()
    return [(record.op, record.axis) for record in records], gradient_of(model.get_parameter("rows"))[0, 0].item()


def test_one_data_parallel_collective_per_update(ranks) -> None:
    assert ranks(ParallelLayout(tp=1, dp=2), _data_parallel_sum) == [([("all_reduce", "dp")], 9.0)] * 2
    assert _data_parallel_sum(single_process()) == ([], 3.0)
