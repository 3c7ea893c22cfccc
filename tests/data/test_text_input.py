"""Reading text files: every compression, every record accounted for, nothing cut off in silence."""

import gzip
import json

import pytest
import zstandard

from megascale.data.text_input import check_inputs, extract, read_batches, read_texts
from megascale.utils.errors import UserError

TEXTS = ["one", "two\nlines", "naïve 北京", "x" * 5000, "last"]
LINES = "\n".join(json.dumps({"text": text}) for text in TEXTS).encode()


def frames(data):
    """Two zstd frames, the first without its size in the header."""
    half = len(data) // 2
    writer = zstandard.ZstdCompressor().compressobj()
    return writer.compress(data[:half]) + writer.flush() + zstandard.ZstdCompressor().compress(data[half:])


COMPRESSIONS = {"": lambda data: data, ".gz": gzip.compress, ".zst": frames}


@pytest.mark.parametrize("end", [b"", b"\n"], ids=["no newline at the end", "newline at the end"])
@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_and_plain_files_hold_the_same_texts(tmp_path, suffix, end):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](LINES + end))
    assert list(read_texts([str(path)], ["text"])) == TEXTS


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("lost", [1, 10, 40])
def test_a_cut_off_file_is_an_error_not_the_end(tmp_path, suffix, lost):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](LINES)[:-lost])
    with pytest.raises(UserError, match=rf"a\.jsonl\{suffix} is cut off, damaged or not what its name says"):
        list(read_texts([str(path)], ["text"]))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_of_another_compression_is_refused(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(LINES)
    with pytest.raises(UserError, match="not what its name says"):
        list(read_texts([str(path)], ["text"]))


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 18])
def test_lines_do_not_depend_on_how_the_file_is_read(tmp_path, chunk, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\r\n\r\n  \n{"text": "b"}\n\n{"text": "c"}')
    monkeypatch.setattr("megascale.data.text_input._CHUNK_BYTES", chunk)
    (batch,) = read_batches(str(path), "file")
    assert [number for number, _ in batch.records] == [1, 2, 3, 4, 5, 6]
    extracted = extract(batch, ["text"])
    assert extracted.texts == {"text": ["a", "b", "c"]}
    assert (extracted.bad, extracted.num_blank) == ([], 3)


@pytest.mark.parametrize("batch_bytes", [1, 100, 10**6])
@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_progress_adds_up_to_the_file(tmp_path, suffix, batch_bytes):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](LINES))
    batches = list(read_batches(str(path), "file", batch_bytes))
    assert sum(batch.input_bytes for batch in batches) == path.stat().st_size
    assert sum(len(batch.records) for batch in batches) == len(TEXTS)
    assert len(batches) == 6 if batch_bytes == 1 else len(batches) <= 3


PLAIN = b"first line\nsecond\n\n \nthird\n\nlast"


@pytest.mark.parametrize(
    ("documents", "expected", "num_blank"),
    [
        ("file", [PLAIN.decode()], 0),
        ("line", ["first line", "second", "third", "last"], 3),
        ("paragraph", ["first line\nsecond", "third", "last"], 0),
    ],
)
def test_documents_of_plain_text(tmp_path, documents, expected, num_blank):
    path = tmp_path / "a.txt"
    path.write_bytes(PLAIN)
    (batch,) = read_batches(str(path), documents)
    assert extract(batch, ["text"]).texts["text"] == expected
    assert extract(batch, ["text"]).num_blank == num_blank
    assert batch.records[0][0] == 1


BAD = {
    b'{"text": "a"': "not JSON",
    b"[" * 100_000: "not JSON",
    b"\xff\xfe": "not UTF-8",
    b"[1]": "not a JSON object",
    b'{"title": "a"}': "has no key 'text'",
    b'{"text": 3}': "the value of 'text' is not a string",
    b'{"text": null}': "the value of 'text' is not a string",
    b'{"text": "\\ud800"}': "not valid Unicode",
}


@pytest.mark.parametrize("line", BAD, ids=[*map(str, range(len(BAD)))])
def test_bad_lines_are_named_with_their_place(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"a\.jsonl, line 3: .*{BAD[line]}"):
        list(read_texts([str(path)], ["text"]))


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert list(read_texts([str(path)], ["text"])) == ["hello"]


def test_inputs_are_checked_before_anything_is_read(tmp_path):
    for name in ("a.jsonl", "b.txt", "c.parquet"):
        (tmp_path / name).write_text("{}")
    assert check_inputs([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")], ["text"]) == 4

    def refused(message, names, keys=("text",)):
        with pytest.raises(UserError, match=message):
            check_inputs([str(tmp_path / name) for name in names], keys)

    refused("--input names no file", [])
    refused(r"absent\.jsonl is not a file", ["a.jsonl", "absent.jsonl"])
    refused(r"c\.parquet: the name does not tell what it is", ["c.parquet"])
    refused("one or more different keys", ["a.jsonl"], ["x", "x"])
    refused("is plain text, which has no keys", ["b.txt"], ["x", "y"])
