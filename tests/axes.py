"""Axes without processes: for what a rank computes on its own, whatever the others do."""

from __future__ import annotations

from typing import Any

from megascale.parallel.context import Axis


def lone_axis(rank: int, size: int, name: str = "tp") -> Axis:
    """Return the axis that rank `rank` of `size` sees; any collective along it fails."""
    nobody: Any = "nobody else is here"
    return Axis(name, rank, size, None if size == 1 else nobody)
