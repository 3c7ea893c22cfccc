"""Buckets of gradients: the sum over data-parallel ranks, when it starts, and in which type it travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale.config.layout import ParallelLayout
from megascale.optim.flat import FlatLayout
from megascale.optim.gradients import GradientBuffer
from megascale.optim.reduction import BucketSum, GradientReducer, OverlappedReducer
from megascale.parallel.context import ParallelContext, single_process
from megascale.parallel.sharding import declared_parameters
from tests.model.tiny import tiny_batch, tiny_gpt


def _summed(context: ParallelContext, kind: str, scatter: bool) -> torch.Tensor:
    """The ranks' own gradients of a GPT, summed in buckets; of a scattered sum this rank's parts, else 0."""
    model = tiny_gpt(context, torch.float32)
    layout = FlatLayout(declared_parameters(model), context.dp.size)
    gradients = GradientBuffer(layout, torch.float32)
    bucket_sum = BucketSum(context.dp, scatter, torch.float32)
    buckets = layout.cut(1000)
    reducer = {"overlapped": OverlappedReducer, "after": GradientReducer}[kind](gradients, buckets, bucket_sum)
    tokens, targets, weights = tiny_batch(seed=context.dp.rank)
    for last in (False, True):
        if last:
            reducer.expect_last_backward()
        model(tokens, targets, weights).backward()
    started = len(reducer._started)
    assert started == (len(buckets) if kind == "overlapped" else 0)
    reducer.finish()
    if not scatter:
        return gradients.flat.clone()
    own = torch.zeros_like(gradients.flat)
    for bucket in buckets:
        bucket_sum.own(own[bucket]).copy_(bucket_sum.own(gradients.flat[bucket]))
    return own


@pytest.mark.parametrize("dp", [2, 4])
def test_overlapped_and_scattered_sums_are_the_same_bits(ranks, dp: int) -> None:
    """In equal buckets: with four ranks the order of addition depends on the place in the bucket."""
    layout = ParallelLayout(dp=dp)
    after = ranks(layout, _summed, "after", False)
    overlapped = ranks(layout, _summed, "overlapped", False)
    scattered = ranks(layout, _summed, "overlapped", True)
    assert after[0].abs().sum() > 0
    for rank in range(dp):
        assert torch.equal(overlapped[rank], after[0])
    torch.testing.assert_close(sum(scattered), after[0], rtol=1e-6, atol=1e-6)
    if dp == 2:
        assert torch.equal(sum(scattered), after[0])


def test_a_second_gradient_in_the_last_pass_is_refused() -> None:
    context = single_process()
    model = tiny_gpt(context)
    layout = FlatLayout(declared_parameters(model))
    gradients = GradientBuffer(layout, torch.float64)
    reducer = OverlappedReducer(gradients, layout.cut(1000), BucketSum(context.dp, False, torch.float64))
    reducer.expect_last_backward()
    model(*tiny_batch()).backward()
    with pytest.raises(AssertionError, match="a second gradient in the last backward pass"):
        model(*tiny_batch()).backward()
    reducer.finish()


def _parameters_without_gradients(context: ParallelContext) -> int:
    """Only some parameters take part in the last backward pass, other ones on each rank."""
    model = tiny_gpt(context)
    layout = FlatLayout(declared_parameters(model))
    gradients = GradientBuffer(layout, torch.float64)
    reducer = OverlappedReducer(gradients, layout.cut(100), BucketSum(context.dp, False, torch.float64))
    reducer.expect_last_backward()
    names = ["final_norm.bias", "position_embedding.weight"]
    model.get_parameter(names[context.dp.rank]).sum().backward()
    early = len(reducer._started)
    reducer.finish()
    assert all(
        bool((view == 1).all()) == (d.name in names) for d, view in zip(layout.declared, gradients.views, strict=True)
    )
    return early


def test_buckets_leave_in_one_order_whatever_gradients_come(ranks) -> None:
    """A bucket whose gradients did not come leaves at the end, and so do all after it: the sums still match up."""
    assert ranks(ParallelLayout(dp=2), _parameters_without_gradients) == [1, 0]


def _sum_through(context: ParallelContext, dtype: torch.dtype, scatter: bool) -> list[Any]:
    """1 + 2^-12 on one rank and 1 on the other, with a float32 buffer; what was sent, and this rank's sum."""
    bucket = torch.full((128,), 1.0 + context.dp.rank * 2.0**-12)
    bucket_sum = BucketSum(context.dp, scatter, dtype)
    with context.recording() as records:
        bucket_sum.start(bucket).wait()
    return [records[0].op, records[0].dtype, records[0].num_elements, bucket_sum.own(bucket).unique().tolist()]


@pytest.mark.parametrize(("scatter", "op"), [(False, "all_reduce"), (True, "reduce_scatter")])
def test_the_type_that_gradients_travel_in(ranks, scatter: bool, op: str) -> None:
    for dtype, total in ((torch.float32, 2.0 + 2.0**-12), (torch.bfloat16, 2.0), (torch.float16, 2.0)):
        for result in ranks(ParallelLayout(dp=2), _sum_through, dtype, scatter):
            assert result == [op, dtype, 128, [total]]


def _late_bucket(context: ParallelContext) -> None:
    model = tiny_gpt(context, sequence_parallel=True)
    layout = FlatLayout(declared_parameters(model))
    assert 0 < layout.late_start == layout.partial.start < layout.size
    gradients = GradientBuffer(layout, torch.float64)
    buckets = layout.cut(100)
    reducer = OverlappedReducer(gradients, buckets, BucketSum(context.dp, False, torch.float64))
    reducer.expect_last_backward()
    model(*tiny_batch()).backward()
    assert len(reducer._started) == sum(bucket.stop <= layout.late_start for bucket in buckets) < len(buckets)
    reducer.finish()


def test_buckets_with_partial_gradients_wait_for_their_sum(ranks) -> None:
    ranks(ParallelLayout(tp=2), _late_bucket)
