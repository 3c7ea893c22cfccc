"""Where two runs part: the first step, rank and tensor, from the digests that they logged. No torch.

Within a step things are compared in the order in which they come about: the samples, the loss, the gradients, their
norm, the weights. Two runs of one layout must agree bit for bit. Runs of different layouts add up in different orders:
then samples are compared exactly and loss and gradient norm within a tolerance; slices of tensors cannot be.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megascale.utils.errors import UserError
from megascale.utils.files import atomic_writer

DIGESTS_DIRECTORY = "digests"

# Relative difference of loss and gradient norm that another order of summation explains, per type of the parameters.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}


@dataclass(frozen=True)
class RankHeader:
    """Where the rank that wrote a file stood.

    sequence_parallel, distributed_optimizer: what, beside the layout, decides which sums a rank's tensors hold.
    reads_data: whether its samples count among those of its run.
    """

    rank: int
    world_size: int
    tp: int
    dp: int
    pp: int
    sequence_parallel: bool
    distributed_optimizer: bool
    reads_data: bool
    dtype: str


@dataclass(frozen=True)
class Digest:
    """One rank's fingerprints of one step; see `train.digests`."""

    step: int
    samples: list[int]
    tokens: str
    loss: str
    grad_norm: str
    gradients: dict[str, str]
    weights: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RankDigests:
    """All that one rank wrote, by step."""

    header: RankHeader
    steps: dict[int, Digest]


def digest_file(run_directory: Path, rank: int) -> Path:
    """Return where a rank's digests lie."""
    return run_directory / DIGESTS_DIRECTORY / f"rank_{rank:05d}.jsonl"


def keep_digests(path: Path, header: RankHeader, up_to_step: int) -> None:
    """Start a rank's file with a header and, of the digests that are there, those up to a step."""
    kept = _lines(path)[1:]
    with atomic_writer(path, "w") as file:
        file.write(json.dumps(asdict(header)) + "\n")
        for line in kept:
            if json.loads(line)["step"] <= up_to_step:
                file.write(line + "\n")


def read_digests(run_directory: Path) -> list[RankDigests]:
    """Return what every rank of a run wrote, in rank order.

    Raises:
        UserError: the run logged no digests, or those of a rank are missing or damaged.
    """
    folder = run_directory / DIGESTS_DIRECTORY
    paths = sorted(folder.glob("rank_*.jsonl"))
    if not paths:
        raise UserError(f"there are no digests in {folder}: run with --log-digests")
    ranks = []
    for path in paths:
        try:
            first, *rest = (json.loads(line) for line in _lines(path))
            ranks.append(RankDigests(RankHeader(**first), {d.step: d for d in (Digest(**line) for line in rest)}))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} does not hold digests: {error}") from None
    # A run that went on with fewer ranks leaves files of ranks that are no more.
    ranks = ranks[: ranks[0].header.world_size]
    if [r.header.rank for r in ranks] != list(range(ranks[0].header.world_size)):
        raise UserError(f"{folder} lacks the digests of some of {ranks[0].header.world_size} ranks")
    return ranks


def _layout(header: RankHeader) -> str:
    """Name everything that decides in which order, and on which rank, a run adds up."""
    options = [name for name in ("sequence_parallel", "distributed_optimizer") if getattr(header, name)]
    return " ".join([f"tp={header.tp} dp={header.dp} pp={header.pp}", *options])


