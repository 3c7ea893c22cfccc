"""Tokenizers: GPT-2's ids, any tokenizer.json, one of our own, and files that cannot be used."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import ByteLevelBPETokenizer, decoders, models, pre_tokenizers

from megascale.data.tokenizer import END_OF_TEXT, build_tokenizer, train_byte_level_bpe
from megascale.utils.errors import UserError

TEXTS = ["the cat sat on the mat. ", "it's the dog's mat; don't\n\n  sit!", "naïve 北京 🙂 12345", ""]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_byte_level_bpe(TEXTS * 20, 320, path)
    return path


def changed(path, target, **changes):
    """A copy of a tokenizer.json with top-level entries replaced."""
    description = json.loads(path.read_text())
    description.update(changes)
    target.write_text(json.dumps(description, indent=7))
    return str(target)


@pytest.fixture
def gpt2_files(model_path, tmp_path):
    """A small tokenizer in GPT-2's two files."""
    model = json.loads(model_path.read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    lines = [" ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    return {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}


def test_training_keeps_every_text(model_path):
    tokenizer = build_tokenizer(tokenizer_model=str(model_path))
    assert tokenizer.vocab_size <= 320
    assert (tokenizer.eod_token, tokenizer.eod_id) == (END_OF_TEXT, 0)
    for text in [*TEXTS, "unseen: Ωß\x00\x1c\ufffd"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0])


def test_training_is_deterministic(model_path, tmp_path):
    again = train_byte_level_bpe(TEXTS * 20, 320, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == model_path.read_bytes()
    assert again.fingerprint == build_tokenizer(tokenizer_model=str(model_path)).fingerprint


def test_training_needs_room_for_the_bytes(tmp_path):
    with pytest.raises(UserError, match="--vocab-size 256 must be at least 257"):
        train_byte_level_bpe(TEXTS, 256, tmp_path / "x.json")
    assert train_byte_level_bpe(TEXTS, 257, tmp_path / "x.json").vocab_size == 257


def test_two_files_and_one_file_give_the_same_ids(model_path, gpt2_files):
    one, two = build_tokenizer(tokenizer_model=str(model_path)), build_tokenizer(**gpt2_files)
    assert one.encode_batch(TEXTS) == two.encode_batch(TEXTS) == [two.encode(text) for text in TEXTS]
    assert (two.tokenizer_type, two.eod_id, two.vocab_size) == ("GPT2BPETokenizer", one.eod_id, one.vocab_size)


def test_text_never_becomes_an_end_of_document(model_path, gpt2_files):
    """A page about GPT-2 that prints its end-of-text token must not end the document there."""
    for tokenizer in (build_tokenizer(tokenizer_model=str(model_path)), build_tokenizer(**gpt2_files)):
        ids = tokenizer.encode(f"one {END_OF_TEXT} two")
        assert tokenizer.eod_id not in ids
        assert tokenizer.decode(ids) == f"one {END_OF_TEXT} two"
        assert tokenizer.decode([tokenizer.eod_id]) == END_OF_TEXT
    # What the library does by itself:
    assert 0 in tokenizers.Tokenizer.from_file(str(model_path)).encode(f"one {END_OF_TEXT} two").ids


def test_settings_of_other_uses_do_not_touch_the_ids(model_path, tmp_path):
    plain = build_tokenizer(tokenizer_model=str(model_path))
    description = json.loads(model_path.read_text())
    busy = build_tokenizer(
        tokenizer_model=changed(
            model_path,
            tmp_path / "busy.json",
            truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
            padding={
                "strategy": {"Fixed": 64},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": END_OF_TEXT,
            },
            post_processor={
                "type": "BertProcessing",
                "sep": [END_OF_TEXT, 0],
                "cls": [END_OF_TEXT, 0],
            },
            model=dict(description["model"], dropout=0.9),
        )
    )
    assert busy.encode_batch(TEXTS) == plain.encode_batch(TEXTS)


def test_fingerprint_knows_the_model_not_the_file(model_path, tmp_path):
    plain = build_tokenizer(tokenizer_model=str(model_path))
    reformatted = build_tokenizer(tokenizer_model=changed(model_path, tmp_path / "a.json", padding=None))
    assert reformatted.fingerprint == plain.fingerprint
    description = json.loads(model_path.read_text())
    fewer = dict(description["model"], merges=description["model"]["merges"][:-1])
    other = build_tokenizer(tokenizer_model=changed(model_path, tmp_path / "b.json", model=fewer))
    assert other.fingerprint != plain.fingerprint


def test_a_directory_with_tokenizer_json_will_do(model_path):
    found = build_tokenizer(tokenizer_model=str(model_path.parent))
    assert found.fingerprint == build_tokenizer(tokenizer_model=str(model_path)).fingerprint


@pytest.mark.parametrize("name", ["</s>", "<eos>", "<|eot|>", "<|end_of_text|>"])
def test_other_names_of_the_end_of_document(tmp_path, name):
    vocabulary = {"[UNK]": 0, "hello": 1, name: 2}
    model = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.decoder = decoders.WordPiece()
    model.save(str(tmp_path / "t.json"))
    tokenizer = build_tokenizer(tokenizer_model=str(tmp_path / "t.json"))
    assert (tokenizer.eod_token, tokenizer.eod_id, tokenizer.vocab_size) == (name, 2, 3)
    assert tokenizer.encode("hello world") == [1, 0]


def test_long_documents_are_cut_without_a_trace(model_path, monkeypatch):
    text = "".join(TEXTS) * 200
    tokenizer = build_tokenizer(tokenizer_model=str(model_path))
    whole = tokenizers.Tokenizer.from_file(str(model_path)).encode(text).ids
    calls = []
    monkeypatch.setattr("megascale.data.tokenizer.PIECE_CHARACTERS", 64)
    monkeypatch.setattr(
        "megascale.data.tokenizer.pieces",
        lambda text: calls.append(len(text)) or [text[: len(TEXTS[0]) - 1], text[len(TEXTS[0]) - 1 :]],
    )
    assert tokenizer.encode(text) == whole
    assert calls == [len(text)]


def test_only_gpt2s_splitting_is_cut(model_path, tmp_path, monkeypatch):
    def never(text):
        raise AssertionError("cut")

    spaced = changed(model_path, tmp_path / "a.json", normalizer={"type": "NFC"})
    tokenizer = build_tokenizer(tokenizer_model=spaced)
    monkeypatch.setattr("megascale.data.tokenizer.pieces", never)
    assert tokenizer.encode("the cat")
    with pytest.raises(AssertionError, match="cut"):
        build_tokenizer(tokenizer_model=str(model_path)).encode("the cat")


WRONG_FLAGS = [
    ({}, "none was given"),
    ({"vocab_file": "v", "tokenizer_model": "t"}, "not both"),
    ({"vocab_file": "v"}, "takes --vocab-file and --merge-file"),
    ({"tokenizer_type": "GPT2BPETokenizer", "tokenizer_model": "t"}, "takes --vocab-file and --merge-file"),
    ({"tokenizer_type": "HuggingFaceTokenizer", "merge_file": "m"}, "takes --tokenizer-model"),
    ({"tokenizer_type": "BertWordPieceLowerCase"}, "BertWordPieceLowerCase is unknown"),
    ({"tokenizer_model": "absent.json"}, "--tokenizer-model absent.json cannot be read: No such file"),
    ({"vocab_file": "absent.json", "merge_file": "m"}, "--vocab-file absent.json cannot be read"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG_FLAGS)
def test_wrong_flags(flags, message):
    with pytest.raises(UserError, match=message):
        build_tokenizer(**flags)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b'{"model": ', "not JSON"),
        (b"[1, 2]", "must hold a JSON object, not a list"),
        (b'{"hello": 1}', "is not a tokenizer that `tokenizers` .* reads"),
        (b"{}", "is not a tokenizer that `tokenizers` .* reads"),
    ],
)
def test_unreadable_tokenizer_files_are_named(tmp_path, content, message):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as refusal:
        build_tokenizer(tokenizer_model=str(path))
    assert "broken.json" in str(refusal.value)


