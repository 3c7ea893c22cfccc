"""Where each rank of a stalled run is, and who keeps the others waiting. No torch.

Each rank keeps a heartbeat file: its step, what it is doing, its last collective on each axis and how many it has
entered there, and where in the program it stands. The ranks of one group enter the same collectives in the same order,
so a rank whose count is behind that of its group has not come to where the others wait.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megascale.config.layout import Coordinates, ParallelLayout
from megascale.utils.files import atomic_writer

HEARTBEATS_DIRECTORY = "heartbeats"


@dataclass(frozen=True)
class Heartbeat:
    """One rank at one moment.

    Attributes:
        time: Of writing, in seconds since 1970; `progress` that of its last sign of life before.
        step: Steps done.
        phase: "training", "validation" or "saving".
        last: The last collective it entered, in words, "" before the first.
        inside: Whether it has not come out of that one.
        counts: Collectives entered, by axis; `lasts` the last one of each.
        stack: Where its main thread stands, innermost last.
    """

    rank: int
    host: str
    process: int
    time: float
    progress: float
    step: int = 0
    phase: str = "starting"
    last: str = ""
    inside: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    lasts: dict[str, str] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)


def heartbeat_file(run_directory: Path, rank: int) -> Path:
    """Return where a rank's heartbeat lies."""
    return run_directory / HEARTBEATS_DIRECTORY / f"rank_{rank:05d}.json"


def write_heartbeat(path: Path, heartbeat: Heartbeat) -> None:
    """Replace a rank's heartbeat file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(path, "w") as file:
        json.dump(asdict(heartbeat), file)


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Return what a heartbeat file says, None when there is none that can be read."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Heartbeat(**content)
    except (OSError, ValueError, TypeError):
        return None


def suspects(heartbeats: Sequence[Heartbeat | None], layout: ParallelLayout) -> list[int]:
    """Return the ranks that keep others waiting, as far as the heartbeats tell.

    A rank without a heartbeat, or one that is behind its group on some axis and does not wait for anyone itself.
    """
    silent = [rank for rank, heartbeat in enumerate(heartbeats) if heartbeat is None]
    if silent:
        return silent
    known = [heartbeat for heartbeat in heartbeats if heartbeat is not None]
    behind, ahead = set(), set()
    for axis, groups in _groups(layout).items():
        for group in groups:
            counts = {rank: known[rank].counts.get(axis, 0) for rank in group}
            behind |= {rank for rank, count in counts.items() if count < max(counts.values())}
            ahead |= {rank for rank, count in counts.items() if count > min(counts.values())}
    if behind - ahead:
        return sorted(behind - ahead)
    # All entered the same ones: who is not inside one is on its own way.
    outside = [heartbeat.rank for heartbeat in known if not heartbeat.inside]
    return outside if len(outside) < len(known) else []


def hang_report(
    heartbeats: Sequence[Heartbeat | None], layout: ParallelLayout, stalled_seconds: float, now: float
) -> str:
    """Return what a person needs to know of a run that stands still: each rank's whereabouts, the suspects' stacks."""
    suspected = suspects(heartbeats, layout)
    named = ", ".join(map(str, suspected)) if suspected else "none that the counts of collectives tell"
    lines = [f"no progress for {stalled_seconds:.0f} s; ranks that keep the others waiting: {named}"]
    for rank, heartbeat in enumerate(heartbeats):
        if heartbeat is None:
            lines.append(f"  rank {rank}: no heartbeat: it never started, or its host is gone")
            continue
        where = "in it still" if heartbeat.inside else "out of it again"
        last = f"last collective {heartbeat.last}, {where}" if heartbeat.last else "no collective yet"
        age = now - heartbeat.time
        old = f"; HEARTBEAT {age:.0f} s OLD: dead or frozen" if age > max(1.0, stalled_seconds / 2) else ""
        suspicion = "  <-- suspect" if rank in suspected else ""
        lines.append(
            f"  rank {rank} on {heartbeat.host} (process {heartbeat.process}): {heartbeat.phase}, step "
            f"{heartbeat.step} done, {last}{old}{suspicion}"
        )
    for rank in suspected[:4]:
        stalled = heartbeats[rank]
        if stalled is not None and stalled.stack:
            lines += [f"  rank {rank} stands at", *(f"    {line}" for line in stalled.stack)]
    return "\n".join(lines)


def _groups(layout: ParallelLayout) -> dict[str, Sequence[Sequence[int]]]:
    """Return, by axis, the groups whose ranks enter the same collectives. Stages of a pipeline do not."""
    by_field = {"tp_rank": layout.tp_groups(), "dp_rank": layout.dp_groups()}
    groups = {name.removesuffix("_rank"): by_field[name] for name in Coordinates._fields if name in by_field}
    return {"world": [range(layout.world_size)], **groups}
