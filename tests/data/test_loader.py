"""Batches: every data-parallel size sees the same stream, validation sees each sample once, the thread behaves."""

import threading
import time

import numpy as np
import pytest

from megascale.data.loader import BatchLoader, prefetched
from megascale.utils.errors import UserError

EOD = 0


class Counting:
    """A source of `size` samples: sample g is g * 10, g * 10 + 1, ..., all ids at least 1."""

    def __init__(self, size=1000, seq_length=4):
        self.samples_per_epoch, self.seq_length = size, seq_length

    def sample(self, index):
        return np.arange(1 + index * 10, 2 + index * 10 + self.seq_length, dtype=np.int64)

    def origin(self, index, position):
        return f"data set D, document {index}, token {position}"


def loader(source=None, dp_rank=0, dp_size=1, micro=2, batch=8, vocab_size=10**6, eod_id=EOD, eod_mask_loss=False):
    return BatchLoader(source or Counting(), micro, batch, dp_rank, dp_size, vocab_size, eod_id, eod_mask_loss)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_every_data_parallel_size_sees_the_same_stream(dp_size):
    """The micro-batches of all ranks, put in order of their index, are those of one process."""
    for first in (0, 8, 40):
        alone = loader().batch(first).micro_batches
        together = [
            micro_batch
            for rank in range(dp_size)
            for micro_batch in loader(dp_rank=rank, dp_size=dp_size).batch(first).micro_batches
        ]
        assert [micro_batch.index for micro_batch in together] == [0, 1, 2, 3]
        for expected, found in zip(alone, together, strict=True):
            assert np.array_equal(expected.tokens, found.tokens)
            assert np.array_equal(expected.targets, found.targets)


def test_targets_are_the_next_tokens():
    micro_batch = loader().batch(8).micro_batches[1]
    assert micro_batch.tokens.tolist() == [[101, 102, 103, 104], [111, 112, 113, 114]]
    assert micro_batch.targets.tolist() == [[102, 103, 104, 105], [112, 113, 114, 115]]
    assert micro_batch.loss_weights.tolist() == [[1] * 4] * 2
    assert (micro_batch.tokens.dtype, micro_batch.targets.dtype) == (np.int64, np.int64)
    assert micro_batch.loss_weights.dtype == np.float32
    assert micro_batch.tokens.flags.c_contiguous
    assert micro_batch.targets.flags.c_contiguous


def test_iterating_equals_asking_and_resuming_is_a_jump():
    reader = loader()
    straight = list(reader.iterate(0, 5))
    assert [batch.first_sample for batch in straight] == [0, 8, 16, 24, 32]
    resumed = list(reader.iterate(24, 2))
    for expected, found in zip(straight[3:], resumed, strict=True):
        for left, right in zip(expected.micro_batches, found.micro_batches, strict=True):
            assert np.array_equal(left.tokens, right.tokens)
    endless = reader.iterate(0, None)
    assert [next(endless).first_sample for _ in range(7)][-1] == 48


class WithEnds(Counting):
    def sample(self, index):
        return np.array([5, EOD, 7, 8, EOD])


def test_eod_mask_drops_what_follows_an_end_of_document():
    plain, masked = (loader(WithEnds(), eod_mask_loss=flag).batch(0).micro_batches[0] for flag in (False, True))
    assert plain.loss_weights[0].tolist() == [1, 1, 1, 1]
    # The input at position 1 is EOD, so the prediction of 7 is not scored; predicting the final EOD is.
    assert masked.loss_weights[0].tolist() == [1, 0, 1, 1]
    assert np.array_equal(plain.tokens, masked.tokens)


def test_ids_outside_the_vocabulary_name_their_document():
    # Sample 3 of micro-batch 1 starts at 31: the first id not below 33 is its third token.
    with pytest.raises(UserError, match="data set D, document 3, token 2: id 33 is not below the vocabulary size 33"):
        loader(vocab_size=33).batch(0)
    # The highest id of the batch is 75.
    assert loader(vocab_size=76).batch(0)
    with pytest.raises(UserError, match="id 75 is not below the vocabulary size 75"):
        loader(vocab_size=75).batch(0)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize(("wanted", "size"), [(8, 100), (16, 100), (21, 100), (1000, 13), (3, 100), (1, 100)])
def test_validation_reads_each_sample_once_on_any_number_of_ranks(wanted, size, dp_size):
    ranks = [list(loader(Counting(size), rank, dp_size).validation_batches(wanted)) for rank in range(dp_size)]
    for batches in zip(*ranks, strict=True):
        assert len({len(batch.micro_batches) for batch in batches}) == 1, "a rank without work would hang the others"
    seen = [
        int(row[0])
        for batches in ranks
        for batch in batches
        for micro_batch in batch.micro_batches
        for row, weights in zip(micro_batch.tokens, micro_batch.loss_weights, strict=True)
        if weights.all()
    ]
    scored = sum(micro.loss_weights.sum() for batches in ranks for batch in batches for micro in batch.micro_batches)
    assert sorted(seen) == [1 + number * 10 for number in range(min(wanted, size))]
    assert scored == 4 * min(wanted, size), "padding has weight 0"


def test_wrong_sizes_are_refused():
    with pytest.raises(UserError, match=r"--global-batch-size 8 .*--micro-batch-size 3 x data-parallel size 2 = 6"):
        loader(micro=3, dp_size=2)
    with pytest.raises(UserError, match="--eod-mask-loss"):
        loader(eod_id=None, eod_mask_loss=True)


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name == "megascale-data"]


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def test_the_thread_runs_two_ahead_and_no_more():
    started = []

    def items():
        for number in range(100):
            started.append(number)
            yield number

    reader = prefetched(items(), 2)
    assert next(reader) == 0
    # One taken, one in the queue, one in the thread's hand.
    wait_for(lambda: len(started) == 3)
    time.sleep(0.05)
    assert len(started) == 3
    assert list(reader) == list(range(1, 100))
    assert data_threads() == []


def test_an_error_in_the_thread_reaches_the_consumer_after_what_preceded_it():
    def items():
        yield 1
        yield 2
        raise UserError("broken file")

    reader = prefetched(items(), 2)
    assert [next(reader), next(reader)] == [1, 2]
    with pytest.raises(UserError, match="broken file"):
        next(reader)
    assert data_threads() == []


def test_closing_early_ends_the_thread():
    batches = loader().iterate(0, None)
    next(batches)
    assert len(data_threads()) == 1
    batches.close()
    assert data_threads() == []


def test_dropping_the_iterator_ends_the_thread():
    for _ in loader().iterate(0, None):
        break
    wait_for(lambda: data_threads() == [])