def test_a_tokenizer_without_end_of_document_is_refused(model_path, tmp_path):
    description = json.loads(model_path.read_text())
    model = json.loads(json.dumps(description["model"]).replace(END_OF_TEXT, "<nothing>"))
    path = changed(model_path, tmp_path / "x.json", added_tokens=[], model=model)
    with pytest.raises(UserError, match=r"x\.json has no end-of-document token"):
        build_tokenizer(tokenizer_model=path)


def test_a_vocabulary_that_would_drop_characters_is_refused(model_path, tmp_path):
    description = json.loads(model_path.read_text())
    model = dict(description["model"], merges=[], vocab={END_OF_TEXT: 0, "a": 1, "b": 2})
    with pytest.raises(UserError, match="lacks 254 of the 256 bytes"):
        build_tokenizer(tokenizer_model=changed(model_path, tmp_path / "x.json", model=model))
    with pytest.raises(UserError, match="neither bytes nor an unknown token"):
        build_tokenizer(tokenizer_model=changed(model_path, tmp_path / "y.json", model=model, pre_tokenizer=None))


def test_gpt2_files_are_checked_against_each_other(gpt2_files, tmp_path):
    def refused(message, **replaced):
        with pytest.raises(UserError, match=message):
            build_tokenizer(**{**gpt2_files, **replaced})

    def written(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    refused("line 2 needs the token 'qzx'", merge_file=written("m1", "#version: 0.2\nqzx zq\n"))
    refused("line 1: 'three words here' is not a pair", merge_file=written("m2", "three words here\n"))
    refused("holds no merges", merge_file=written("m3", "#version: 0.2\n"))
    refused("two tokens the same number", vocab_file=written("v1", '{"a": 0, "b": 0}'))
    refused("must map each token to its number", vocab_file=written("v2", '{"a": "0"}'))
    refused(r"has no <\|endoftext\|>", vocab_file=written("v3", '{"a": 0}'))


def test_real_gpt2_vocabulary_gives_the_librarys_ids(real_data):
    files = {"vocab_file": str(real_data / "gpt2/vocab.json"), "merge_file": str(real_data / "gpt2/merges.txt")}
    tokenizer = build_tokenizer(**files)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]  # as published with GPT-2
    library = ByteLevelBPETokenizer(files["vocab_file"], files["merge_file"])
    text = (real_data / "text/shakespeare.txt").read_text()
    wiki = (real_data / "wikitext103/wiki.valid.tokens").read_text()
    for sample in (text[:300_000], wiki[:300_000], *TEXTS):
        assert np.array_equal(tokenizer.encode(sample), library.encode(sample).ids)
