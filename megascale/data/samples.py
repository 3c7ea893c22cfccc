"""The paper's sample order as a pure function of (seed, sample number): no state, no files, any number of readers.

Megatron-LM section 4.1.3: the documents lie in equal shards; in each epoch the shards come in a new random order, the
documents of a shard are shuffled, laid end to end and cut into windows, and the windows of the shard are shuffled.
Every permutation is drawn afresh from (seed, epoch, shard), so any sample can be computed without its predecessors.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from megascale.data.indexed import IndexedDataset
from megascale.utils.errors import UserError

# The last number of each random seed: what the permutation is for.
_SHARD_ORDER: Final = 1
_DOCUMENT_ORDER: Final = 2
_WINDOW_ORDER: Final = 3
_MAX_SEED: Final = 2**32 - 1


class SampleSource(Protocol):
    """An endless numbered sequence of samples; what a `BatchLoader` reads."""

    @property
    def seq_length(self) -> int:
        """Tokens a sample trains on; the sample has one more."""

    @property
    def samples_per_epoch(self) -> int:
        """How many samples there are before the first repetition."""

    def sample(self, index: int) -> NDArray[np.int64]:
        """Sample number `index` >= 0, int64 [seq_length + 1]."""

    def origin(self, index: int, position: int) -> str:
        """Names the data set and document that token `position` of the sample comes from, for messages."""


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `stop` of one document."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class _ShardTable:
    """One shard in the order of one epoch.

    documents: the shard's documents as they are laid end to end. ends: int64, where each ends in that flat sequence.
    windows: the windows of the flat sequence in the order they are read.
    """

    documents: NDArray[Any]
    ends: NDArray[np.int64]
    windows: NDArray[Any]


class ShardedSamples:
    """Windows of `seq_length` + 1 tokens over some documents of one data set, in the paper's order.

    Consecutive windows of a shard overlap by one token, so that each token is predicted once; what remains of a shard
    after its last whole window is left out of that epoch (`num_dropped_tokens`; another remainder each epoch, for
    the documents are shuffled).

    Args:
        dataset: where the tokens are.
        documents: indices of the documents to use, sorted; None for all.
        seq_length: tokens a sample trains on.
        num_shards: consecutive runs of documents, as near to equal in tokens as document bounds allow.
        seed: of all shuffling, 0 to 2^32 - 1.
        shuffle: off = shards, documents and windows in file order, the same each epoch (validation).

    Raises:
        UserError: a shard would hold no whole window.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: NDArray[np.int64] | None,
        seq_length: int,
        num_shards: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        if not 0 <= seed <= _MAX_SEED:
            raise UserError(f"--seed {seed} must lie between 0 and {_MAX_SEED}")
        self.dataset = dataset
        self.num_shards = num_shards
        self.seed = seed
        self.shuffle = shuffle
        self._seq_length = seq_length
        if documents is None:
            documents = np.arange(dataset.num_documents, dtype=np.int64)
        lengths = dataset.document_lengths[documents]
        self.num_documents = len(documents)
        self.num_tokens = int(lengths.sum())
        ends = np.cumsum(lengths)
        self._shard_bounds = _equal_shards(ends, num_shards)
        shard_tokens = _tokens_between(ends, self._shard_bounds)
        self._windows_of_shard = np.maximum(shard_tokens - 1, 0) // seq_length
        if (self._windows_of_shard == 0).any():
            self._refuse_short_shards(ends)
        self._samples_per_epoch = int(self._windows_of_shard.sum())
        self.num_dropped_tokens = int((shard_tokens - 1 - self._windows_of_shard * seq_length).sum())
        # Kept for the whole run, so in 4 bytes each where they fit.
        self._documents = _narrow(documents)
        self._lengths = _narrow(lengths)
        # Two tables, because a batch may straddle two shards; lru_cache is safe to share between threads.
        self._table = functools.lru_cache(maxsize=2)(self._build_table)
        self._shards_of_epoch = functools.lru_cache(maxsize=4)(self._order_shards)

    @property
    def seq_length(self) -> int:
        """Tokens a sample trains on; the sample has one more."""
        return self._seq_length

    @property
    def samples_per_epoch(self) -> int:
        """Windows in one pass over the documents; the same in every epoch."""
        return self._samples_per_epoch

    def sample(self, index: int) -> NDArray[np.int64]:
        """Sample number `index` >= 0, int64 [seq_length + 1]: what is trained on and one token more."""
        tokens = np.empty(self._seq_length + 1, dtype=np.int64)
        filled = 0
        for span in self.spans(index):
            end = filled + span.stop - span.start
            tokens[filled:end] = self.dataset.tokens(span.document, span.start, span.stop)
            filled = end
        assert filled == self._seq_length + 1
        return tokens

    def spans(self, index: int) -> list[Span]:
        """The pieces of documents that sample number `index` is made of, in order; for audits."""
        epoch, within_epoch = divmod(index, self._samples_per_epoch)
        shards, starts = self._shards_of_epoch(epoch)
        position = int(np.searchsorted(starts, within_epoch, side="right")) - 1
        table = self._table(epoch, int(shards[position]))
        start = int(table.windows[within_epoch - int(starts[position])]) * self._seq_length
        stop = start + self._seq_length + 1
        row = int(np.searchsorted(table.ends, start, side="right"))
        spans: list[Span] = []
        row_start = int(table.ends[row - 1]) if row else 0
        while start < stop:
            row_end = int(table.ends[row])
            if row_end > start:  # a document without tokens has no span
                until = min(stop, row_end)
                spans.append(Span(int(table.documents[row]), start - row_start, until - row_start))
                start = until
            row_start = row_end
            row += 1
        return spans

    def origin(self, index: int, position: int) -> str:
        """Names the data set and document that token `position` of the sample comes from."""
        for span in self.spans(index):
            if position < span.stop - span.start:
                return f"data set {self.dataset.prefix}, document {span.document}, token {span.start + position}"
            position -= span.stop - span.start
        raise IndexError(f"position {position} past the end of sample {index}")

    def _order_shards(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The shards in the order of an epoch, and the first sample of each within the epoch."""
        order = np.arange(self.num_shards)
        if self.shuffle:
            order = self._random(epoch, 0, _SHARD_ORDER).permutation(self.num_shards)
        ends = np.cumsum(self._windows_of_shard[order])
        return order, ends - self._windows_of_shard[order]

    def _build_table(self, epoch: int, shard: int) -> _ShardTable:
        """Shuffles one shard; for 2 million documents about a fifth of a second."""
        rows = slice(self._shard_bounds[shard], self._shard_bounds[shard + 1])
        documents, lengths = self._documents[rows], self._lengths[rows]
        num_windows = int(self._windows_of_shard[shard])
        windows = np.arange(num_windows)
        if self.shuffle:
            order = self._random(epoch, shard, _DOCUMENT_ORDER).permutation(len(documents))
            documents, lengths = documents[order], lengths[order]
            windows = self._random(epoch, shard, _WINDOW_ORDER).permutation(num_windows)
        return _ShardTable(documents, np.cumsum(lengths, dtype=np.int64), _narrow(windows))

    def _random(self, epoch: int, shard: int, purpose: int) -> np.random.RandomState:
        """A fresh generator. RandomState, because NumPy promises never to change its streams."""
        return np.random.RandomState([self.seed, epoch, shard, purpose])

    def _refuse_short_shards(self, ends: NDArray[np.int64]) -> None:
        have = f"data set {self.dataset.prefix}: its {self.num_documents} documents hold {self.num_tokens} tokens"
        need = self._seq_length + 1
        for fewer in range(self.num_shards - 1, 0, -1):
            if (_tokens_between(ends, _equal_shards(ends, fewer)) >= need).all():
                raise UserError(
                    f"{have}, too few for --num-shards {self.num_shards} with --seq-length {self._seq_length} (each "
                    f"shard needs {need} tokens in whole documents); use --num-shards {fewer} or fewer, or more data"
                )
        raise UserError(
            f"{have}, too few for one sample of --seq-length {self._seq_length}, which takes {need}; use more data "
            "or a shorter --seq-length"
        )


def _equal_shards(ends: NDArray[np.int64], num_shards: int) -> list[int]:
    """Bounds (num_shards + 1) that cut documents with these cumulative ends into runs of nearly equal tokens."""
    num_documents = len(ends)
    total = int(ends[-1]) if num_documents else 0
    bounds = [0]
    for shard in range(1, num_shards):
        target = total * shard // num_shards
        after = int(np.searchsorted(ends, target, side="left"))
        # Cut before or after the document that the target falls into, whichever is nearer.
        before = int(ends[after - 1]) if after else 0
        cut = after + 1 if after < num_documents and int(ends[after]) - target < target - before else after
        bounds.append(max(cut, bounds[-1]))
    return [*bounds, num_documents]


def _tokens_between(ends: NDArray[np.int64], bounds: list[int]) -> NDArray[np.int64]:
    """Tokens of each run of documents between neighbouring bounds."""
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    return np.diff(starts[np.array(bounds)])


def _narrow(values: NDArray[np.int64]) -> NDArray[Any]:
    """The same numbers in int32 where they fit."""
    fits = not values.size or int(values.max()) <= np.iinfo(np.int32).max
    return values.astype(np.int32) if fits else values
