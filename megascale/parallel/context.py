"""Process groups: the only file that opens them.

A run of `world` ranks is a grid of `pp` pipeline stages times `dp` model replicas times `tp` tensor-parallel ranks;
tensor-parallel ranks are consecutive, so that they stay inside one host (Shoeybi et al. 2019, appendix B). An `Axis` is
one rank's place on one side of that grid. An axis of size 1 has no process group and its collectives return their
input, so that one process runs the same code as 512 without torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megascale.config.layout import Coordinates, ParallelLayout
from megascale.parallel.collective_log import WAIT, Collective, CollectiveLog, CollectiveWatcher


@dataclass(frozen=True)
class Pending:
    """A collective under way. Its tensors must not be read or written before `wait` returns."""

    work: dist.Work | None = None
    axis: Axis | None = field(default=None, repr=False)
    tensor: torch.Tensor | None = field(default=None, repr=False)

    def wait(self) -> None:
        """Block (on CUDA: the current stream) until the collective is done."""
        if self.work is None:
            return
        assert self.axis is not None
        assert self.tensor is not None
        self.axis.log.add(WAIT, self.axis.name, self.tensor)
        self.work.wait()
        self.axis.log.left()


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
        self.log.left()

    def start_all_reduce_(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """Start reducing a contiguous `x` over the axis in place."""
        if self.size == 1:
            return Pending()
        self.log.add("all_reduce", self.name, x)
        return Pending(dist.all_reduce(x, op=op, group=self.group, async_op=True), self, x)

    def start_reduce_scatter(self, x: torch.Tensor, output: torch.Tensor) -> Pending:
        """Start summing `x` over the axis, each rank keeping its slice of the first dim.

        x [size * n, ..] per rank, contiguous -> output [n, ..], contiguous
        """
        if self.size == 1:
            output.copy_(x)
            return Pending()
        self.log.add("reduce_scatter", self.name, x)
        return Pending(dist.reduce_scatter_tensor(output, x, group=self.group, async_op=True), self, x)

    def start_all_gather(self, x: torch.Tensor, output: torch.Tensor) -> Pending:
        """Start joining the ranks' contiguous `x` along the first dim. x [n, ..] -> output [size * n, ..]."""
        if self.size == 1:
            output.copy_(x)
            return Pending()
        self.log.add("all_gather", self.name, x)
        return Pending(dist.all_gather_into_tensor(output, x, group=self.group, async_op=True), self, x)

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
        self.log.left()
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

    def start_send(self, x: torch.Tensor) -> Pending:
        """Start sending `x` to the other rank of an axis of two, which must `receive` as many elements of its dtype."""
        assert self.size == 2, f"axis {self.name} has {self.size} ranks: to whom?"
        x = x.contiguous()
        self.log.add("send", self.name, x)
        if self._goes_through_the_host(x):
            x = x.cpu()
        return Pending(dist.isend(x, group=self.group, group_dst=1 - self.rank), self, x)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return what the other rank of an axis of two sends next; messages are taken in the order of sending."""
        assert self.size == 2, f"axis {self.name} has {self.size} ranks: from whom?"
        x = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self.log.add("receive", self.name, x)
        if self._goes_through_the_host(x):
            on_host = torch.empty_like(x, device="cpu")
            dist.recv(on_host, group=self.group, group_src=1 - self.rank)
            self.log.left()
            return x.copy_(on_host)
        dist.recv(x, group=self.group, group_src=1 - self.rank)
        self.log.left()
        return x

    def _goes_through_the_host(self, x: torch.Tensor) -> bool:
        # gloo reduces tensors of a GPU, but sends only those of the host.
        return x.is_cuda and dist.get_backend(self.group) == "gloo"

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
class PipelineLinks:
    """The one-way channels between one rank and its neighbours on the ring of pipeline stages.

    Each is an axis of two ranks with a group of its own: messages on it are read in the order in which they were sent,
    and none waits for those of another channel (on CUDA each group has its own stream).
    """

    from_previous: Axis
    to_next: Axis
    from_next: Axis
    to_previous: Axis


@dataclass(frozen=True)
class ParallelContext:
    """Where this rank stands: its axes, and the device it computes on.

    Attributes:
        pp: The stages of its model replica.
        pp_ends: The first and the last of them, which both hold a tied embedding; of size 1 on the other stages.
        links: The channels to the neighbouring stages; None without a pipeline.
    """

    layout: ParallelLayout
    world: Axis
    tp: Axis
    dp: Axis
    pp: Axis
    pp_ends: Axis
    device: torch.device
    links: PipelineLinks | None = None

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def speaks(self) -> bool:
        """Whether this is the one process that prints and writes the run's files."""
        return self.world.rank == 0

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's losses and tokens count in sums over the world: one rank of each replica's last stage."""
        return self.tp.rank == 0 and self.pp.rank == self.pp.size - 1

    def watching(self, watcher: CollectiveWatcher) -> AbstractContextManager[None]:
        """Tell `watcher` of the collectives of all axes inside the `with` block."""
        return self.world.log.watching(watcher)

    def recording(self) -> AbstractContextManager[list[Collective]]:
        """Record the collectives of all axes: `with context.recording() as records:`."""
        return self.world.log.recording()


def single_process(device: torch.device | str = "cpu") -> ParallelContext:
    """Return the context of a run of one process: no torch.distributed, every axis of size 1."""
    device = torch.device(device)
    log = CollectiveLog()
    world, tp, dp, pp, ends = (Axis(name, 0, 1, None, log, device) for name in ("world", "tp", "dp", "pp", "pp_ends"))
    return ParallelContext(ParallelLayout(tp=1, dp=1), world, tp, dp, pp, ends, device)


@contextmanager
def launch(
    layout: ParallelLayout,
    rank: int,
    device: torch.device,
    backend: str,
    timeout_minutes: float = 10.0,
    init_method: str = "env://",
    restart_count: int = 0,
) -> Iterator[ParallelContext]:
    """Open the process groups of `layout`, yield this rank's context, and close them.

    Args:
        layout: The grid; `layout.world_size` processes must call this together.
        rank: This process's global rank.
        device: Where this rank computes. For CUDA the caller has chosen it from the local rank.
        backend: "gloo" or "nccl".
        timeout_minutes: How long a collective may wait for the others before it raises.
        init_method: How the ranks find each other; torchrun's environment by default.
        restart_count: How often torchrun has started these ranks again.
    """
    if layout.world_size == 1:
        yield single_process(device)
        return
    timeout = timedelta(minutes=timeout_minutes)
    store, _, _ = next(rendezvous(init_method, rank, layout.world_size, timeout=timeout))
    # torchrun's store outlives the ranks: under a name of its own, no start finds the addresses of the one before.
    store = dist.PrefixStore(f"start_{restart_count}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=layout.world_size, timeout=timeout)
    try:
        log = CollectiveLog()
        place = layout.coordinates(rank)

        def axis(name: str, groups: Sequence[Sequence[int]]) -> Axis:
            ranks, group = _open_groups(groups, rank)
            return Axis(name, ranks.index(rank), len(ranks), group, log, device)

        yield ParallelContext(
            layout,
            Axis("world", rank, layout.world_size, dist.group.WORLD, log, device),
            axis("tp", layout.tp_groups()),
            axis("dp", layout.dp_groups()),
            axis("pp", layout.pp_groups()),
            axis("pp_ends", layout.pp_end_groups()),
            device,
            _open_links(layout, place, axis) if layout.pp > 1 else None,
        )
    finally:
        dist.destroy_process_group()


def open_host_axis(context: ParallelContext, name: str, timeout_minutes: float) -> Axis:
    """Open the world once more, over gloo and host memory, for a second thread of each rank.

    Its collectives never mix with those of the first thread, and have a log of their own. All ranks call this together;
    the group closes with the context.
    """
    world = context.world
    if world.size == 1:
        return Axis(name, 0, 1)
    group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
    assert isinstance(group, dist.ProcessGroup)
    return Axis(name, world.rank, world.size, group)


def _open_groups(groups: Sequence[Sequence[int]], rank: int) -> tuple[Sequence[int], dist.ProcessGroup | None]:
    """Open one axis's groups (every rank must open all of them, in one order) and return the one `rank` is in.

    Returned are its ranks and the group; of a rank by itself, no group.
    """
    mine: tuple[Sequence[int], dist.ProcessGroup | None] = ([rank], None)
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                mine = (ranks, group)
    return mine


def _open_links(
    layout: ParallelLayout, place: Coordinates, axis: Callable[[str, Sequence[Sequence[int]]], Axis]
) -> PipelineLinks:
    """Open a group for each pair of neighbours and direction, for all pipelines, and return those of one rank."""
    stage = place.pp_rank
    previous = (stage - 1) % layout.pp

    def open_all(direction: str) -> list[Axis]:
        # The link between each stage and the next; the last one closes the ring, for the interleaved schedule.
        return [
            axis(f"pp_{direction}", [sorted((ranks[i], ranks[(i + 1) % layout.pp])) for ranks in layout.pp_groups()])
            for i in range(layout.pp)
        ]

    forward, backward = open_all("forward"), open_all("backward")
    return PipelineLinks(
        from_previous=forward[previous],
        to_next=forward[stage],
        from_next=backward[stage],
        to_previous=backward[previous],
    )
