"""Samples of 1,024 tokens in the paper's order against a loop that slices a memory map at random places.

The file is in memory. The loop is what a minimal trainer does; it knows neither documents nor epochs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.timing import Comparison, compare, interleaved, seconds
from megascale.data.indexed import IndexedDataset, IndexedWriter
from megascale.data.samples import ShardedSamples

_NUM_DOCUMENTS, _MEAN_LENGTH, _SEQUENCE, _NUM_SAMPLES = 25_000, 800, 1024, 10_000


def measure(num_rounds: int = 5) -> list[Comparison]:
    """Return the comparison of microseconds per sample."""
    random = np.random.RandomState(0)
    with tempfile.TemporaryDirectory() as directory:
        prefix = str(Path(directory) / "random")
        with IndexedWriter(prefix, np.uint16) as writer:
            for length in random.randint(1, 2 * _MEAN_LENGTH, _NUM_DOCUMENTS):
                writer.add_document(random.randint(0, 50_000, length))
        samples = ShardedSamples(IndexedDataset(prefix), None, _SEQUENCE, num_shards=5, seed=1)
        numbers = iter(range(1 << 40))
        tokens = np.memmap(prefix + ".bin", dtype=np.uint16, mode="r")
        starts = random.randint(0, len(tokens) - _SEQUENCE - 1, 1 << 16)

        def slice_at_random() -> np.ndarray:
            start = starts[next(numbers) % len(starts)]
            return tokens[start : start + _SEQUENCE + 1].astype(np.int64)

        candidates = {
            "loop": seconds(slice_at_random, _NUM_SAMPLES),
            "ours": seconds(lambda: samples.sample(next(numbers)), _NUM_SAMPLES),
        }
        figures = interleaved(num_rounds, candidates)
    what = "reading a sample of 1,024 tokens, in the paper's order against slices of a memory map at random"
    return [compare(what, "µs", figures["loop"], figures["ours"], scale=1e6)]
