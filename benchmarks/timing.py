"""Candidates measured in turns, so that whatever else the machine does hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """One line of the results: ours against a baseline, in the unit that is written beside the figures.

    ratio: ours / baseline, the median over rounds; low, high: its extremes.
    """

    what: str
    unit: str
    baseline: float
    ours: float
    ratio: float
    low: float
    high: float


def interleaved(num_rounds: int, candidates: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Return each candidate's figure of each round; the candidates take turns, after one round that does not count."""
    figures: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(num_rounds + 1):
        for name, measure in candidates.items():
            figure = measure()
            if number > 0:
                figures[name].append(figure)
    return figures


def seconds(action: Callable[[], object], times: int = 1) -> Callable[[], float]:
    """Return a measurement: the mean seconds of `action`, done `times` times."""

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(times):
            action()
        return (time.perf_counter() - start) / times

    return measure


def compare(what: str, unit: str, baseline: list[float], ours: list[float], scale: float = 1.0) -> Comparison:
    """Compare round by round; `scale` turns the figures into `unit`."""
    ratios = [mine / other for mine, other in zip(ours, baseline, strict=True)]
    medians = [scale * statistics.median(figures) for figures in (baseline, ours)]
    return Comparison(what, unit, *medians, statistics.median(ratios), min(ratios), max(ratios))
