"""The `.bin`/`.idx` pair against a reference written with `struct` alone, and every way a file can be wrong."""

import struct
from itertools import chain

import numpy as np
import pytest

from megascale.data import indexed
from megascale.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from megascale.utils.errors import UserError

DOCUMENTS = [[5, 6, 7], [], [65499], [1, 2, 3, 4, 0]]


def reference_bytes(documents, code, token_format):
    """Megatron's layout written out by hand: one sequence per document."""
    flat = b"".join(struct.pack(f"<{len(ids)}{token_format}", *ids) for ids in documents)
    count = len(documents)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, count, count + 1)
    index += b"".join(struct.pack("<i", len(ids)) for ids in documents)
    offset = 0
    for ids in documents:
        index += struct.pack("<q", offset)
        offset += len(ids) * struct.calcsize("<" + token_format)
    index += b"".join(struct.pack("<q", bound) for bound in range(count + 1))
    return flat, index


@pytest.fixture
def prefix(tmp_path):
    """A good pair on disk."""
    with IndexedWriter(tmp_path / "good", np.uint16) as writer:
        for ids in DOCUMENTS:
            writer.add_document(ids)
    return tmp_path / "good"


@pytest.mark.parametrize(("dtype", "code", "token_format"), [(np.uint16, 8, "H"), (np.int32, 4, "i")])
def test_writes_megatrons_bytes(tmp_path, dtype, code, token_format):
    with IndexedWriter(tmp_path / "x", dtype) as writer:
        for ids in DOCUMENTS:
            writer.add_document(ids)
    flat, index = reference_bytes(DOCUMENTS, code, token_format)
    assert (tmp_path / "x.bin").read_bytes() == flat
    assert (tmp_path / "x.idx").read_bytes() == index
    assert len(index) == 34 + 20 * len(DOCUMENTS) + 8
    assert writer.bin_file.bytes == len(flat)
    assert writer.idx_file.bytes == len(index)


def test_reads_what_was_written(prefix):
    dataset = IndexedDataset(prefix)
    assert dataset.num_documents == len(dataset) == 4
    assert dataset.num_tokens == 9
    assert dataset.dtype == np.uint16
    assert dataset.document_lengths.dtype == np.int64
    assert dataset.document_lengths.tolist() == [3, 0, 1, 5]
    assert [dataset.tokens(number).tolist() for number in range(4)] == DOCUMENTS
    assert dataset.tokens(3, 1, 4).tolist() == [2, 3, 4]
    assert [dataset.document_at(token) for token in range(9)] == [0, 0, 0, 2, 3, 3, 3, 3, 3]
    assert np.concatenate(list(dataset.chunks(4))).tolist() == list(chain.from_iterable(DOCUMENTS))
    for document, start, stop in [(4, 0, None), (-1, 0, None), (0, 0, 4), (0, 2, 1)]:
        with pytest.raises(IndexError):
            dataset.tokens(document, start, stop)


def test_documents_of_several_sequences(tmp_path):
    documents = [[[1, 2], [3]], [], [[4, 5, 6]], [[7], [], [8, 9]]]
    with IndexedWriter(tmp_path / "x", np.uint16) as writer:
        for sequences in documents:
            for ids in sequences:
                writer.append(ids)
                writer.end_sequence()
            writer.end_document()
    dataset = IndexedDataset(tmp_path / "x")
    assert (dataset.num_documents, dataset.num_sequences, dataset.num_tokens) == (4, 6, 9)
    assert dataset.document_lengths.tolist() == [3, 0, 3, 3]
    assert [dataset.tokens(number).tolist() for number in range(4)] == [[1, 2, 3], [], [4, 5, 6], [7, 8, 9]]
    assert dataset.sequence_lengths(3).tolist() == [1, 0, 2]
    assert [dataset.document_at(token) for token in range(9)] == [0, 0, 0, 2, 2, 2, 3, 3, 3]


def test_a_sequence_may_arrive_in_pieces(tmp_path):
    with IndexedWriter(tmp_path / "x", np.uint16) as writer:
        writer.append([1, 2])
        writer.append(np.array([3], dtype=np.int64))
        writer.append([])
        writer.end_document()
    assert IndexedDataset(tmp_path / "x").tokens(0).tolist() == [1, 2, 3]
    assert IndexedDataset(tmp_path / "x").num_sequences == 1


def test_columns_longer_than_a_chunk(tmp_path, monkeypatch):
    """The chunked passes of writer and reader carry their running sums across chunks."""
    monkeypatch.setattr(indexed, "_CHUNK", 3)
    documents = [[number] * (number % 5) for number in range(20)]
    with IndexedWriter(tmp_path / "x", np.uint16) as writer:
        for ids in documents:
            writer.add_document(ids)
    assert (tmp_path / "x.idx").read_bytes() == reference_bytes(documents, 8, "H")[1]
    assert [IndexedDataset(tmp_path / "x").tokens(number).tolist() for number in range(20)] == documents


