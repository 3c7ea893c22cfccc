"""ZeRO-1 (Rajbhandari et al. 2020, section 5.1): data-parallel ranks share the optimizer's work and state.

With d ranks and Psi parameters, per update and rank:

    reduce-scatter    the sum of the gradients, each rank its 1/d of every bucket       (d-1)/d Psi elements
    update            that 1/d: masters and moments exist there only
    all-gather        the new parameters                                                (d-1)/d Psi elements

which is what an all-reduce moves. All ranks then hold equal parameters, as without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from megascale.optim.flat import FlatLayout
from megascale.optim.weights import FlatParameters
from megascale.parallel.context import Axis, Pending


def own_stretches(buckets: Sequence[slice], dp: Axis) -> list[slice]:
    """Return this rank's equal share of each bucket."""
    found = []
    for bucket in buckets:
        share, left = divmod(bucket.stop - bucket.start, dp.size)
        assert left == 0, f"a bucket of {bucket.stop - bucket.start} elements for {dp.size} ranks"
        found.append(slice(bucket.start + dp.rank * share, bucket.start + (dp.rank + 1) * share))
    return found


class ParameterGathering:
    """Gives every data-parallel rank the parameters that the others updated.

    Args:
        parameters: The flat buffer.
        buckets: Its stretches, one collective each; none: there is nothing to gather.
        dp: The axis.
    """

    def __init__(self, parameters: FlatParameters | None, buckets: Sequence[slice], dp: Axis) -> None:
        self._dp = dp
        self._buckets = [parameters.flat[bucket] for bucket in buckets] if parameters is not None else []

    def gather(self) -> None:
        """Send this rank's parameters. On return all are there, or are waited for where they are used."""
        for bucket in self._buckets:
            self._start(bucket).wait()

    def finish(self) -> None:
        """Wait until all parameters are there."""

    def _start(self, bucket: torch.Tensor) -> Pending:
        return self._dp.start_all_gather(self._dp.shard(bucket, 0), bucket)


class OverlappedGathering(ParameterGathering):
    """Gathers while the next forward pass already runs: a block waits for its own parameters only.

    The members of a `nn.ModuleList` (the blocks of a transformer) are taken to use parameters of their own and such as
    belong to no member; these others are waited for before anything of the model runs.
    """

    def __init__(
        self, parameters: FlatParameters, buckets: Sequence[slice], dp: Axis, layout: FlatLayout, model: nn.Module
    ) -> None:
        super().__init__(parameters, buckets, dp)
        members = _innermost_members(model)
        owner = {id(p): number for number, member in enumerate(members, start=1) for p in member.parameters()}
        # Group 0 holds what belongs to no member.
        self._groups: list[list[int]] = [[] for _ in range(len(members) + 1)]
        for index, bucket in enumerate(buckets):
            for group in {owner.get(id(layout.declared[i].parameter), 0) for i in layout.inside(bucket)}:
                self._groups[group].append(index)
        # In the order of use: what is outside of the blocks, then block after block.
        self._order = list(dict.fromkeys(index for group in self._groups for index in group))
        self._pending: dict[int, Pending] = {}
        for number, member in enumerate(members, start=1):
            member.register_forward_pre_hook(partial(self._wait_for, (0, number)))
        for module in (model, *model.children()):
            module.register_forward_pre_hook(partial(self._wait_for, (0,)))

    def gather(self) -> None:
        self.finish()
        for index in self._order:
            self._pending[index] = self._start(self._buckets[index])

    def finish(self) -> None:
        for pending in self._pending.values():
            pending.wait()
        self._pending = {}

    def _wait_for(self, groups: tuple[int, ...], module: nn.Module, inputs: object) -> None:
        if self._pending:
            for group in groups:
                for index in self._groups[group]:
                    if (pending := self._pending.pop(index, None)) is not None:
                        pending.wait()


def _innermost_members(model: nn.Module) -> list[nn.Module]:
    """Return the members of module lists that contain no such list themselves, in the order of registration."""
    return [
        member
        for modules in model.modules()
        if isinstance(modules, nn.ModuleList)
        for member in modules
        if not any(isinstance(inner, nn.ModuleList) for inner in member.modules())
    ]
