"""Samples to the batches one rank works on, read ahead by a thread.

Legend: b = micro-batch size, s = sequence length.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megascale.data.samples import SampleSource
from megascale.utils.errors import UserError

PREFETCH_DEPTH: Final = 2

Item = TypeVar("Item")


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass reads.

    index: position among all micro-batches of the global batch, over all data-parallel ranks.
    tokens, targets: int64 [b, s]; targets[:, i] is the token after tokens[:, i].
    loss_weights: float32 [b, s], 1 where the prediction counts and 0 where it does not.
    """

    index: int
    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    loss_weights: NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """One rank's part of the global batch that starts at sample number `first_sample`."""

    first_sample: int
    micro_batches: list[MicroBatch]


class BatchLoader:
    """Cuts a source into global batches and gives one data-parallel rank its part.

    Rank r of d takes samples first + r B/d to first + (r + 1) B/d - 1 of the global batch of B, so the union over the
    ranks is the same for every d, and so is the split into micro-batches.

    Args:
        source: the samples.
        micro_batch_size: samples of one forward pass (b).
        global_batch_size: samples of one step over all ranks; a multiple of b x dp_size.
        dp_rank, dp_size: which data-parallel rank this is, of how many.
        vocab_size: ids of this value and above are refused.
        eod_id: the end-of-document token, None where it is not known (then `eod_mask_loss` must be off).
        eod_mask_loss: no loss for what follows an end-of-document token, as the 2019 code had it.
    """

    def __init__(
        self,
        source: SampleSource,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        vocab_size: int,
        eod_id: int | None,
        eod_mask_loss: bool = False,
    ) -> None:
        if global_batch_size % (micro_batch_size * dp_size):
            raise UserError(
                f"--global-batch-size {global_batch_size} must be a multiple of --micro-batch-size {micro_batch_size} "
                f"x data-parallel size {dp_size} = {micro_batch_size * dp_size}"
            )
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"data-parallel rank {dp_rank} of {dp_size}")
        if eod_mask_loss and eod_id is None:
            raise UserError("--eod-mask-loss needs to know the end-of-document token: give the tokenizer's files")
        self.source = source
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.vocab_size = vocab_size
        self.eod_id = eod_id
        self.eod_mask_loss = eod_mask_loss

    def batch(self, first_sample: int) -> Batch:
        """This rank's micro-batches of the global batch that starts at sample `first_sample`.

        Raises:
            UserError: a token id lies outside the vocabulary; names the data set, document and token.
        """
        num_micro_batches = self.global_batch_size // (self.micro_batch_size * self.dp_size)
        return self._batch(first_sample, num_micro_batches, end=None)

    def iterate(self, first_sample: int, num_batches: int | None) -> Generator[Batch, None, None]:
        """`num_batches` consecutive batches (None: without end), prepared by one thread, up to two ahead.

        Errors of that thread are raised here. Closing the iterator, or dropping it, ends the thread.
        """

        def batches() -> Iterator[Batch]:
            number = 0
            while num_batches is None or number < num_batches:
                yield self.batch(first_sample + number * self.global_batch_size)
                number += 1

        return prefetched(batches(), PREFETCH_DEPTH)

    def validation_batches(self, num_samples_wanted: int) -> Generator[Batch, None, None]:
        """The source's first samples, each exactly once over all ranks, at most one epoch of them.

        Where the last samples do not fill a batch, all ranks still run equally many micro-batches: the places left over
        hold samples of loss weight 0.
        """
        end = min(num_samples_wanted, self.source.samples_per_epoch)

        def batches() -> Iterator[Batch]:
            for first in range(0, end, self.global_batch_size):
                size = min(self.global_batch_size, end - first)
                yield self._batch(first, -(-size // (self.micro_batch_size * self.dp_size)), end)

        return prefetched(batches(), PREFETCH_DEPTH)

    def _batch(self, first_sample: int, num_micro_batches: int, end: int | None) -> Batch:
        """`num_micro_batches` for this rank; samples from number `end` on are padding."""
        first_index = self.dp_rank * num_micro_batches
        micro_batches = []
        for index in range(first_index, first_index + num_micro_batches):
            start = first_sample + index * self.micro_batch_size
            micro_batches.append(self._micro_batch(index, range(start, start + self.micro_batch_size), end))
        return Batch(first_sample, micro_batches)

    def _micro_batch(self, index: int, numbers: range, end: int | None) -> MicroBatch:
        length = self.source.seq_length
        rows = np.zeros((len(numbers), length + 1), dtype=np.int64)
        loss_weights = np.zeros((len(numbers), length), dtype=np.float32)
        for row, number in enumerate(numbers):
            if end is None or number < end:
                rows[row] = self.source.sample(number)
                loss_weights[row] = 1
        if rows.min() < 0 or rows.max() >= self.vocab_size:
            self._refuse_id(rows, numbers)
        tokens = np.ascontiguousarray(rows[:, :-1])
        if self.eod_mask_loss:
            loss_weights[tokens == self.eod_id] = 0
        return MicroBatch(index, tokens, np.ascontiguousarray(rows[:, 1:]), loss_weights)

    def _refuse_id(self, rows: NDArray[np.int64], numbers: range) -> None:
        row, position = (int(where) for where in np.argwhere((rows < 0) | (rows >= self.vocab_size))[0])
        raise UserError(
            f"{self.source.origin(numbers[row], position)}: id {rows[row, position]} is not below the vocabulary size "
            f"{self.vocab_size}. The data set was prepared with another tokenizer than the run's, or is damaged "
            "(tools/inspect_dataset.py --verify tells)"
        )


@dataclass(frozen=True)
class _Failure:
    """An exception on its way from the reading thread to the consumer."""

    error: BaseException


@dataclass(frozen=True)
class _Finished:
    """Says that the reading thread has no more items."""


def prefetched(items: Iterable[Item], depth: int) -> Generator[Item, None, None]:
    """The same items, computed by one thread that runs up to `depth` of them ahead.

    The thread starts when the first item is asked for. An exception in it is raised to the consumer after the items
    that preceded it; closing or dropping the iterator stops the thread after the item it is at.
    """
    with closing(_Reader(items, depth)) as reader:
        while True:
            item = reader.get()
            if isinstance(item, _Finished):
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item


class _Reader(Generic[Item]):
    """The thread behind `prefetched`, and the queue between it and the consumer."""

    def __init__(self, items: Iterable[Item], depth: int) -> None:
        # One item less than `depth`, because the thread holds one more while it waits for room.
        self._queue: queue.Queue[Item | _Failure | _Finished] = queue.Queue(max(depth - 1, 1))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), name="megascale-data", daemon=True)
        self._thread.start()

    def get(self) -> Item | _Failure | _Finished:
        return self._queue.get()

    def close(self) -> None:
        """Stops the thread and waits for it; harmless when it has ended."""
        self._closed.set()
        while self._thread.is_alive():
            self._drain()
            self._thread.join(timeout=0.05)

    def _drain(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            return

    def _run(self, items: Iterable[Item]) -> None:
        try:
            for item in items:
                self._queue.put(item)
                if self._closed.is_set():
                    return
            self._queue.put(_Finished())
        except BaseException as error:  # raised again where the items are used
            self._queue.put(_Failure(error))
