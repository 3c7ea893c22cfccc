"""Tokenize text files into the .bin/.idx data sets that training reads.

    python tools/preprocess_data.py --input part-*.jsonl.zst --output-prefix data/web \\
        --vocab-file vocab.json --merge-file merges.txt --append-eod --workers 8

writes data/web_text_document.bin, .idx (Megatron's format) and .json (how they were made).
"""

from __future__ import annotations

import argparse
import sys
import time

from megascale.data.preprocess import PreprocessOptions, preprocess
from megascale.data.report import left_out
from megascale.data.tokenizer import TokenizerFiles
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError, exit_with


def main(argv: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if argv is None else argv)
    start = time.monotonic()
    try:
        records = preprocess(options)
    except UserError as error:
        exit_with(error, LaunchEnvironment())
    for prefix, record in records.items():
        lost = "; ".join(left_out(record)) or "nothing"
        print(f"{prefix}: {record.num_documents:,} documents, {record.num_tokens:,} tokens; left out: {lost}")
        if not record.append_eod:
            print(f"{prefix}: without --append-eod nothing marks where a document ends", file=sys.stderr)
    num_bytes = sum(source.bytes for source in next(iter(records.values())).sources)
    seconds = time.monotonic() - start
    print(f"{num_bytes / 1e6:,.1f} MB of input in {seconds:,.1f} s, {num_bytes / 1e6 / seconds:,.2f} MB/s")


def parse(argv: list[str]) -> PreprocessOptions:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="text files, read in this order: .jsonl (also .json, .ndjson) with one object a line, or plain .txt "
        "(.text, .tokens, .md); each may end in .gz or .zst",
    )
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read (default: text)")
    parser.add_argument("--output-prefix", required=True, metavar="PATH", help="PATH_<key>_document.bin and so on")
    parser.add_argument("--tokenizer-type", choices=["GPT2BPETokenizer", "HuggingFaceTokenizer"])
    parser.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    parser.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    parser.add_argument("--tokenizer-model", metavar="FILE", help="tokenizer.json of HuggingFaceTokenizer")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="processes that tokenize; the output does not depend on it (default: 1, which may use threads)",
    )
    parser.add_argument(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="at a line without a text under the keys: stop and say where, or skip it and count (default: stop)",
    )
    parser.add_argument(
        "--plain-text-documents",
        choices=["file", "line", "paragraph"],
        default="file",
        help="what is a document in plain text: the whole file, each line, or what stands between blank lines",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace data sets of these names")
    flags = parser.parse_args(argv)
    return PreprocessOptions(
        inputs=tuple(flags.input),
        output_prefix=flags.output_prefix,
        tokenizer=TokenizerFiles(flags.tokenizer_type, flags.vocab_file, flags.merge_file, flags.tokenizer_model),
        json_keys=tuple(flags.json_keys),
        append_eod=flags.append_eod,
        workers=flags.workers,
        on_error=flags.on_error,
        plain_text=flags.plain_text_documents,
        overwrite=flags.overwrite,
    )


if __name__ == "__main__":
    main()
