"""Several data sets read as one, in fixed proportions, each sample number decided on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from megascale.data.samples import SampleSource
from megascale.utils.errors import UserError


@dataclass(frozen=True)
class _Fork:
    """A node of the tree that hands each sample number to its left or right part; a leaf is a source's number."""

    left: _Fork | int
    right: _Fork | int
    share: Fraction  # of the left part

    def num_left(self, count: int) -> int:
        """How many of the first `count` samples go left: count x share, rounded half up in exact arithmetic."""
        numerator, denominator = self.share.numerator, self.share.denominator
        return (2 * count * numerator + denominator) // (2 * denominator)


class Blend:
    """Interleaves sources so that after any number n of samples each source gave its share of n, give or take one.

    The sources are the leaves of a balanced binary tree; at each fork the left part receives the rounded share of what
    arrives, which depends on the count alone. A source is at most half a sample off per level of the tree, so within
    1 for up to four sources and within ceil(log2 K) / 2 for K. Nothing is random and nothing is stored, so starting
    anywhere costs nothing.

    Args:
        weights: one number above 0 for each source, in any unit; taken as the exact fractions they are.
        sources: what to read; all of one sequence length.
    """

    def __init__(self, weights: Sequence[float | Fraction], sources: Sequence[SampleSource]) -> None:
        if len(weights) != len(sources) or not sources:
            raise ValueError(f"{len(weights)} weights for {len(sources)} sources")
        if any(not weight > 0 for weight in weights):
            raise UserError(
                f"weights of --data-path must be above 0, not {', '.join(str(weight) for weight in weights)}"
            )
        lengths = {source.seq_length for source in sources}
        if len(lengths) != 1:
            raise ValueError(f"sources of different sequence lengths {sorted(lengths)}")
        self.sources = tuple(sources)
        exact = [Fraction(weight) for weight in weights]
        self.weights = tuple(weight / sum(exact) for weight in exact)
        self._tree = _grow(self.weights, 0, len(sources))

    @property
    def seq_length(self) -> int:
        """Tokens a sample trains on; the sample has one more."""
        return self.sources[0].seq_length

    @property
    def samples_per_epoch(self) -> int:
        """The most samples that can be read before any source repeats one of its own."""
        sizes = [source.samples_per_epoch for source in self.sources]
        low, high = 0, sum(sizes)  # counts never fall, so the last number that fits is found by bisection
        while low < high:
            middle = (low + high + 1) // 2
            if all(count <= size for count, size in zip(self.counts(middle), sizes, strict=True)):
                low = middle
            else:
                high = middle - 1
        return low

    def counts(self, num_samples: int) -> tuple[int, ...]:
        """How many of the first `num_samples` samples each source gives."""
        counts = [0] * len(self.sources)
        pending: list[tuple[_Fork | int, int]] = [(self._tree, num_samples)]
        while pending:
            node, count = pending.pop()
            if isinstance(node, int):
                counts[node] = count
            else:
                left = node.num_left(count)
                pending += [(node.left, left), (node.right, count - left)]
        return tuple(counts)

    def locate(self, index: int) -> tuple[int, int]:
        """The source that gives sample number `index`, and the number of that sample within the source."""
        node = self._tree
        while not isinstance(node, int):
            left = node.num_left(index)
            node, index = (node.left, left) if node.num_left(index + 1) > left else (node.right, index - left)
        return node, index

    def sample(self, index: int) -> NDArray[np.int64]:
        """Sample number `index` >= 0, int64 [seq_length + 1]."""
        source, within = self.locate(index)
        return self.sources[source].sample(within)

    def origin(self, index: int, position: int) -> str:
        """Names the data set and document that token `position` of the sample comes from."""
        source, within = self.locate(index)
        return self.sources[source].origin(within, position)


def _grow(weights: tuple[Fraction, ...], first: int, last: int) -> _Fork | int:
    """The balanced tree over sources `first` to `last` (exclusive)."""
    if last - first == 1:
        return first
    middle = (first + last) // 2
    share = sum(weights[first:middle], Fraction(0)) / sum(weights[first:last], Fraction(0))
    return _Fork(_grow(weights, first, middle), _grow(weights, middle, last), share)
