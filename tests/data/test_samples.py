"""The paper's order against a plain rewriting of it in lists, and its properties: cover, epochs, jumps."""

from itertools import chain, pairwise

import numpy as np
import pytest

from megascale.data.indexed import IndexedDataset, IndexedWriter
from megascale.data.samples import ShardedSamples
from megascale.utils.errors import UserError


def write(prefix, lengths):
    """A data set whose tokens all differ: token number t of the file has the id t."""
    with IndexedWriter(prefix, np.int32) as writer:
        start = 0
        for length in lengths:
            writer.add_document(np.arange(start, start + length))
            start += length
    return IndexedDataset(prefix)


@pytest.fixture
def dataset(tmp_path):
    lengths = np.random.RandomState(0).randint(0, 40, size=120)
    return write(tmp_path / "x", lengths)


def reference_epoch(dataset, shards, seq_length, seed, epoch):
    """Section 4.1.3 with lists: shuffle shards; shuffle documents, join, cut, shuffle windows."""
    result = []
    for shard in np.random.RandomState([seed, epoch, 0, 1]).permutation(len(shards)):
        order = np.random.RandomState([seed, epoch, shard, 2]).permutation(len(shards[shard]))
        flat = list(chain.from_iterable(dataset.tokens(shards[shard][number]).tolist() for number in order))
        windows = [flat[at : at + seq_length + 1] for at in range(0, len(flat) - seq_length, seq_length)]
        result += [
            windows[number] for number in np.random.RandomState([seed, epoch, shard, 3]).permutation(len(windows))
        ]
    return result


def shard_documents(samples):
    bounds = samples._shard_bounds
    return [samples._documents[start:stop].tolist() for start, stop in pairwise(bounds)]


@pytest.mark.parametrize("num_shards", [1, 5])
def test_order_equals_the_plain_rewriting(dataset, num_shards):
    documents = np.arange(0, 120, 2)
    samples = ShardedSamples(dataset, documents, seq_length=16, num_shards=num_shards, seed=11)
    shards = shard_documents(samples)
    assert list(chain.from_iterable(shards)) == documents.tolist()
    expected = [reference_epoch(dataset, shards, 16, 11, epoch) for epoch in range(3)]
    assert all(len(epoch) == samples.samples_per_epoch for epoch in expected)
    found = [samples.sample(number) for number in range(3 * samples.samples_per_epoch)]
    assert found[0].dtype == np.int64
    assert [sample.tolist() for sample in found] == list(chain.from_iterable(expected))


def test_any_sample_without_its_predecessors(dataset):
    """Resuming is a jump: a fresh object asked in reverse gives the same samples."""
    forward = ShardedSamples(dataset, None, 16, 5, seed=3)
    numbers = range(2 * forward.samples_per_epoch)
    expected = [forward.sample(number) for number in numbers]
    backward = ShardedSamples(dataset, None, 16, 5, seed=3)
    for number in reversed(numbers):
        assert np.array_equal(backward.sample(number), expected[number])


def test_each_epoch_predicts_each_token_once_but_for_the_counted_tail(dataset):
    samples = ShardedSamples(dataset, None, 16, 5, seed=3)
    assert samples.num_tokens == dataset.num_tokens
    orders = []
    for epoch in range(2):
        numbers = range(epoch * samples.samples_per_epoch, (epoch + 1) * samples.samples_per_epoch)
        targets = np.concatenate([samples.sample(number)[1:] for number in numbers])
        assert len(np.unique(targets)) == len(targets)
        # Besides the tails, only the first token of each of the 5 shards has nothing before it to be predicted from.
        assert dataset.num_tokens - len(targets) == samples.num_dropped_tokens + 5
        orders.append(targets)
    assert not np.array_equal(*orders), "the second epoch must have an order of its own"


def test_shards_are_equal_to_within_a_document(dataset):
    samples = ShardedSamples(dataset, None, 16, 5, seed=3)
    lengths = dataset.document_lengths
    sizes = [lengths[shard].sum() for shard in shard_documents(samples)]
    assert max(sizes) - min(sizes) <= 2 * lengths.max()


def test_a_shard_stays_together_within_an_epoch(dataset):
    samples = ShardedSamples(dataset, None, 16, 4, seed=3)
    owner = {document: number for number, shard in enumerate(shard_documents(samples)) for document in shard}
    seen = [owner[samples.spans(number)[0].document] for number in range(samples.samples_per_epoch)]
    changes = sum(first != second for first, second in pairwise(seen))
    assert changes == 3


def test_seed_decides(dataset):
    first, second = (ShardedSamples(dataset, None, 16, 5, seed) for seed in (1, 2))
    assert any(not np.array_equal(first.sample(number), second.sample(number)) for number in range(5))


def test_without_shuffling_the_windows_come_in_file_order(dataset):
    samples = ShardedSamples(dataset, None, 16, 1, seed=3, shuffle=False)
    for number in range(samples.samples_per_epoch):
        # Ids count the tokens of the file, so file order is plain counting.
        assert samples.sample(number).tolist() == list(range(16 * number, 16 * number + 17))
    assert np.array_equal(samples.sample(samples.samples_per_epoch), samples.sample(0))
    assert samples.num_dropped_tokens == dataset.num_tokens - 16 * samples.samples_per_epoch - 1


def test_spans_tell_where_a_sample_came_from(dataset):
    samples = ShardedSamples(dataset, None, 16, 5, seed=3)
    for number in range(samples.samples_per_epoch):
        spans = samples.spans(number)
        assert all(span.stop > span.start for span in spans)
        joined = np.concatenate([dataset.tokens(span.document, span.start, span.stop) for span in spans])
        assert np.array_equal(joined, samples.sample(number))
    spans = samples.spans(0)
    first_length = spans[0].stop - spans[0].start
    assert f"document {spans[0].document}, token {spans[0].start}" in samples.origin(0, 0)
    assert f"document {spans[1].document}, token 0" in samples.origin(0, first_length)


def test_frozen_order(tmp_path):
    """The order is part of the format: a run resumed years later must see the same samples."""
    samples = ShardedSamples(write(tmp_path / "x", [7] * 30), None, 8, 2, seed=1234)
    assert [int(samples.sample(number)[0]) for number in range(12)] == [78, 40, 98, 33, 91, 27, 52, 10, 15, 4, 65, 72]


def test_too_many_shards_names_how_many_fit(tmp_path):
    dataset = write(tmp_path / "x", [20, 20, 20])
    with pytest.raises(UserError, match=r"--num-shards 5 with --seq-length 16.*use --num-shards 3 or fewer"):
        ShardedSamples(dataset, None, 16, 5, seed=1)
    assert ShardedSamples(dataset, None, 16, 3, seed=1).samples_per_epoch == 3


def test_too_little_data_for_one_sample(tmp_path):
    dataset = write(tmp_path / "x", [10, 6])
    with pytest.raises(UserError, match=r"hold 16 tokens, too few for one sample of --seq-length 16, which takes 17"):
        ShardedSamples(dataset, None, 16, 1, seed=1)
    with pytest.raises(UserError, match="0 documents"):
        ShardedSamples(dataset, np.empty(0, dtype=np.int64), 16, 5, seed=1)


def test_seeds_outside_the_generator_are_refused(dataset):
    with pytest.raises(UserError, match="--seed -1"):
        ShardedSamples(dataset, None, 16, 1, seed=-1)
