"""Who sits where: ranks, their coordinates on the parallel axes and the groups they form, as arithmetic.

With `tp` tensor-parallel, `dp` data-parallel and `pp` pipeline positions there are pp x dp x tp ranks, tensor parallel
fastest and pipeline slowest:

    rank = (pp_rank * dp + dp_rank) * tp + tp_rank

so `tp` consecutive ranks, which one host holds together, share each layer of one copy of the model; the ranks with the
same tp_rank, `tp` apart in one pipeline stage, hold the same slice of it and sum their gradients; and the stages of one
copy, which talk the least, are dp x tp apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from megascale.utils.errors import UserError

__all__ = ["Coordinates", "ParallelLayout"]


class Coordinates(NamedTuple):
    """Where one rank sits on each parallel axis, slowest axis first."""

    pp_rank: int
    dp_rank: int
    tp_rank: int


@dataclass(frozen=True)
class ParallelLayout:
    """The sizes of the parallel axes; `sizes` lists them slowest first, and everything else follows from that list."""

    tp: int = 1
    dp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if min(self.sizes) < 1:
            raise ValueError(f"parallel sizes must be at least 1, got tp={self.tp}, dp={self.dp}, pp={self.pp}")

    @classmethod
    def of_world(cls, world_size: int, tp: int, pp: int = 1) -> "ParallelLayout":
        """Return the layout in which `tp` x `pp` ranks share a model and all the rest of the world is data parallel.

        Raises:
            UserError: the world size is not a multiple of `tp` x `pp`.
        """
        if tp < 1 or pp < 1 or world_size < 1 or world_size % (tp * pp):
            stages = f" x --pipeline-model-parallel-size {pp}" if pp != 1 else ""
            raise UserError(
                f"world size {world_size} cannot be cut into groups of --tensor-model-parallel-size {tp}{stages}: "
                f"the number of processes must be a multiple of it."
            )
        return cls(tp=tp, dp=world_size // (tp * pp), pp=pp)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each axis in the order of `Coordinates`, slowest first."""
        return (self.pp, self.dp, self.tp)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Return where `rank` sits."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside of a world of {self.world_size} ranks")
        positions: list[int] = []
        for size in reversed(self.sizes):
            rank, position = divmod(rank, size)
            positions.append(position)
        return Coordinates(*reversed(positions))

    def rank_of(self, coordinates: Sequence[int]) -> int:
        """Return the rank that sits at `coordinates`, the inverse of `coordinates()`."""
        rank = 0
        for position, size in zip(coordinates, self.sizes, strict=True):
            if not 0 <= position < size:
                raise ValueError(f"position {position} is outside of an axis of size {size}")
            rank = rank * size + position
        return rank

    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups that share each layer of one model: every rank in exactly one of them."""
        return self._groups_along("tp_rank")

    def dp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups that hold the same slice of the model: every rank in exactly one of them."""
        return self._groups_along("dp_rank")

    def pp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the pipelines, each in the order of its stages: every rank in exactly one of them."""
        return self._groups_along("pp_rank")

    def pp_end_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the first and the last stage of each pipeline, which both hold a tied embedding; none for pp = 1."""
        return tuple((group[0], group[-1]) for group in self.pp_groups() if self.pp > 1)

    def _groups_along(self, axis: str) -> tuple[tuple[int, ...], ...]:
        along = Coordinates._fields.index(axis)
        others = [range(1 if dim == along else size) for dim, size in enumerate(self.sizes)]
        return tuple(
            tuple(
                self.rank_of([position if dim == along else start[dim] for dim in range(len(self.sizes))])
                for position in range(self.sizes[along])
            )
            for start in product(*others)
        )

    def rank_table(self, max_rows: int = 8, max_columns: int = 8) -> str:
        """Return the ranks as text: a column per slice, a line per model replica and, of each, per pipeline stage.

        Long tables lose their middle.
        """
        rows = _abbreviate(range(self.pp * self.dp), max_rows)
        columns = _abbreviate(range(self.tp), max_columns)
        table = [["", *("..." if column is None else f"tp {column}" for column in columns)]]
        for row in rows:
            if row is None:
                table.append(["...", *("..." for _ in columns)])
            else:
                pp_rank, dp_rank = divmod(row, self.dp)
                ranks = ["..." if column is None else str(row * self.tp + column) for column in columns]
                table.append([f"pp {pp_rank} dp {dp_rank}" if self.pp > 1 else f"dp {dp_rank}", *ranks])
        widths = [max(len(cell) for cell in cells) for cells in zip(*table, strict=True)]
        lines = (
            "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
            for line in table
        )
        return "\n".join(line.rstrip() for line in lines)


def _abbreviate(positions: range, limit: int) -> list[int | None]:
    """Return at most `limit` positions; a None stands for the middle that was left out."""
    if len(positions) <= limit:
        return list(positions)
    return [*positions[: limit - 2], None, positions[-1]]
