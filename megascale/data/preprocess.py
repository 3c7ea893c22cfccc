"""Text files to `.bin`/`.idx`/`.json`: parsed and tokenized in parallel, written in order, in bounded memory."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

import megascale
from megascale.data.indexed import IndexedWriter, token_dtype
from megascale.data.sidecar import (
    FORMAT_VERSION,
    Sidecar,
    SourceFile,
    TokenizerRecord,
    sidecar_path,
    write_sidecar,
)
from megascale.data.text_input import PlainTextDocuments, RecordBatch, bad_record, check_inputs, extract, read_batches
from megascale.data.tokenizer import Tokenizer, TokenizerFiles, build_tokenizer
from megascale.utils.errors import UserError
from megascale.utils.progress import progress

# Batches that a worker has before it: one at work, and enough behind it that it never waits for the reader.
_BATCHES_PER_WORKER: Final = 3


@dataclass(frozen=True)
class PreprocessOptions:
    """What to read, how to tokenize it and where to write `<output_prefix>_<key>_document.{bin,idx,json}`.

    append_eod: end each document with the end-of-document token.
    workers: processes that tokenize; 1 works in this process, where the tokenizer library may use threads.
    on_error: what to do at a line that holds no text under the keys.
    plain_text: what a document is in plain text files.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerFiles
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    on_error: Literal["stop", "skip"] = "stop"
    plain_text: PlainTextDocuments = "file"
    overwrite: bool = False


@dataclass(frozen=True)
class EncodedBatch:
    """A batch on its way back: for each key the ids end to end, the documents' lengths and how many were empty."""

    path: str
    tokens: dict[str, NDArray[Any]]
    lengths: dict[str, NDArray[np.int64]]
    num_empty: dict[str, int]
    bad: list[tuple[int, str]]
    num_blank: int
    input_bytes: int


@dataclass
class _Counts:
    """What was left out so far."""

    skipped: Counter[str] = field(default_factory=Counter)
    empty: Counter[str] = field(default_factory=Counter)


def output_prefix_of(output_prefix: str, key: str) -> str:
    """The prefix of the data set made from one key, spelled as Megatron spells it."""
    return f"{output_prefix}_{key}_document"


def preprocess(options: PreprocessOptions, show_progress: bool | None = None) -> dict[str, Sidecar]:
    """Tokenizes all inputs in order; returns the record of each data set written, by its prefix.

    The output is the same for any number of workers. Nothing appears under the final names before everything has been
    read: an error or a kill leaves no half data set.

    Raises:
        UserError: an input, the tokenizer or the output cannot be used; a bad line with on_error="stop"; no document.
    """
    total_bytes = check_inputs(options.inputs, options.json_keys)
    if options.workers < 1:
        raise UserError(f"--workers {options.workers} must be at least 1")
    tokenizer = _tokenizer(options.tokenizer)
    directory = Path(options.output_prefix).parent
    if not directory.is_dir():
        raise UserError(f"--output-prefix {options.output_prefix}: the directory {directory} does not exist")
    prefixes = {key: output_prefix_of(options.output_prefix, key) for key in options.json_keys}
    counts = _Counts()
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        writers = {
            key: stack.enter_context(IndexedWriter(prefix, dtype, options.overwrite))
            for key, prefix in prefixes.items()
        }
        with progress(total_bytes, "B", "tokenizing", show_progress) as bar:
            for batch in stack.enter_context(closing(_encoded_batches(options))):
                _write(batch, writers, counts, options.on_error)
                bar.update(batch.input_bytes)
                bar.set_postfix_str(f"{sum(writer.num_tokens for writer in writers.values()):,} tokens", refresh=False)
        for key, writer in writers.items():
            if writer.num_documents == 0:
                raise UserError(_nothing_left(options, key, counts))
        for prefix in prefixes.values():
            sidecar_path(prefix).unlink(missing_ok=True)  # an old one must not describe the new files
    records: dict[str, Sidecar] = {}
    for key, prefix in prefixes.items():
        records[prefix] = _record(options, key, tokenizer, writers[key], counts)
        write_sidecar(prefix, records[prefix])
    return records


