"""Inspection: what is shown is what is there, and what is damaged is found."""

import numpy as np
import pytest

from megascale.data.indexed import IndexedDataset, IndexedWriter
from megascale.data.preprocess import PreprocessOptions, preprocess
from megascale.data.report import describe_dataset, length_histogram, show_document, verify_dataset
from megascale.data.sidecar import read_sidecar
from megascale.data.tokenizer import TokenizerFiles, build_tokenizer, train_byte_level_bpe
from megascale.utils.errors import UserError

TEXTS = ["the cat sat", "on the mat " * 10, "the end"]


@pytest.fixture
def prefix(tmp_path):
    train_byte_level_bpe(TEXTS, 270, tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    files = TokenizerFiles(tokenizer_model=str(tmp_path / "tokenizer.json"))
    options = PreprocessOptions(
        (str(tmp_path / "a.txt"),), str(tmp_path / "a"), files, plain_text="line", append_eod=True
    )
    (prefix,) = preprocess(options, show_progress=False)
    return prefix


def test_description(prefix):
    text = describe_dataset(IndexedDataset(prefix), read_sidecar(prefix))
    for part in ("documents  3", "of type uint16", "ends in id 0", "left out   nothing", "key 'text'"):
        assert part in text
    assert "record     none" in describe_dataset(IndexedDataset(prefix), None)


def test_histogram_counts_every_document():
    lengths = np.array([0, 1, 2, 3, 3, 4, 7, 8, 1000])
    rows = [line.split() for line in length_histogram(lengths).splitlines()[1:]]
    found = {(int(low.replace(",", "")), int(high.replace(",", ""))): int(count) for low, _, high, count, *_ in rows}
    assert sum(found.values()) == len(lengths)
    for (low, high), count in found.items():
        assert count == ((lengths >= low) & (lengths <= high)).sum()
    assert length_histogram(np.array([], dtype=np.int64)) == "no documents"


def test_documents_read_back(prefix, tmp_path):
    tokenizer = build_tokenizer(tokenizer_model=str(tmp_path / "tokenizer.json"))
    dataset = IndexedDataset(prefix)
    assert TEXTS[2] + tokenizer.eod_token in show_document(dataset, 2, tokenizer, 100)
    assert "more tokens" in show_document(dataset, 1, tokenizer, 5)
    assert " ".join(str(token) for token in dataset.tokens(0)) in show_document(dataset, 0, None, 100)
    with pytest.raises(UserError, match="documents 0 to 2"):
        show_document(dataset, 3, tokenizer, 100)


def test_verify_accepts_a_good_set(prefix):
    text = verify_dataset(IndexedDataset(prefix), read_sidecar(prefix), None, show_progress=False)
    assert text.count("as recorded") == 2
    assert "not checked" in verify_dataset(IndexedDataset(prefix), None, 300, show_progress=False)


def test_verify_finds_one_changed_byte(prefix):
    """A changed id of the same vocabulary, which no size tells."""
    with open(prefix + ".bin", "r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    with pytest.raises(UserError, match=r"\.bin is damaged or was replaced"):
        verify_dataset(IndexedDataset(prefix), read_sidecar(prefix), None, show_progress=False)


def test_verify_finds_ids_outside_the_vocabulary(tmp_path):
    with IndexedWriter(tmp_path / "x", np.int32) as writer:
        for ids in ([1, 2], [3, 500], [4]):
            writer.add_document(ids)
    dataset = IndexedDataset(tmp_path / "x")
    with pytest.raises(UserError, match="document 1 holds the id 500, not below the vocabulary size 400"):
        verify_dataset(dataset, None, 400, show_progress=False)
    with pytest.raises(UserError, match="--vocab-size"):
        verify_dataset(dataset, None, None, show_progress=False)
    with pytest.raises(UserError, match="another tokenizer"):
        show_document(dataset, 1, _SmallVocabulary(), 10)


class _SmallVocabulary:
    vocab_size = 400
