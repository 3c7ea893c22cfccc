"""Learn a byte-level BPE tokenizer from text files and save it as a tokenizer.json.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output tokenizer.json

The result goes to preprocess_data.py and pretrain_gpt.py as --tokenizer-model tokenizer.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megascale.data.text_input import read_texts
from megascale.data.tokenizer import END_OF_TEXT, train_byte_level_bpe
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError, exit_with


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="as of preprocess_data.py")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read (default: text)")
    parser.add_argument("--vocab-size", type=int, required=True, help="tokens, with the 256 bytes and " + END_OF_TEXT)
    parser.add_argument("--min-frequency", type=int, default=2, help="fewest occurrences of a merged pair (default: 2)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the tokenizer.json to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    flags = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        if flags.output.exists() and not flags.overwrite:
            raise UserError(f"--output {flags.output} exists; give another name, or --overwrite to replace it")
        if not flags.output.parent.is_dir():
            raise UserError(f"--output {flags.output}: the directory {flags.output.parent} does not exist")
        texts = read_texts(flags.input, flags.json_keys, description="counting words")
        tokenizer = train_byte_level_bpe(
            texts, flags.vocab_size, flags.output, flags.min_frequency, show_progress=sys.stderr.isatty()
        )
    except UserError as error:
        exit_with(error, LaunchEnvironment())
    print(f"{flags.output}: {tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint[:12]}")
    if tokenizer.vocab_size < flags.vocab_size:
        print(
            f"fewer than --vocab-size {flags.vocab_size}: no other pair occurs {flags.min_frequency} times "
            "(--min-frequency)",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