def test_empty_data_set(tmp_path):
    with IndexedWriter(tmp_path / "x", np.int32):
        pass
    dataset = IndexedDataset(tmp_path / "x")
    assert (dataset.num_documents, dataset.num_tokens, dataset.document_lengths.tolist()) == (0, 0, [])


def test_token_type_follows_megatrons_rule():
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


@pytest.mark.parametrize("ids", [[65536], [-1]])
def test_ids_that_do_not_fit_are_refused_not_wrapped(tmp_path, ids):
    with pytest.raises(ValueError, match="do not fit uint16"), IndexedWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document(ids)
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_writing_leaves_the_old_pair(prefix):
    before = prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()
    writing = IndexedWriter(prefix, np.uint16, overwrite=True)
    with pytest.raises(ValueError, match="do not fit"), writing as writer:
        writer.add_document([9, 70_000])
    assert (prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()) == before
    assert len(list(prefix.parent.iterdir())) == 2


def test_existing_files_are_kept_unless_told(prefix):
    with pytest.raises(UserError, match=r"good\.bin exists.*--overwrite"):
        IndexedWriter(prefix, np.uint16)
    with IndexedWriter(prefix, np.uint16, overwrite=True) as writer:
        writer.add_document([42])
    assert IndexedDataset(prefix).tokens(0).tolist() == [42]


def test_a_kill_between_the_two_renames_leaves_no_mixed_pair(prefix, monkeypatch):
    """When the new .bin has its name and the new .idx has not, the old .idx must be gone."""
    flushes = []

    def die_at_second_directory_sync(path):
        flushes.append(path)
        raise KeyboardInterrupt

    monkeypatch.setattr("megascale.utils.files.fsync_directory", die_at_second_directory_sync)
    with pytest.raises(KeyboardInterrupt), IndexedWriter(prefix, np.uint16, overwrite=True) as writer:
        writer.add_document([1, 1, 1, 1, 1, 1, 1, 1, 1])  # as many tokens as before: sizes alone would not tell
    assert len(flushes) == 1
    with pytest.raises(UserError, match=r"good\.idx does not exist"):
        IndexedDataset(prefix)


def patched(index, position, format, value):
    data = bytearray(index)
    struct.pack_into("<" + format, data, position, value)
    return bytes(data)


# Offsets of the good pair: lengths at 34, byte offsets at 34 + 4 x 4 = 50, bounds at 50 + 4 x 8 = 82.
CORRUPTIONS = {
    "empty": (lambda index: b"", "starts with"),
    "foreign": (lambda index: b"TNTIDX\x00\x00" + index[8:], "not an index of Megatron's memory-mapped format"),
    "header cut": (lambda index: index[:20], "shorter than its header"),
    "version": (lambda index: patched(index, 9, "Q", 2), "format version 2"),
    "float tokens": (lambda index: patched(index, 17, "B", 7), "dtype code 7"),
    "no such dtype": (lambda index: patched(index, 17, "B", 0), "dtype code 0"),
    "column cut": (lambda index: index[:-1], "cut off or damaged"),
    "too long": (lambda index: index + b"\x00", "cut off or damaged"),
    "absurd count": (lambda index: patched(index, 18, "Q", 2**60), "cut off or damaged"),
    "no bounds": (lambda index: patched(index, 26, "Q", 0), "0 document bounds"),
    "modes": (lambda index: index + bytes(4), "multimodal"),
    "negative length": (lambda index: patched(index, 34 + 8, "i", -1), "gives sequence 2 the length -1"),
    "length": (lambda index: patched(index, 34, "i", 2), "puts sequence 1 at byte 6"),
    "offset": (lambda index: patched(index, 50 + 16, "q", 8), "puts sequence 2 at byte 8"),
    "first bound": (lambda index: patched(index, 82, "q", 1), "from sequence 1 to 4"),
    "last bound": (lambda index: patched(index, 82 + 32, "q", 3), "from sequence 0 to 3"),
    "falling bound": (lambda index: patched(index, 82 + 8, "q", 3), "document 1 ending before it begins"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_wrong_index_is_refused_by_name(prefix, name):
    corrupt, message = CORRUPTIONS[name]
    path = prefix.with_suffix(".idx")
    path.write_bytes(corrupt(path.read_bytes()))
    with pytest.raises(UserError, match=message) as refusal:
        IndexedDataset(prefix)
    assert "good.idx" in str(refusal.value)


@pytest.mark.parametrize("change", [lambda data: data[:-2], lambda data: data + b"\x00\x00", lambda data: b""])
def test_a_bin_of_the_wrong_size_is_refused(prefix, change):
    path = prefix.with_suffix(".bin")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=r"good\.bin is \d+ bytes long.*9 tokens of 2 bytes, 18 bytes"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(prefix, suffix):
    prefix.with_suffix(suffix).unlink()
    with pytest.raises(UserError, match=rf"good\{suffix} does not exist"):
        IndexedDataset(prefix)