def encode_batch(batch: RecordBatch, options: PreprocessOptions) -> EncodedBatch:
    """Parses and tokenizes one batch; what a worker does."""
    tokenizer = _tokenizer(options.tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.eod_id] if options.append_eod else [], dtype=dtype)
    extracted = extract(batch, options.json_keys)
    tokens: dict[str, NDArray[Any]] = {}
    lengths: dict[str, NDArray[np.int64]] = {}
    num_empty: dict[str, int] = {}
    for key in options.json_keys:
        encoded = tokenizer.encode_arrays(extracted.texts[key])
        documents = [ids for ids in encoded if len(ids)]
        num_empty[key] = len(encoded) - len(documents)
        pieces = [piece for ids in documents for piece in (ids.astype(dtype), end)]
        tokens[key] = np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)
        lengths[key] = np.array([len(ids) + len(end) for ids in documents], dtype=np.int64)
    return EncodedBatch(batch.path, tokens, lengths, num_empty, extracted.bad, extracted.num_blank, batch.input_bytes)


@functools.lru_cache(maxsize=1)
def _tokenizer(files: TokenizerFiles) -> Tokenizer:
    """The tokenizer, built once in each process."""
    return build_tokenizer(files.tokenizer_type, files.vocab_file, files.merge_file, files.tokenizer_model)


def _encoded_batches(options: PreprocessOptions) -> Generator[EncodedBatch, None, None]:
    """All batches in input order; with workers, at most `_BATCHES_PER_WORKER` for each are read ahead."""
    batches = (batch for path in options.inputs for batch in read_batches(path, options.plain_text))
    if options.workers == 1:
        for batch in batches:
            yield encode_batch(batch, options)
        return
    # spawn: forking a process that has threads (tokenizers has) can hang the child.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.workers, mp_context=context, initializer=_start_worker)
    in_flight: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            in_flight.append(pool.submit(encode_batch, batch, options))
            if len(in_flight) >= _BATCHES_PER_WORKER * options.workers:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            f"a worker process was killed, most likely for lack of memory; use fewer than --workers {options.workers}"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Leaves Ctrl-C to the main process, works in one thread, and never outlives the main process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """Ends this worker when the main process is gone; a killed one cannot tell its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write(batch: EncodedBatch, writers: dict[str, IndexedWriter], counts: _Counts, on_error: str) -> None:
    if batch.bad and on_error == "stop":
        raise bad_record(
            batch.path, batch.bad[0][0], f"{batch.bad[0][1]}. Repair it, or leave out all such with --on-error skip"
        )
    for _, reason in batch.bad:
        counts.skipped[reason] += 1
    if batch.num_blank:
        counts.skipped["blank"] += batch.num_blank
    for key, writer in writers.items():
        counts.empty[key] += batch.num_empty[key]
        writer.add_documents(batch.tokens[key], batch.lengths[key])


def _nothing_left(options: PreprocessOptions, key: str, counts: _Counts) -> str:
    reasons = [f"{count:,} {reason}" for reason, count in sorted(counts.skipped.items())]
    reasons.append(f"{counts.empty[key]:,} with an empty {key!r}")
    return f"--input {' '.join(options.inputs)}: no document is left ({'; '.join(reasons)})"


def _record(
    options: PreprocessOptions, key: str, tokenizer: Tokenizer, writer: IndexedWriter, counts: _Counts
) -> Sidecar:
    return Sidecar(
        format_version=FORMAT_VERSION,
        megascale_version=megascale.__version__,
        tokenizer=TokenizerRecord(
            tokenizer.tokenizer_type, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod_id
        ),
        append_eod=options.append_eod,
        json_key=key,
        num_documents=writer.num_documents,
        num_tokens=writer.num_tokens,
        num_empty=counts.empty[key],
        skipped=dict(sorted(counts.skipped.items())),
        bin=writer.bin_file,
        idx=writer.idx_file,
        sources=[SourceFile(path, Path(path).stat().st_size) for path in options.inputs],
    )