def compare_runs(first: Path, second: Path, tolerance: float | None = None) -> tuple[bool, str]:
    """Return whether two runs are the same as far as both went, and a text that says so, or where they part.

    Args:
        tolerance: Relative difference of loss and norm to accept between layouts; None: that of the type.

    Raises:
        UserError: one of them has no digests, or they have no step in common.
    """
    a, b = read_digests(first), read_digests(second)
    common = sorted(set(a[0].steps) & set(b[0].steps))
    if not common:
        raise UserError(f"{first} and {second} have no step in common")
    layouts = [_layout(r[0].header) for r in (a, b)]
    same_layout = layouts[0] == layouts[1]
    accepted = tolerance if tolerance is not None else max(TOLERANCES[r[0].header.dtype] for r in (a, b))
    for step in common:
        found = _bitwise(a, b, step) if same_layout else _across_layouts(a, b, step, accepted)
        if found:
            return False, f"the runs part at step {step}: {found}"
    span = f"steps {common[0]} to {common[-1]}" if len(common) > 1 else f"step {common[0]}"
    if same_layout:
        return True, f"the runs are the same in {span}, bit for bit, on all {len(a)} ranks"
    return True, (
        f"the runs agree in {span}: the same samples, losses and gradient norms within {accepted:g} (layouts "
        f"{' and '.join(layouts)} add up in different orders, so their bits differ)"
    )


def _bitwise(a: list[RankDigests], b: list[RankDigests], step: int) -> str | None:
    """Return the first difference of a step: by quantity first, as a wrong sample shows in every loss, then by rank."""
    pairs = [(x.header.rank, x.steps.get(step), y.steps.get(step)) for x, y in zip(a, b, strict=True)]
    for rank, x, y in pairs:
        if x is None or y is None:
            return f"rank {rank} has no digest of it in {'the first' if x is None else 'the second'} run"
    known = [(rank, x, y) for rank, x, y in pairs if x is not None and y is not None]
    for rank, x, y in known:
        if x.samples != y.samples:
            return f"rank {rank} reads samples {_range(x)} and {_range(y)}"
        if x.tokens != y.tokens:
            return f"rank {rank} reads other tokens in samples {_range(x)}"
    # A gradient comes before the norm, and all ranks know the loss: name the tensor where there is one.
    for rank, x, y in known:
        if x.loss != y.loss:
            return f"the loss on rank {rank} is {_number(x.loss)!r} and {_number(y.loss)!r}"
    for title, field in (("gradient", "gradients"), ("weight", "weights")):
        for rank, x, y in known:
            mine, theirs = getattr(x, field), getattr(y, field)
            # In model order, which is that of the weights.
            for name in x.weights:
                if mine.get(name) != theirs.get(name):
                    return f"{title} of {name} on rank {rank} ({_number(x.loss)!r} is the loss in both runs)"
            if mine.keys() != theirs.keys():
                return f"rank {rank} holds other parameters: {sorted(mine.keys() ^ theirs.keys())}"
        if field == "gradients":
            for rank, x, y in known:
                if x.grad_norm != y.grad_norm:
                    return f"the gradient norm on rank {rank} is {_number(x.grad_norm)!r} and {_number(y.grad_norm)!r}"
    return None


def _across_layouts(a: list[RankDigests], b: list[RankDigests], step: int, tolerance: float) -> str | None:
    x, y = a[0].steps[step], b[0].steps[step]
    if x.samples != y.samples:
        return f"it reads samples {_range(x)} and {_range(y)}"
    if _tokens_of_batch(a, step) != _tokens_of_batch(b, step):
        return f"the ranks together read other tokens in samples {_range(x)}"
    for title, one, other in (
        ("loss", _number(x.loss), _number(y.loss)),
        ("gradient norm", _number(x.grad_norm), _number(y.grad_norm)),
    ):
        if not (one == other or abs(one - other) <= tolerance * max(abs(one), abs(other))):
            if math.isnan(one) and math.isnan(other):
                continue
            difference = abs(one - other) / max(abs(one), abs(other))
            return f"the {title} is {one!r} and {other!r}, {difference:.2g} apart where {tolerance:g} is accepted"
    return None


def _tokens_of_batch(ranks: list[RankDigests], step: int) -> int:
    return sum(int(r.steps[step].tokens, 16) for r in ranks if r.header.reads_data) % 2**64


def _range(digest: Digest) -> str:
    return f"{digest.samples[0]} to {digest.samples[1] - 1}"


def _number(bits: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


def _lines(path: Path) -> list[str]:
    """Return the finished lines of a file; the last piece of a killed run's is not."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
