"""The sum of gradients over data-parallel ranks, in buckets that can leave while the backward pass still runs.

Ott et al. 2018, section 3.3: "we overlap the communication and backward pass": a bucket is sent as soon as its
gradients are there. The buckets are equal stretches of the flat buffer, cut without regard to where parameters end, and
leave in the order of the buffer on every rank, whatever the order in which gradients come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from megascale.optim.gradients import GradientBuffer
from megascale.parallel.context import Axis


class Waitable(Protocol):
    """Something under way."""

    def wait(self) -> None:
        """Block until it is done."""


@dataclass(frozen=True)
class BucketSum:
    """How one bucket is summed over the data-parallel ranks, in place.

    Attributes:
        dp: The axis to sum over.
        scatter: Whether each rank needs the sum of its own equal slice only (half the bytes); the other slices are
            then left undefined.
        dtype: What the ranks send each other.
    """

    dp: Axis
    scatter: bool
    dtype: torch.dtype

    def own(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return the part of a bucket that holds the sum afterwards."""
        return self.dp.shard(bucket, 0) if self.scatter else bucket

    def start(self, bucket: torch.Tensor) -> Waitable:
        """Start summing a bucket."""
        if bucket.dtype == self.dtype or self.dp.size == 1:
            return self._start(bucket)
        sent = bucket.to(self.dtype)
        return _Converted(self._start(sent), self.own(sent), self.own(bucket))

    def _start(self, bucket: torch.Tensor) -> Waitable:
        if self.scatter and self.dp.size > 1:
            return self.dp.start_reduce_scatter(bucket, self.own(bucket))
        return self.dp.start_all_reduce_(bucket)


@dataclass(frozen=True, eq=False)
class _Converted:
    """A sum that runs in another dtype and is turned back when it is done."""

    pending: Waitable
    summed: torch.Tensor
    target: torch.Tensor

    def wait(self) -> None:
        self.pending.wait()
        self.target.copy_(self.summed)


class GradientReducer:
    """Sums the gradients over data-parallel ranks when all are there.

    Args:
        gradients: The buffer.
        buckets: Its stretches, in order: one collective each.
        bucket_sum: What happens to a bucket.
    """

    def __init__(self, gradients: GradientBuffer, buckets: Sequence[slice], bucket_sum: BucketSum) -> None:
        self._gradients = gradients
        self._buckets, self._sum = list(buckets), bucket_sum
        self._started: list[Waitable] = []

    def expect_last_backward(self) -> None:
        """Take note that the gradients are final as the next backward pass leaves them."""

    def finish(self) -> None:
        """Start the buckets that have not left yet and wait for all."""
        self._gradients.require_in_place()
        while len(self._started) < len(self._buckets):
            self._start_next()
        self.settle()

    def settle(self) -> None:
        """Wait for what is under way and forget it."""
        for pending in self._started:
            pending.wait()
        self._started = []

    def _start_next(self) -> None:
        self._started.append(self._sum.start(self._gradients.flat[self._buckets[len(self._started)]]))


class OverlappedReducer(GradientReducer):
    """Sends each bucket while the last backward pass of the update runs, as soon as all its gradients are final.

    Buckets with gradients that take another sum first (partial ones) wait for `finish`.
    """

    def __init__(self, gradients: GradientBuffer, buckets: Sequence[slice], bucket_sum: BucketSum) -> None:
        super().__init__(gradients, buckets, bucket_sum)
        layout = gradients.layout
        inside = [layout.inside(bucket) for bucket in self._buckets]
        # One more than can come, for a bucket that must wait.
        self._num_expected = [
            len(members) + (bucket.stop > layout.late_start)
            for bucket, members in zip(self._buckets, inside, strict=True)
        ]
        self._buckets_of: list[list[int]] = [[] for _ in layout.declared]
        for bucket, members in enumerate(inside):
            for index in members:
                self._buckets_of[index].append(bucket)
        self._expecting = False
        self._missing: list[int] = []
        self._final: set[int] = set()
        # Registered after those of a WideGradientBuffer: they run in this order, and the sum comes first.
        for index, d in enumerate(layout.declared):
            d.parameter.register_post_accumulate_grad_hook(partial(self._gradient_came, index))

    def expect_last_backward(self) -> None:
        self._expecting = True
        self._missing = list(self._num_expected)
        self._final = set()

    def settle(self) -> None:
        super().settle()
        self._expecting = False

    def _gradient_came(self, index: int, parameter: torch.Tensor) -> None:
        if not self._expecting:
            return
        name = self._gradients.declared[index].name
        assert index not in self._final, (
            f"{name} got a second gradient in the last backward pass: its bucket may be gone"
        )
        self._final.add(index)
        for bucket in self._buckets_of[index]:
            self._missing[bucket] -= 1
        while len(self._started) < len(self._buckets) and self._missing[len(self._started)] == 0:
            self._start_next()
