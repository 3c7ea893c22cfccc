"""Where a long document may be cut so that its pieces, tokenized apart, give the very same ids.

GPT-2's tokenizer first splits text into pre-tokens with a regular expression and never merges across them. The
expression only looks forward, so cutting between two pre-tokens changes neither the part before nor the part after.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any, Final

import regex

# GPT-2's pre-token expression (Radford et al. 2019, `encoder.py`): contractions, words, numbers, other signs, spaces.
GPT2_PRE_TOKEN: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PIECE_CHARACTERS: Final = 1 << 17
# A separator code (U+001C to U+001F) is white space to one Unicode library and not to the next: never cut beside one.
_BEFORE_SPACE: Final = r"(?<=[^\s\x1c-\x1f])(?=[ \t\r\n])"


def pieces(text: str, target: int = PIECE_CHARACTERS) -> Iterator[str]:
    """The text in consecutive pieces of about `target` characters, cut between pre-tokens only.

    A cut is made where white space begins, since no pre-token of GPT-2's expression goes on into white space. Text that
    has none for `target` characters is cut at a pre-token found by running the expression itself from the last cut;
    a single pre-token longer than that stays whole.
    """
    before_space, pre_token = regex.compile(_BEFORE_SPACE), regex.compile(GPT2_PRE_TOKEN)
    start = 0
    while len(text) - start > target:
        # The window reaches back a little, so that pieces rarely pass the target at all.
        space = before_space.search(text, start + target - target // 8, start + target)
        cut = space.start() if space else _pre_token_end(pre_token, text, start, start + target)
        if cut >= len(text):
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _pre_token_end(pre_token: Any, text: str, start: int, wanted: int) -> int:
    """The end of the first pre-token after `start` that ends at `wanted` or later and that every library agrees on."""
    for match in pre_token.finditer(text, start):
        end = int(match.end())
        if end >= wanted and (end == len(text) or _is_certain(match[0], text[end])):
            return end
    return len(text)


def _is_certain(before: str, after: str) -> bool:
    """Whether the pre-token `before` ends before the character `after` for every library and whatever surrounds them.

    Not so after white space: a run of it gives its last character away when text follows, and keeps it at the end of a
    piece. Not so beside an apostrophe: whether it opens a contraction depends on what precedes it. And not so beside a
    separator code or a character that Unicode 3.2 (2002) did not know: their class depends on the library's age.
    """
    last = before[-1]
    known = unicodedata.ucd_3_2_0.category
    return (
        not last.isspace()
        and not "\x1c" <= after <= "\x1f"
        and "Cn" not in (known(last), known(after))
        and "'" not in (before[0], last, after)
    )
