"""Megatron's `.bin`/`.idx` pair: the token ids of many documents, read by memory map and written as a stream.

Layout, little-endian, as Megatron-LM's `MMapIndexedDataset` writes it (S sequences, D = documents + 1)::

    .bin   the ids of all sequences, one after another, no header
    .idx   9 bytes "MMIDIDX" 0 0 | u64 version 1 | u8 dtype code | u64 S | u64 D
           S x int32 sequence lengths (tokens) | S x int64 offsets into .bin (bytes)
           D x int64 document bounds (sequences)

A document is one or more consecutive sequences, so its tokens are one contiguous run of `.bin`.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, Final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megascale.utils.errors import UserError
from megascale.utils.files import atomic_writer

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
HEADER: Final = struct.Struct("<9sQBQQ")
# The codes Megatron gives to NumPy types; 6 and 7 are floating point and hold no token ids.
DTYPE_OF_CODE: Final = MappingProxyType({1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"})
CODE_OF_DTYPE: Final = MappingProxyType({name: code for code, name in DTYPE_OF_CODE.items()})
MAX_SEQUENCE_TOKENS: Final = 2**31 - 1
_CHUNK: Final = 1 << 20  # array elements handled at once where a whole column would cost memory


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type that holds ids below `vocab_size`: uint16 below 65,500, else int32 (Megatron's rule)."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedDataset:
    """Token ids of the documents stored at `<prefix>.bin` and `<prefix>.idx`, by memory map.

    Opening reads the whole index once and refuses a pair that is truncated, corrupt or of another format. Afterwards
    nothing is held but memory maps, which the processes of a host share, and any number of threads may read.

    Raises:
        UserError: a file is missing or is not what the layout above says; the message names the file and the fault.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.bin_path = Path(self.prefix + ".bin")
        self.idx_path = Path(self.prefix + ".idx")
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise UserError(
                    f"{path} does not exist; a data set is the pair {self.prefix}.bin and {self.prefix}.idx"
                )
        self.dtype, self.num_sequences, num_bounds = self._read_header()
        self.num_documents = num_bounds - 1
        index = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        lengths_at = HEADER.size
        offsets_at = lengths_at + 4 * self.num_sequences
        bounds_at = offsets_at + 8 * self.num_sequences
        # Plain arrays over the map: np.memmap's own slicing runs Python code each time.
        self._lengths: NDArray[np.int32] = index[lengths_at:offsets_at].view(np.ndarray).view("<i4")
        self._offsets: NDArray[np.int64] = index[offsets_at:bounds_at].view(np.ndarray).view("<i8")
        self._bounds: NDArray[np.int64] = index[bounds_at : bounds_at + 8 * num_bounds].view(np.ndarray).view("<i8")
        self._check_bounds()
        self.num_tokens = self._check_offsets()
        self._check_bin_size()
        self._tokens: NDArray[Any] = np.empty(0, dtype=self.dtype)
        if self.num_tokens:
            self._tokens = np.memmap(self.bin_path, dtype=self.dtype, mode="r").view(np.ndarray)

    def __len__(self) -> int:
        return self.num_documents

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """Length of each document in tokens, int64 [num_documents]; computed anew at each access."""
        if self.num_sequences == self.num_documents and self._one_sequence_each:
            return self._lengths.astype(np.int64)
        ends = np.zeros(self.num_sequences + 1, dtype=np.int64)
        np.cumsum(self._lengths, dtype=np.int64, out=ends[1:])
        return np.diff(ends[self._bounds])

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Ids `start` to `stop` (None: the end) of one document, in the stored type; a view, not a copy.

        Raises:
            IndexError: no such document, or a range outside it.
        """
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents}")
        begin, end = self._document_range(document)
        stop = end - begin if stop is None else stop
        if not 0 <= start <= stop <= end - begin:
            raise IndexError(f"tokens {start}:{stop} of document {document}, which has {end - begin}")
        return self._tokens[begin + start : begin + stop]

    def sequence_lengths(self, document: int) -> NDArray[np.int32]:
        """Lengths in tokens of the sequences that make up one document."""
        return self._lengths[self._bounds[document] : self._bounds[document + 1]]

    def chunks(self, num_tokens: int = 1 << 22) -> Iterator[NDArray[Any]]:
        """All ids in file order, at most `num_tokens` at a time; for checks that must read everything."""
        for start in range(0, self.num_tokens, num_tokens):
            yield self._tokens[start : start + num_tokens]

    def document_at(self, token: int) -> int:
        """The document that holds token number `token` of the whole file."""
        sequence = int(np.searchsorted(self._offsets, token * self.dtype.itemsize, side="right")) - 1
        return int(np.searchsorted(self._bounds, sequence, side="right")) - 1

    def _document_range(self, document: int) -> tuple[int, int]:
        """First and one-past-last token of a document, counted over the whole file."""
        first, last = int(self._bounds[document]), int(self._bounds[document + 1])
        begin = self._sequence_start(first)
        end = begin + int(self._lengths[first]) if last == first + 1 else self._sequence_start(last)
        return begin, end

    def _sequence_start(self, sequence: int) -> int:
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self._offsets[sequence]) // self.dtype.itemsize

    def _read_header(self) -> tuple[np.dtype[Any], int, int]:
        """Checks the fixed part of the index against its size; returns dtype, S and D."""
        size = self.idx_path.stat().st_size
        with open(self.idx_path, "rb") as file:
            raw = file.read(HEADER.size)
        if raw[: len(MAGIC)] != MAGIC:
            self._refuse(
                f"starts with the bytes {raw[: len(MAGIC)]!r} instead of {MAGIC!r}: it is not an index of Megatron's "
                "memory-mapped format. Prepare the data with tools/preprocess_data.py"
            )
        if len(raw) < HEADER.size:
            self._refuse(f"is {size} bytes long, shorter than its header of {HEADER.size} bytes: it was cut off")
        _, version, code, num_sequences, num_bounds = HEADER.unpack(raw)
        if version != VERSION:
            self._refuse(f"says format version {version}; only version {VERSION} is known")
        if code not in DTYPE_OF_CODE:
            self._refuse(f"says dtype code {code}; token ids have one of {dict(DTYPE_OF_CODE)}")
        if num_bounds < 1:
            self._refuse("says 0 document bounds; even an empty data set has one")
        expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
        if size == expected + num_sequences and num_sequences:
            self._refuse("carries one mode byte a sequence: it is a multimodal data set, which is not supported")
        if size != expected:
            self._refuse(
                f"is {size} bytes long, but {num_sequences} sequences and {num_bounds - 1} documents take {expected}: "
                "it was cut off or damaged"
            )
        return np.dtype(DTYPE_OF_CODE[code]).newbyteorder("<"), num_sequences, num_bounds

    def _check_bounds(self) -> None:
        """Document bounds run from 0 to S and never fall; notes whether each document is one sequence."""
        first, last = int(self._bounds[0]), int(self._bounds[-1])
        if first != 0 or last != self.num_sequences:
            self._refuse(f"has documents from sequence {first} to {last} instead of 0 to {self.num_sequences}")
        self._one_sequence_each = True
        for start in range(0, self.num_documents, _CHUNK):
            steps = np.diff(self._bounds[start : start + _CHUNK + 1])
            if (steps < 0).any():
                self._refuse(f"has document {start + int(np.argmax(steps < 0))} ending before it begins")
            self._one_sequence_each = self._one_sequence_each and bool((steps == 1).all())

    def _check_offsets(self) -> int:
        """Each offset is the sum of the lengths before it; returns the number of tokens."""
        itemsize = self.dtype.itemsize
        total = 0
        for start in range(0, self.num_sequences, _CHUNK):
            lengths = self._lengths[start : start + _CHUNK].astype(np.int64)
            if (lengths < 0).any():
                position = int(np.argmax(lengths < 0))
                self._refuse(f"gives sequence {start + position} the length {lengths[position]}")
            ends = total + np.cumsum(lengths)
            wrong = self._offsets[start : start + _CHUNK] != (ends - lengths) * itemsize
            if wrong.any():
                position = int(np.argmax(wrong))
                self._refuse(
                    f"puts sequence {start + position} at byte {self._offsets[start + position]} of the .bin file, but "
                    f"the sequences before it end at byte {(ends[position] - lengths[position]) * itemsize}"
                )
            total = int(ends[-1])
        return total

    def _check_bin_size(self) -> None:
        found, expected = self.bin_path.stat().st_size, self.num_tokens * self.dtype.itemsize
        if found != expected:
            raise UserError(
                f"{self.bin_path} is {found} bytes long, but {self.idx_path} describes {self.num_tokens} tokens of "
                f"{self.dtype.itemsize} bytes, {expected} bytes: one of them was cut off or belongs to another data set"
            )

    def _refuse(self, fault: str) -> None:
        raise UserError(f"{self.idx_path} {fault}")


@dataclass(frozen=True)
class WrittenFile:
    """Size in bytes and SHA-256 (hexadecimal) of a file as it was written."""

    bytes: int
    sha256: str


class IndexedWriter:
    """Writes one `.bin`/`.idx` pair as a stream, in memory that does not grow with the data.

    Use it in a `with` statement: both files appear under their final names when the block ends well, `.idx` last, and
    not at all when it raises. After the block `bin_file` and `idx_file` hold sizes and hashes.

    Args:
        prefix: path without `.bin`; its directory must exist.
        dtype: integer type of the ids, see `token_dtype`.
        overwrite: replace an existing pair. Its `.idx` goes first, so that a kill never leaves a mixed pair behind.

    Raises:
        UserError: a file of that name exists and `overwrite` is off.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike, overwrite: bool = False) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        assert self.dtype.name in CODE_OF_DTYPE, f"no dtype code for {self.dtype}"
        self.num_tokens = self.num_sequences = self.num_documents = 0
        self.bin_file = self.idx_file = WrittenFile(0, "")
        self._open_tokens = 0
        self._sequence_open = False
        self._paths = [Path(self.prefix + suffix) for suffix in (".bin", ".idx")]
        for path in self._paths:
            if path.exists() and not overwrite:
                raise UserError(f"{path} exists; give another --output-prefix, or --overwrite to replace it")

    def __enter__(self) -> IndexedWriter:
        self._files = ExitStack()
        with ExitStack() as opening:
            # Left in reverse order: .bin takes its final name first, .idx last.
            self._idx = _HashedFile(opening.enter_context(atomic_writer(self._paths[1], "wb")))
            self._bin = _HashedFile(opening.enter_context(atomic_writer(self._paths[0], "wb")))
            # Columns of the index wait on disk beside the target: /tmp may be small.
            directory = self._paths[0].parent
            self._lengths: IO[bytes] = opening.enter_context(tempfile.TemporaryFile(dir=directory))
            self._bounds: IO[bytes] = opening.enter_context(tempfile.TemporaryFile(dir=directory))
            self._files = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self._write_index()
                self._paths[1].unlink(missing_ok=True)
            except BaseException:
                self._files.__exit__(*sys.exc_info())
                raise
        self._files.__exit__(kind, error, traceback)

    def append(self, tokens: ArrayLike) -> None:
        """Adds ids to the sequence being written, which may grow through many calls."""
        values = np.asarray(tokens)
        if values.size:
            limits = np.iinfo(self.dtype)
            low, high = int(values.min()), int(values.max())
            if low < max(limits.min, 0) or high > limits.max:
                raise ValueError(f"token ids {low} to {high} do not fit {self.dtype.name}")
            self._bin.write(values.astype(self.dtype, copy=False).tobytes())
        self._open_tokens += values.size
        self._sequence_open = True

    def end_sequence(self) -> None:
        """Closes the sequence being written; the next `append` starts another one of the same document."""
        if self._open_tokens > MAX_SEQUENCE_TOKENS:
            self._refuse_long_sequence(self.num_documents, self._open_tokens)
        self._lengths.write(struct.pack("<i", self._open_tokens))
        self.num_sequences += 1
        self.num_tokens += self._open_tokens
        self._open_tokens = 0
        self._sequence_open = False

    def end_document(self) -> None:
        """Closes the document, and its last sequence where that is still open."""
        if self._sequence_open:
            self.end_sequence()
        self._bounds.write(struct.pack("<q", self.num_sequences))
        self.num_documents += 1

    def add_document(self, tokens: ArrayLike) -> None:
        """Writes one document of one sequence."""
        self.append(tokens)
        self.end_document()

    def add_documents(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Writes many documents of one sequence each, their ids one after another in `tokens`."""
        assert not self._sequence_open, "end_document() was not called"
        assert int(lengths.sum()) == tokens.size
        for start in np.flatnonzero(lengths > MAX_SEQUENCE_TOKENS):
            self._refuse_long_sequence(self.num_documents + int(start), int(lengths[start]))
        self.append(tokens)
        self._open_tokens, self._sequence_open = 0, False
        self._lengths.write(lengths.astype("<i4").tobytes())
        first = self.num_sequences + 1
        self._bounds.write(np.arange(first, first + len(lengths), dtype="<i8").tobytes())
        self.num_sequences += len(lengths)
        self.num_documents += len(lengths)
        self.num_tokens += tokens.size

    def _refuse_long_sequence(self, document: int, length: int) -> None:
        raise UserError(
            f"{self.prefix}: document {document} has {length} tokens; the format holds at most {MAX_SEQUENCE_TOKENS} "
            "in one sequence. Split the document"
        )

    def _write_index(self) -> None:
        assert not self._sequence_open, "end_document() was not called"
        self._bin.file.flush()
        code = CODE_OF_DTYPE[self.dtype.name]
        self._idx.write(HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_documents + 1))
        for lengths in _columns(self._lengths, "<i4"):
            self._idx.write(lengths.tobytes())
        total = 0
        for lengths in _columns(self._lengths, "<i4"):
            ends = total + np.cumsum(lengths, dtype=np.int64)
            self._idx.write(((ends - lengths) * self.dtype.itemsize).astype("<i8").tobytes())
            total = int(ends[-1])
        self._idx.write(struct.pack("<q", 0))
        for bounds in _columns(self._bounds, "<i8"):
            self._idx.write(bounds.tobytes())
        self.bin_file, self.idx_file = self._bin.written(), self._idx.written()


class _HashedFile:
    """A file being written whose size and SHA-256 are known at the end without reading it again."""

    def __init__(self, file: IO[Any]) -> None:
        self.file = file
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def written(self) -> WrittenFile:
        return WrittenFile(self._bytes, self._hash.hexdigest())


def _columns(file: IO[bytes], dtype: str) -> Iterator[NDArray[Any]]:
    """The numbers in a temporary file from its start, `_CHUNK` at a time."""
    file.seek(0, os.SEEK_SET)
    while data := file.read(_CHUNK * np.dtype(dtype).itemsize):
        yield np.frombuffer(data, dtype=dtype)
