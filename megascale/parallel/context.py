"""Process groups: the only file that opens them.

A run of `world` ranks is a grid of `dp` model replicas times `tp` tensor-parallel ranks; tensor-parallel ranks are
consecutive, so that a replica stays inside one host (Shoeybi et al. 2019, appendix B). An `Axis` is one rank's place on
one side of that grid. An axis of size 1 has no process group and its collectives return their input, so that one
process runs the same code as 512 without torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from megascale.config.layout import ParallelLayout


@dataclass(frozen=True)
class Collective:
    """One collective that this rank entered: what, over which axis, and the bytes of the tensor it moved."""

    op: str
    axis: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


class CollectiveLog:
    """The collectives entered while a recording is open, in order; shared by the axes of one context."""

    def __init__(self) -> None:
        self._open: list[list[Collective]] = []

    def add(self, op: str, axis: str, tensor: torch.Tensor) -> None:
        for records in self._open:
            records.append(Collective(op, axis, tuple(tensor.shape), tensor.dtype))

    @contextmanager
    def recording(self) -> Iterator[list[Collective]]:
        """Yield a list that fills with every collective entered inside the `with` block."""
        records: list[Collective] = []
        self._open.append(records)
        try:
            yield records
        finally:
            self._open = [other for other in self._open if other is not records]


@dataclass(frozen=True)
class Pending:
    """A collective under way. Its tensors must not be read or written before `wait` returns."""

    work: dist.Work | None = None

    def wait(self) -> None:
        """Block (on CUDA: the current stream) until the collective is done."""
        if self.work is not None:
            self.work.wait()


@dataclass(frozen=True)
class Axis:
    """One parallel axis as this rank sees it: its `rank` of `size`, and the collectives along it.

    Every collective of the project goes through here, so that it can be counted and logged. All of them are skipped,
    and nothing is logged, on an axis of size 1.
    """

    name: str
    rank: int
    size: int
    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    log: CollectiveLog = field(default_factory=CollectiveLog, repr=False, compare=False)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"axis {self.name}: rank {self.rank} of {self.size}"
        assert (self.size == 1) == (self.group is None), f"axis {self.name}: a group exists iff size > 1"

    def all_reduce(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Return the reduction of `x` over the axis, on every rank; `x` is left as it is."""
        if self.size == 1:
            return x
        reduced = x.clone(memory_format=torch.contiguous_format)
        self.all_reduce_(reduced, op)
        return reduced

    def all_reduce_(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce `x` over the axis in place. Never inside autograd: a saved tensor would change under it."""
        if self.size == 1:
            return
        self.log.add("all_reduce", self.name, x)
        dist.all_reduce(x, op=op, group=self.group)

    def start_all_reduce_(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """Start reducing a contiguous `x` over the axis in place."""
        if self.size == 1:
            return Pending()
        self.log.add("all_reduce", self.name, x)
        return Pending(dist.all_reduce(x, op=op, group=self.group, async_op=True))

    def start_reduce_scatter(self, x: torch.Tensor, output: torch.Tensor) -> Pending:
        """Start summing `x` over the axis, each rank keeping its slice of the first dim.

        x [size * n, ..] per rank, contiguous -> output [n, ..], contiguous
        """
        if self.size == 1:
            output.copy_(x)
            return Pending()
        self.log.add("reduce_scatter", self.name, x)
        return Pending(dist.reduce_scatter_tensor(output, x, group=self.group, async_op=True))

    def start_all_gather(self, x: torch.Tensor, output: torch.Tensor) -> Pending:
        """Start joining the ranks' contiguous `x` along the first dim. x [n, ..] -> output [size * n, ..]."""
        if self.size == 1:
            output.copy_(x)
            return Pending()
        self.log.add("all_gather", self.name, x)
        return Pending(dist.all_gather_into_tensor(output, x, group=self.group, async_op=True))

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the ranks' `x` joined along `dim` in rank order, on every rank.

        x [.., n, ..] per rank -> [.., size * n, ..] replicated
        """
        if self.size == 1:
            return x
        x = x.contiguous()
        if dim == 0:
            joined = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
            self.start_all_gather(x, joined).wait()
            return joined
        self.log.add("all_gather", self.name, x)
        pieces = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(pieces, x, group=self.group)
        return torch.cat(pieces, dim=dim)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the sum over the axis. x [size * n, ..] per rank -> [n, ..] split on dim 0."""
        if self.size == 1:
            return x
        output = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        self.start_reduce_scatter(x.contiguous(), output).wait()
        return output

    def shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's slice of a replicated `x`: a view, no communication. `size` must divide the dim."""
        return x.narrow(dim, self.rank * (x.shape[dim] // self.size), x.shape[dim] // self.size)

    def sum_floats(self, values: list[float]) -> list[float]:
        """Return the sums over the axis of a few host numbers, added in float64 in the same order on every rank."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.all_reduce_(total)
        return total.tolist()

    def any(self, flag: bool) -> bool:
        """Return whether the flag is raised on any rank of the axis."""
        return self.sum_floats([float(flag)])[0] > 0

    def barrier(self) -> None:
        """Wait until every rank of the axis is here."""
        self.sum_floats([0.0])


@dataclass(frozen=True)
class ParallelContext:
    """Where this rank stands: its world, tensor and data axes, and the device it computes on."""

    layout: ParallelLayout
    world: Axis
    tp: Axis
    dp: Axis
    device: torch.device

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def speaks(self) -> bool:
        """Whether this is the one process that prints and writes the run's files."""
        return self.world.rank == 0

    def recording(self) -> AbstractContextManager[list[Collective]]:
        """Record the collectives of all axes: `with context.recording() as records:`."""
        return self.world.log.recording()


def single_process(device: torch.device | str = "cpu") -> ParallelContext:
    """Return the context of a run of one process: no torch.distributed, every axis of size 1."""
    device = torch.device(device)
    log = CollectiveLog()
    world, tp, dp = (Axis(name, 0, 1, None, log, device) for name in ("world", "tp", "dp"))
    return ParallelContext(ParallelLayout(tp=1, dp=1), world, tp, dp, device)


@contextmanager
def launch(
    layout: ParallelLayout,
    rank: int,
    device: torch.device,
    backend: str,
    timeout_minutes: float = 10.0,
    init_method: str = "env://",
) -> Iterator[ParallelContext]:
    """Open the process groups of `layout`, yield this rank's context, and close them.

    Args:
        layout: The grid; `layout.world_size` processes must call this together.
        rank: This process's global rank.
        device: Where this rank computes. For CUDA the caller has chosen it from the local rank.
        backend: "gloo" or "nccl".
        timeout_minutes: How long a collective may wait for the others before it raises.
        init_method: How the ranks find each other; torchrun's environment by default.
    """
    if layout.world_size == 1:
        yield single_process(device)
        return
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=layout.world_size,
        timeout=timedelta(minutes=timeout_minutes),
    )
    try:
        log = CollectiveLog()
        world = Axis("world", rank, layout.world_size, dist.group.WORLD, log, device)
        dp_rank, tp_rank = layout.coordinates(rank)
        tp = Axis("tp", tp_rank, layout.tp, _open_groups(layout.tp_groups(), rank), log, device)
        dp = Axis("dp", dp_rank, layout.dp, _open_groups(layout.dp_groups(), rank), log, device)
        yield ParallelContext(layout, world, tp, dp, device)
    finally:
        dist.destroy_process_group()


def _open_groups(groups: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup | None:
    """Open one axis's groups (every rank must open all of them, in one order) and return the one `rank` is in."""
    mine = None
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                mine = group
    return mine
