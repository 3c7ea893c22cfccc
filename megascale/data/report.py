"""What a data set holds, as text for people, and whether it is what its record says."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megascale.data.indexed import IndexedDataset
from megascale.data.sidecar import Sidecar, sidecar_path
from megascale.data.tokenizer import Tokenizer
from megascale.utils.errors import UserError
from megascale.utils.progress import progress

_BAR_WIDTH: Final = 40
_CHUNK_BYTES: Final = 1 << 22


def describe_dataset(dataset: IndexedDataset, sidecar: Sidecar | None) -> str:
    """Counts, types, lengths and, where there is a record, how the data set was made."""
    lengths = dataset.document_lengths
    lines = [
        f"data set   {dataset.prefix}",
        f"documents  {dataset.num_documents:,}",
        f"sequences  {dataset.num_sequences:,}",
        f"tokens     {dataset.num_tokens:,} of type {dataset.dtype.name}",
    ]
    if len(lengths):
        lines.append(
            f"lengths    mean {lengths.mean():,.1f}, median {np.median(lengths):,.0f}, shortest {lengths.min():,}, "
            f"longest {lengths.max():,} tokens"
        )
    if sidecar is None:
        lines.append(f"record     none ({sidecar_path(dataset.prefix)} does not exist)")
    else:
        record = sidecar.tokenizer
        lines += [
            f"tokenizer  {record.tokenizer_type}, {record.vocab_size:,} tokens, fingerprint {record.fingerprint[:12]}",
            f"ends       {f'each document ends in id {record.eod_id}' if sidecar.append_eod else 'not marked'}",
            f"from       key {sidecar.json_key!r} of {', '.join(source.path for source in sidecar.sources)}",
            f"left out   {_left_out(sidecar)}",
        ]
    return "\n".join([*lines, "", length_histogram(lengths)])


def left_out(sidecar: Sidecar) -> list[str]:
    """What preparation left out, a phrase for each reason; empty when nothing was."""
    reasons = [f"{count:,} {reason}" for reason, count in sidecar.skipped.items()]
    return ([f"{sidecar.num_empty:,} empty"] if sidecar.num_empty else []) + reasons


def _left_out(sidecar: Sidecar) -> str:
    return "; ".join(left_out(sidecar)) or "nothing"


def length_histogram(lengths: NDArray[np.int64]) -> str:
    """Documents by length in tokens, in bins that double, with a bar for each."""
    if not len(lengths):
        return "no documents"
    # Bin k holds 2^(k-1) to 2^k - 1 tokens; bin 0 holds the documents without tokens.
    bins = np.ceil(np.log2(lengths + 1)).astype(np.int64)
    counts = np.bincount(bins)
    first = int(np.flatnonzero(counts)[0])
    rows = []
    for number in range(first, len(counts)):
        low, high = (2 ** (number - 1), 2**number - 1) if number else (0, 0)
        bar = "#" * math.ceil(_BAR_WIDTH * counts[number] / counts.max())
        rows.append((f"{low:,} - {high:,}", f"{counts[number]:,}", bar))
    widths = [max(len(row[column]) for row in [*rows, ("tokens", "documents", "")]) for column in range(2)]
    header = ("tokens", "documents", "")
    return "\n".join(f"{a:>{widths[0]}}  {b:>{widths[1]}}  {c}".rstrip() for a, b, c in [header, *rows])


def show_document(dataset: IndexedDataset, document: int, tokenizer: Tokenizer | None, max_tokens: int) -> str:
    """One document as text (as ids without a tokenizer), at most `max_tokens` of it.

    Raises:
        UserError: there is no such document, or its ids are not the tokenizer's.
    """
    if not 0 <= document < dataset.num_documents:
        raise UserError(
            f"--document {document}: data set {dataset.prefix} has documents 0 to {dataset.num_documents - 1}"
        )
    ids = dataset.tokens(document)
    shown = ids[:max_tokens]
    if tokenizer is None:
        text = " ".join(str(token) for token in shown)
    elif len(shown) and int(shown.max()) >= tokenizer.vocab_size:
        raise UserError(
            f"document {document} of {dataset.prefix} holds the id {int(shown.max())}, but the tokenizer given knows "
            f"ids below {tokenizer.vocab_size}: it is another tokenizer's data"
        )
    else:
        text = tokenizer.decode(shown.tolist())
    rest = f"\n... {len(ids) - len(shown):,} more tokens (--max-tokens)" if len(shown) < len(ids) else ""
    return f"document {document}: {len(ids):,} tokens\n{text}{rest}"


def verify_dataset(
    dataset: IndexedDataset, sidecar: Sidecar | None, vocab_size: int | None, show_progress: bool | None = None
) -> str:
    """Reads everything: hashes against the record, every id against the vocabulary; returns what was checked.

    Args:
        vocab_size: ids must be below it; None takes the record's.

    Raises:
        UserError: a hash or an id is wrong, or there is nothing to check against.
    """
    if vocab_size is None and sidecar is not None:
        vocab_size = sidecar.tokenizer.vocab_size
    if vocab_size is None:
        raise UserError(
            f"--verify: {sidecar_path(dataset.prefix)} does not exist, so give the tokenizer's files or --vocab-size "
            "to check the ids against"
        )
    checked = [_verify_ids(dataset, vocab_size, show_progress)]
    if sidecar is None:
        checked.append(f"hashes: not checked, {sidecar_path(dataset.prefix)} does not exist")
        return "\n".join(checked)
    for path, written in ((dataset.bin_path, sidecar.bin), (dataset.idx_path, sidecar.idx)):
        found = _hash(path, show_progress)
        if found != written.sha256:
            raise UserError(
                f"{path} is damaged or was replaced: its SHA-256 is {found}, {sidecar_path(dataset.prefix)} says "
                f"{written.sha256}"
            )
        checked.append(f"{path.name}: SHA-256 {found} as recorded")
    return "\n".join(checked)


def _hash(path: Path, show_progress: bool | None) -> str:
    """SHA-256 of a file, with a progress bar: a large .bin takes minutes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file, progress(path.stat().st_size, "B", f"hashing {path.name}", show_progress) as bar:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def _verify_ids(dataset: IndexedDataset, vocab_size: int, show_progress: bool | None) -> str:
    highest = position = 0
    with progress(dataset.num_tokens, "token", "checking ids", show_progress) as bar:
        for chunk in dataset.chunks():
            low, high = int(chunk.min()), int(chunk.max())
            if low < 0 or high >= vocab_size:
                token = position + int(np.flatnonzero((chunk < 0) | (chunk >= vocab_size))[0])
                raise UserError(
                    f"{dataset.bin_path}: document {dataset.document_at(token)} holds the id "
                    f"{chunk[token - position]}, not below the vocabulary size {vocab_size}"
                )
            highest = max(highest, high)
            position += len(chunk)
            bar.update(len(chunk))
    return f"ids: all {dataset.num_tokens:,} below {vocab_size:,} (the highest is {highest:,})"
