"""Documents out of text files: JSON lines or plain text, plain or compressed, in bounded memory."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

import zstandard

from megascale.utils.errors import UserError
from megascale.utils.progress import progress

PlainTextDocuments = Literal["file", "line", "paragraph"]

JSON_SUFFIXES: Final = (".jsonl", ".ndjson", ".json")
PLAIN_SUFFIXES: Final = (".txt", ".text", ".tokens", ".md")
COMPRESSED_SUFFIXES: Final = (".gz", ".zst")
_CHUNK_BYTES: Final = 1 << 18
# Dumps compressed with a long window, as zstd --long=31 makes them, are read as well.
_ZSTD_WINDOW_BYTES: Final = 2**31


@dataclass(frozen=True)
class RecordBatch:
    """Consecutive records of one file: a JSON line each, or a plain document each.

    records: (number of its first line, bytes). input_bytes: how far the file on disk was read for them.
    """

    path: str
    is_json: bool
    records: list[tuple[int, bytes]]
    input_bytes: int


@dataclass(frozen=True)
class Extracted:
    """What a batch held: a text for each key and good record, and (line, reason) of each bad record."""

    texts: dict[str, list[str]]
    bad: list[tuple[int, str]]
    num_blank: int


def check_inputs(paths: Sequence[str], keys: Sequence[str]) -> int:
    """Refuses files that cannot be read at all, before anything starts; returns their bytes on disk.

    Raises:
        UserError: no file, one that is missing or of an unknown kind, or several keys for plain text.
    """
    if not paths:
        raise UserError("--input names no file")
    if len(set(keys)) != len(keys) or not keys:
        raise UserError(f"--json-keys {' '.join(keys)} must be one or more different keys")
    total = 0
    for path in paths:
        if not Path(path).is_file():
            raise UserError(f"--input {path} is not a file")
        if not _is_json(path) and len(keys) > 1:
            raise UserError(f"--input {path} is plain text, which has no keys; --json-keys {' '.join(keys)} needs JSON")
        total += Path(path).stat().st_size
    return total


def read_batches(path: str, plain_text: PlainTextDocuments, batch_bytes: int = 1 << 19) -> Iterator[RecordBatch]:
    """The records of one file in order, in batches of about `batch_bytes` (a longer record is a batch of its own).

    Raises:
        UserError: the file is cut off, damaged or not of the compression that its name says.
    """
    is_json = _is_json(path)
    waiting: list[tuple[int, bytes]] = []
    size = reported = position = 0
    lines = _lines(path)
    if is_json or plain_text == "line":
        records = lines
    else:
        records = _paragraphs(lines) if plain_text == "paragraph" else _whole(path)
    for number, data, position in records:
        waiting.append((number, data))
        size += len(data)
        if size >= batch_bytes or len(waiting) >= 1000:
            yield RecordBatch(path, is_json, waiting, position - reported)
            waiting, size, reported = [], 0, position
    # What no record accounts for, such as an empty file or a compressed file's trailer, counts as read too.
    yield RecordBatch(path, is_json, waiting, max(Path(path).stat().st_size - reported, 0))


def extract(batch: RecordBatch, keys: Sequence[str]) -> Extracted:
    """Parses a batch; nothing is lost: each record is a text for every key, or bad, or blank."""
    texts: dict[str, list[str]] = {key: [] for key in keys}
    bad: list[tuple[int, str]] = []
    num_blank = 0
    for number, data in batch.records:
        if not data.strip():
            num_blank += 1
            continue
        try:
            found = _texts_of(data, keys, batch.is_json)
        except _BadRecordError as error:
            bad.append((number, str(error)))
            continue
        for key, text in zip(keys, found, strict=True):
            texts[key].append(text)
    return Extracted(texts, bad, num_blank)


def read_texts(
    paths: Sequence[str],
    keys: Sequence[str],
    plain_text: PlainTextDocuments = "file",
    description: str = "reading",
    show_progress: bool | None = None,
) -> Iterator[str]:
    """All texts of all files in order, with a progress bar over their bytes.

    Raises:
        UserError: at the first bad record, by file and line.
    """
    total = check_inputs(paths, keys)
    with progress(total, "B", description, show_progress) as bar:
        for path in paths:
            for batch in read_batches(path, plain_text):
                extracted = extract(batch, keys)
                for number, reason in extracted.bad:
                    raise bad_record(path, number, reason)
                for key in keys:
                    yield from extracted.texts[key]
                bar.update(batch.input_bytes)


def bad_record(path: str, line: int, reason: str) -> UserError:
    """The error that names the place of a bad record."""
    return UserError(f"{path}, line {line}: {reason}")


class _BadRecordError(Exception):
    """A record that holds no usable text; the message is the reason, the same for all records of that kind."""


def _texts_of(data: bytes, keys: Sequence[str], is_json: bool) -> list[str]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _BadRecordError("not UTF-8") from None
    if not is_json:
        return [text]
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise _BadRecordError("not JSON") from None
    if not isinstance(content, dict):
        raise _BadRecordError("not a JSON object")
    found = []
    for key in keys:
        if key not in content:
            raise _BadRecordError(f"has no key {key!r} (--json-keys)")
        if not isinstance(content[key], str):
            raise _BadRecordError(f"the value of {key!r} is not a string")
        try:
            content[key].encode()
        except UnicodeEncodeError:
            raise _BadRecordError(f"the value of {key!r} is not valid Unicode (half of a surrogate pair)") from None
        found.append(content[key])
    return found


def _is_json(path: str) -> bool:
    name = Path(path)
    while name.suffix in COMPRESSED_SUFFIXES:
        name = name.with_suffix("")
    if name.suffix in JSON_SUFFIXES:
        return True
    if name.suffix in PLAIN_SUFFIXES:
        return False
    raise UserError(
        f"--input {path}: the name does not tell what it is; JSON lines end in {', '.join(JSON_SUFFIXES)}, plain text "
        f"in {', '.join(PLAIN_SUFFIXES)}, each also with {' or '.join(COMPRESSED_SUFFIXES)}"
    )


def _lines(path: str) -> Iterator[tuple[int, bytes, int]]:
    """(line number from 1, the line without its end, position in the file on disk)."""
    number = position = 0
    rest: list[bytes] = []  # pieces of a line longer than a chunk
    for chunk, position in _decompressed(path):
        *ended, last = chunk.split(b"\n")
        for line in ended:
            number += 1
            yield number, b"".join([*rest, line]).removesuffix(b"\r"), position
            rest = []
        rest.append(last)
    if any(rest):
        yield number + 1, b"".join(rest), position


def _paragraphs(lines: Iterator[tuple[int, bytes, int]]) -> Iterator[tuple[int, bytes, int]]:
    """Runs of lines between blank ones."""
    first, position = 1, 0
    waiting: list[bytes] = []
    for number, line, position in lines:
        if line.strip():
            first = first if waiting else number
            waiting.append(line)
        elif waiting:
            yield first, b"\n".join(waiting), position
            waiting = []
    if waiting:
        yield first, b"\n".join(waiting), position


def _whole(path: str) -> Iterator[tuple[int, bytes, int]]:
    """The whole file as one record, held in memory."""
    yield 1, b"".join(chunk for chunk, _ in _decompressed(path)), Path(path).stat().st_size


def _decompressed(path: str) -> Iterator[tuple[bytes, int]]:
    """(bytes, position in the file on disk), by the compression that the name ends in."""
    with open(path, "rb") as raw:
        try:
            if path.endswith(".zst"):
                yield from _zstd_chunks(path, raw)
            else:
                stream: Any = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
                while chunk := stream.read(_CHUNK_BYTES):
                    yield chunk, raw.tell()
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise UserError(f"{path} is cut off, damaged or not what its name says: {error}") from None


def _zstd_chunks(path: str, raw: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """All frames of a .zst file. The library's own stream reader takes a cut-off frame for the end; this does not."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    frame = None
    while data := raw.read(_CHUNK_BYTES):
        while data:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(data), raw.tell()
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last zstd frame has no end")
