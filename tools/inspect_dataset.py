"""Show what a .bin/.idx data set holds, read a document back, or check every byte.

python tools/inspect_dataset.py data/web_text_document
python tools/inspect_dataset.py data/web_text_document --document 7 --tokenizer-model tokenizer.json
python tools/inspect_dataset.py data/web_text_document --verify
"""

from __future__ import annotations

import argparse
import sys

from megascale.data.build import open_dataset
from megascale.data.report import describe_dataset, show_document, verify_dataset
from megascale.data.sidecar import read_sidecar, require_belongs
from megascale.data.tokenizer import build_tokenizer
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError, exit_with


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("prefix", help="the path without .bin or .idx")
    parser.add_argument(
        "--document", type=int, action="append", default=[], metavar="N", help="show document N (from 0)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=1000, help="most tokens to show of a document (default: 1000)"
    )
    parser.add_argument("--verify", action="store_true", help="check all hashes and ids; exit code 2 if one is wrong")
    parser.add_argument("--vocab-size", type=int, help="ids must be below it; for --verify of a set without .json")
    parser.add_argument("--tokenizer-type", choices=["GPT2BPETokenizer", "HuggingFaceTokenizer"])
    parser.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    parser.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    parser.add_argument("--tokenizer-model", metavar="FILE", help="tokenizer.json of HuggingFaceTokenizer")
    flags = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        files = (flags.tokenizer_type, flags.vocab_file, flags.merge_file, flags.tokenizer_model)
        tokenizer = build_tokenizer(*files) if any(files) else None
        dataset = open_dataset(flags.prefix)
        sidecar = read_sidecar(flags.prefix)
        if sidecar is not None:
            require_belongs(sidecar, dataset)
        if not flags.document:
            print(describe_dataset(dataset, sidecar))
        for document in flags.document:
            print(show_document(dataset, document, tokenizer, flags.max_tokens))
        if flags.verify:
            vocab_size = tokenizer.vocab_size if tokenizer is not None else flags.vocab_size
            print(verify_dataset(dataset, sidecar, vocab_size))
    except UserError as error:
        exit_with(error, LaunchEnvironment())


if __name__ == "__main__":
    main()
