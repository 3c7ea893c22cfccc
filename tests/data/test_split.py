"""The document split: proportions, stability, and what no split may do."""

import numpy as np
import pytest

from megascale.data.split import document_hashes, split_documents
from megascale.utils.errors import UserError


def splitmix64(state):
    """The published generator, one output, in plain integers."""
    mask = 2**64 - 1
    value = (state + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def test_hash_is_splitmix64():
    # The published first output of splitmix64 from state 0.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    # Seed 0 hashes to 0, so the stream starts at state 0.
    expected = [splitmix64((step * 0x9E3779B97F4A7C15) & (2**64 - 1)) for step in range(5)]
    assert document_hashes(np.arange(5), seed=0).tolist() == expected


@pytest.mark.parametrize("ratios", [(29, 1), (0.9, 0.1), (969, 30, 1), (1,), (1, 0, 1), (1, 1, 0)])
def test_parts_cover_every_document_once_in_proportion(ratios):
    num_documents = 40_000
    parts = split_documents(num_documents, ratios, seed=7)
    assert len(parts) == len(ratios)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(num_documents))
    for ratio, part in zip(ratios, parts, strict=True):
        share = ratio / sum(ratios)
        assert np.array_equal(part, np.sort(part))
        # Five standard deviations of a binomial count.
        assert abs(len(part) - share * num_documents) <= 5 * (share * (1 - share) * num_documents) ** 0.5


def test_appending_documents_moves_none():
    small, large = split_documents(5_000, (29, 1), 1234), split_documents(5_500, (29, 1), 1234)
    for before, after in zip(small, large, strict=True):
        assert np.array_equal(after[after < 5_000], before)


def test_another_seed_is_another_split():
    first, second = (split_documents(5_000, (1, 1), seed)[0] for seed in (1, 2))
    overlap = len(np.intersect1d(first, second)) / 5_000
    assert 0.2 < overlap < 0.3  # independent halves share a quarter


def test_chunks_do_not_show(monkeypatch):
    whole = split_documents(1_000, (3, 1), 5)
    monkeypatch.setattr("megascale.data.split._CHUNK", 7)
    for expected, found in zip(whole, split_documents(1_000, (3, 1), 5), strict=True):
        assert np.array_equal(expected, found)


def test_an_empty_part_is_refused():
    with pytest.raises(UserError, match=r"--split 29,1 with --split-seed 1234 leaves part \d.*of the 1 documents"):
        split_documents(1, (29, 1), 1234)
