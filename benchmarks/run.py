"""Run all benchmarks and write benchmarks/results.md: ratios, measured in turns in one run (`make bench`).

Absolute figures depend on the machine and on what else it does; ratios much less, which is why the candidates of each
benchmark take turns. The range beside a ratio is that of its rounds.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import numpy
import torch

from benchmarks import async_save, fused_head, memory, reading, tensor_parallel
from benchmarks.timing import Comparison

RESULTS = Path(__file__).with_name("results.md")
_HEADER = "| what | baseline | megascale | ratio, median (range) |\n| --- | --- | --- | --- |"


def main() -> None:
    started = time.perf_counter()
    load = os.getloadavg()[0]
    rows = []
    for benchmark in (reading, fused_head, tensor_parallel, memory, async_save):
        for comparison in benchmark.measure():
            rows.append(line(comparison))
            print(rows[-1], flush=True)
    minutes = (time.perf_counter() - started) / 60
    text = "\n\n".join(
        [
            "# Benchmarks",
            "Written by `make bench`: megascale against a baseline. Smaller is better; ratio = megascale / baseline.\n"
            "Candidates take turns in one run. What each one does stands at the top of its file in `benchmarks/`.",
            f"Machine: {machine()}; load {load:.1f} before the run, which took {minutes:.1f} minutes.",
            "\n".join([_HEADER, *rows]),
        ]
    )
    RESULTS.write_text(text + "\n", encoding="utf-8")
    print(f"written to {RESULTS}")


def line(result: Comparison) -> str:
    baseline, ours = (f"{_figure(value)} {result.unit}" for value in (result.baseline, result.ours))
    return f"| {result.what} | {baseline} | {ours} | {result.ratio:.2f} ({result.low:.2f} to {result.high:.2f}) |"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def machine() -> str:
    """Return what the figures depend on, without saying whose machine it is."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {gpu}; Python {platform.python_version()}, "
        f"torch {torch.__version__.split('+')[0]}, NumPy {numpy.__version__}, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
