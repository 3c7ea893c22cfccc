"""Which documents train and which validate: a random split that does not move when documents are appended."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megascale.utils.errors import UserError

# splitmix64 (Steele, Lea and Flood 2014): the golden-ratio increment and the two multipliers of its output function.
_INCREMENT: Final = 0x9E3779B97F4A7C15
_MULTIPLIERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK: Final = 2**64 - 1
_CHUNK: Final = 1 << 20


def split_documents(num_documents: int, ratios: Sequence[float], seed: int) -> list[NDArray[np.int64]]:
    """Assigns each document to one part at random in proportion to `ratios`.

    A document's part depends on its index, `ratios` and `seed` alone (a 64-bit hash compared with exact thresholds), so
    appending documents to a data set never moves the ones already there. The parts' sizes are therefore near the
    ratios, not exactly on them.

    Returns:
        For each ratio the sorted document indices of its part, int64; empty where the ratio is 0.

    Raises:
        UserError: a part with a ratio above 0 received no document.
    """
    total = sum(Fraction(ratio) for ratio in ratios)
    running = Fraction(0)
    thresholds: list[int] = []
    for ratio in ratios[:-1]:
        running += Fraction(ratio)
        thresholds.append(min(int(running / total * 2**64), _MASK))
    # A trailing ratio of 0 must receive nothing, not even a hash at the very top.
    last_used = max(index for index, ratio in enumerate(ratios) if ratio > 0)

    pieces: list[list[NDArray[np.int64]]] = [[] for _ in ratios]
    for start in range(0, num_documents, _CHUNK):
        documents = np.arange(start, min(start + _CHUNK, num_documents), dtype=np.int64)
        hashes = document_hashes(documents, seed)
        parts = np.searchsorted(np.array(thresholds, dtype=np.uint64), hashes, side="right")
        np.minimum(parts, last_used, out=parts)
        for index in range(len(ratios)):
            pieces[index].append(documents[parts == index])
    result = [np.concatenate(piece) if piece else np.empty(0, dtype=np.int64) for piece in pieces]
    for index, (ratio, documents) in enumerate(zip(ratios, result, strict=True)):
        if ratio > 0 and len(documents) == 0:
            raise UserError(
                f"--split {','.join(f'{ratio:g}' for ratio in ratios)} with --split-seed {seed} leaves part "
                f"{index + 1} without any of the {num_documents} documents: prepare the data as more documents, choose "
                "another --split or --split-seed, or give validation data of its own with --valid-data-path"
            )
    return result


def document_hashes(documents: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """A 64-bit hash of each document index keyed by `seed`: splitmix64's stream started at the hash of the seed."""
    start = int(_mix(np.array([seed & _MASK], dtype=np.uint64))[0])
    steps = documents.astype(np.uint64) + np.uint64(1)
    return _mix(steps * np.uint64(_INCREMENT) + np.uint64(start))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's output function, modulo 2^64 (array arithmetic on uint64 wraps around)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    return values ^ (values >> np.uint64(31))
