"""Cutting long texts: the pieces tokenize to the same ids as the whole, and are no longer than they should be."""

import random

import pytest
import regex
from tokenizers import pre_tokenizers

from megascale.data.cutting import GPT2_PRE_TOKEN, _is_certain, pieces

# What the expression treats differently, and characters of classes on which libraries of different age may disagree.
ALPHABET = [
    *("a", "B", "é", "北", "京", "7", "٣", ".", "'", "'s", "'ll", "?", "—", "🙂", "n't"),
    *(" ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\x1c", "\u200b", "\u180e", "\U0001e900", "\U00011f00"),
]


def pre_tokens(text):
    """The library's own splitting, byte for byte."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return [piece for piece, _ in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize("seed", range(4))
def test_pieces_split_as_the_whole(seed):
    generator = random.Random(seed)
    for _ in range(60):
        letters = generator.sample(ALPHABET, generator.randint(1, len(ALPHABET)))
        text = "".join(generator.choices(letters, k=generator.randint(0, 300)))
        cut = list(pieces(text, target=generator.randint(1, 40)))
        assert "".join(cut) == text
        assert [token for piece in cut for token in pre_tokens(piece)] == pre_tokens(text)


def test_cutting_anywhere_would_change_the_ids():
    text = "it's one sentence, isn't it?"
    halves = [text[:3], text[3:]]
    assert [token for piece in halves for token in pre_tokens(piece)] != pre_tokens(text)


def test_pieces_keep_to_the_target_where_there_is_white_space():
    text = "some words of ordinary text " * 1000
    sizes = [len(piece) for piece in pieces(text, target=500)]
    assert max(sizes) <= 500
    assert min(sizes[:-1]) >= 500 - 500 // 8


def test_text_without_white_space_is_cut_between_pre_tokens():
    text = "北京，上海。" * 1000
    sizes = [len(piece) for piece in pieces(text, target=500)]
    assert max(sizes) <= 510
    assert len(sizes) >= 11


@pytest.mark.parametrize(
    ("before", "after", "certain"),
    [
        ("word", ".", True),
        (" 北京", "，", True),
        ("!?", "7", True),
        # An older library may take U+11F04 (a letter since 2022) for a sign, and then reads "\U00011f04'" and "st".
        ("'s", "t", False),
        ("x", "'", False),
        ("?'", "s", False),
        ("\U00011f04", ".", False),
        ("word", "\U00011f04", False),
        # Python takes U+001C for white space; tokenizers does not.
        ("word", "\x1c", False),
        ("\n", "x", False),
    ],
)
def test_cuts_are_made_only_where_libraries_of_any_age_agree(before, after, certain):
    assert _is_certain(before, after) is certain


def test_one_endless_word_stays_whole():
    text = "a" * 5000
    assert list(pieces(text, target=100)) == [text]
    assert list(pieces("", target=100)) == [""]


def test_expression_agrees_with_the_library_on_plain_text():
    text = "It's  John's 3rd   try:\n\n\t'really'? we'll see... naïve 北京 ok!! "
    matched = [match.encode() for match in regex.findall(GPT2_PRE_TOKEN, text)]
    alphabet = {symbol: byte for byte, symbol in _byte_symbols()}
    assert matched == [bytes(alphabet[symbol] for symbol in token) for token in pre_tokens(text)]


def _byte_symbols():
    """GPT-2's printable stand-in for each byte: itself where printable, else the next code point from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = 256
    for byte in range(256):
        if byte in printable:
            yield byte, chr(byte)
        else:
            yield byte, chr(spare)
            spare += 1
