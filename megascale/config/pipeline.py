"""Pipeline parallelism as arithmetic: which layers a rank holds, and in which order it computes.

The layers are cut into p x v stages of equally many consecutive layers, p the pipeline-parallel ranks and v the chunks
per rank. Stage s lies on rank s mod p, as that rank's chunk s // p: with v = 1 each rank holds one run of layers, with
v > 1 the micro-batches go round the ranks v times ("interleaved").

A schedule is each rank's tasks in order. Narayanan et al. 2021 (arXiv:2104.04473), section 2.2: after a warm-up of
forward passes, a rank alternates one forward and one backward pass (1F1B), so that it keeps the activations of at most
p - rank micro-batches instead of all m; the interleaved schedule is the same with stages v times shorter, which divides
the idle time by v and multiplies the messages by v.
"""

from dataclasses import dataclass
from enum import Enum

from megascale.config.schema import RunConfig

__all__ = [
    "Pass",
    "PipelineStage",
    "Task",
    "bubble_fraction",
    "forward_schedule",
    "num_chunks",
    "schedule",
    "stages_of_rank",
    "stages_of_run",
]


@dataclass(frozen=True)
class PipelineStage:
    """Consecutive layers that one rank computes without communicating over the pipeline.

    index: its place among the `num_stages` of the model. layers: their numbers in the whole model.
    """

    index: int
    num_stages: int
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether it holds the embedding and reads tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it holds the output layer and computes the loss."""
        return self.index == self.num_stages - 1


def stages_of_rank(num_layers: int, pp: int, chunks: int, pp_rank: int) -> tuple[PipelineStage, ...]:
    """Return the stages of one rank, a stage per chunk. `pp` x `chunks` must divide the layers."""
    num_stages = pp * chunks
    assert num_layers % num_stages == 0, f"{num_layers} layers in {num_stages} stages: the constraints refuse this"
    depth = num_layers // num_stages
    indices = range(pp_rank, num_stages, pp)
    return tuple(PipelineStage(index, num_stages, range(index * depth, (index + 1) * depth)) for index in indices)


def num_chunks(config: RunConfig) -> int:
    """Return the chunks of layers per pipeline rank (v); more than one means the interleaved schedule."""
    depth = config.parallel.num_layers_per_virtual_pipeline_stage
    return 1 if depth is None else config.model.num_layers // (config.parallel.pipeline_model_parallel_size * depth)


def stages_of_run(config: RunConfig, pp_rank: int) -> tuple[PipelineStage, ...]:
    """Return the stages of one rank of a run; without a pipeline one, the whole model."""
    pp = config.parallel.pipeline_model_parallel_size
    return stages_of_rank(config.model.num_layers, pp, num_chunks(config), pp_rank)


class Pass(Enum):
    """The direction of a task."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Task:
    """The forward or backward pass of one micro-batch (counted from 0 on each rank) through one of a rank's chunks."""

    direction: Pass
    micro_batch: int
    chunk: int


def schedule(pp: int, chunks: int, num_micro_batches: int, pp_rank: int) -> tuple[Task, ...]:
    """Return the tasks of one rank for one step, in order: 1F1B, interleaved if there is more than one chunk.

    Each micro-batch passes forward and backward through each chunk once. Interleaved, a rank takes `pp` micro-batches
    through one chunk, the same through the next chunk, and so on; so `pp` must divide the micro-batches.
    """
    total = num_micro_batches * chunks
    if chunks == 1:
        num_warmup = pp - pp_rank - 1
    else:
        assert num_micro_batches % pp == 0, f"{num_micro_batches} micro-batches on {pp} ranks, interleaved"
        # Twice the distance to the last rank, since a micro-batch is waited for on its way down and up; and all passes
        # of the first group through the chunks before the last (Narayanan et al. 2021, figure 4).
        num_warmup = 2 * (pp - pp_rank - 1) + (chunks - 1) * pp
    num_warmup = min(num_warmup, total)
    forward = forward_schedule(pp, chunks, num_micro_batches)
    backward = [Task(Pass.BACKWARD, task.micro_batch, chunks - 1 - task.chunk) for task in forward]
    steady = [task for pair in zip(forward[num_warmup:], backward, strict=False) for task in pair]
    return (*forward[:num_warmup], *steady, *backward[total - num_warmup :])


def forward_schedule(pp: int, chunks: int, num_micro_batches: int) -> tuple[Task, ...]:
    """Return the tasks of any rank when nothing is learnt: `pp` micro-batches at a time through chunk after chunk."""
    groups = [range(first, min(first + pp, num_micro_batches)) for first in range(0, num_micro_batches, pp)]
    return tuple(
        Task(Pass.FORWARD, micro_batch, chunk) for group in groups for chunk in range(chunks) for micro_batch in group
    )


def bubble_fraction(pp: int, chunks: int, num_micro_batches: int) -> float:
    """Return the idle time of a pipeline as a fraction of its computing time: (p - 1) / (v m)."""
    return (pp - 1) / (chunks * num_micro_batches)
