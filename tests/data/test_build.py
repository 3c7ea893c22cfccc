"""From data flags to sources: split, blend, and data that does not fit the run."""

import numpy as np
import pytest

from megascale.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig
from megascale.data.blend import Blend
from megascale.data.build import build_sources, open_dataset, stored_vocab_size
from megascale.data.indexed import IndexedWriter
from megascale.data.preprocess import PreprocessOptions, preprocess
from megascale.data.samples import ShardedSamples
from megascale.data.tokenizer import TokenizerFiles, build_tokenizer, train_byte_level_bpe
from megascale.utils.errors import UserError

TEXTS = [f"document {number}: the cat sat on the mat. " * 3 for number in range(200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three data sets: a and b by one tokenizer, other by another; bare has no record beside it."""
    folder = tmp_path_factory.mktemp("data")
    for name, size in (("tokenizer", 300), ("other", 280)):
        train_byte_level_bpe(TEXTS, size, folder / f"{name}.json")
    for name, texts, tokenizer in (("a", TEXTS, "tokenizer"), ("b", TEXTS[:80], "tokenizer"), ("o", TEXTS, "other")):
        (folder / f"{name}.txt").write_text("\n".join(texts))
        preprocess(
            PreprocessOptions(
                (str(folder / f"{name}.txt"),),
                str(folder / name),
                TokenizerFiles(tokenizer_model=str(folder / f"{tokenizer}.json")),
                plain_text="line",
                append_eod=name != "b",
            ),
            show_progress=False,
        )
    with IndexedWriter(folder / "bare", np.uint16) as writer:
        for number in range(100):
            writer.add_document(np.arange(number, number + 40) % 290)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return build_tokenizer(tokenizer_model=str(folder / "tokenizer.json"))


def config(folder, *data_path, vocab_size=300, **data):
    """A resolved configuration as far as the data needs it."""
    names = tuple(name if name[0].isdigit() else str(folder / name) for name in data_path)
    if "valid_data_path" in data:
        data["valid_data_path"] = tuple(str(folder / name) for name in data["valid_data_path"])
    return RunConfig(
        model=ModelConfig(vocab_size=vocab_size),
        data=DataConfig(**{"data_path": names, "seq_length": 16, "num_shards": 2, **data}),
        train=TrainConfig(train_iters=50, global_batch_size=8, eval_iters=3),
    )


def documents_of(source):
    return {span.document for number in range(source.samples_per_epoch) for span in source.spans(number)}


def test_split_gives_every_document_to_one_side(folder, tokenizer):
    sources = build_sources(config(folder, "a_text_document", split="3,1"), tokenizer)
    assert isinstance(sources.train, ShardedSamples)
    train, valid = documents_of(sources.train), documents_of(sources.valid)
    assert not train & valid
    assert train | valid == set(range(200))
    assert 0.15 < len(valid) / 200 < 0.35
    assert (sources.train.num_shards, sources.train.shuffle) == (2, True)
    assert (sources.valid.num_shards, sources.valid.shuffle) == (1, False)
    assert sources.eod_id == tokenizer.eod_id == 0


def test_no_validation_part(folder, tokenizer):
    sources = build_sources(config(folder, "a_text_document", split="1,0"), tokenizer)
    assert sources.valid is None
    assert sources.train.num_documents == 200
    assert "validation data: none" in sources.describe()


def test_a_third_part_is_not_read(folder, tokenizer):
    sources = build_sources(config(folder, "a_text_document", split="2,1,1"), tokenizer)
    assert len(documents_of(sources.train) | documents_of(sources.valid)) < 180


def test_validation_data_of_its_own(folder, tokenizer):
    sources = build_sources(config(folder, "a_text_document", valid_data_path=("b_text_document",)), tokenizer)
    assert sources.train.num_documents == 200
    assert sources.valid.num_documents == 80
    assert sources.valid.dataset.prefix.endswith("b_text_document")


def test_weights_blend(folder, tokenizer):
    sources = build_sources(config(folder, "3", "a_text_document", "1", "b_text_document", split="3,1"), tokenizer)
    assert isinstance(sources.train, Blend)
    assert sources.train.counts(400) == (300, 100)
    assert isinstance(sources.valid, Blend)


def test_without_weights_each_set_is_read_once_an_epoch(folder, tokenizer):
    sources = build_sources(config(folder, "a_text_document", "b_text_document", split="1,0"), tokenizer)
    sizes = tuple(source.samples_per_epoch for source in sources.train.sources)
    assert sources.train.counts(sum(sizes)) == sizes
    assert sources.train.samples_per_epoch == sum(sizes)


def test_description_has_the_numbers(folder, tokenizer):
    sources = build_sources(config(folder, "a_text_document", split="3,1"), tokenizer)
    text = sources.describe()
    train = sources.train
    assert (
        f"{train.num_documents:,} documents, {train.num_tokens:,} tokens, {train.samples_per_epoch:,} samples" in text
    )
    assert f"{400 / train.samples_per_epoch:.2f} epochs" in text
    assert "the run reads 400 samples" in text
    assert "each validation reads the first 24 samples" in text


def test_notes_on_what_cannot_be_checked(folder, tokenizer):
    text = build_sources(config(folder, "bare", "b_text_document", split="1,0"), tokenizer).describe()
    assert "bare has no bare.json beside it, so its tokenizer cannot be compared" in text
    assert "b_text_document was prepared without --append-eod" in text
    text = build_sources(config(folder, "bare", valid_data_path=("bare",)), tokenizer).describe()
    assert "bare is both trained on and validated on" in text


def test_without_a_tokenizer_the_record_tells(folder):
    sources = build_sources(config(folder, "a_text_document"), None)
    assert sources.eod_id == 0
    assert build_sources(config(folder, "bare"), None).eod_id is None
    assert stored_vocab_size(config(folder, "a_text_document")) == open_tokenizer_size(folder)
    assert stored_vocab_size(config(folder, "bare")) is None


def open_tokenizer_size(folder):
    return build_tokenizer(tokenizer_model=str(folder / "tokenizer.json")).vocab_size


def test_data_of_another_tokenizer_is_refused(folder, tokenizer):
    with pytest.raises(UserError, match=r"o_text_document was prepared with.*280 tokens.*tokenizer is a.*300 tokens"):
        build_sources(config(folder, "o_text_document"), tokenizer)
    with pytest.raises(UserError, match=r"a_text_document and .*o_text_document were prepared with different"):
        build_sources(config(folder, "a_text_document", "o_text_document"), None)
    with pytest.raises(UserError, match="--vocab-size 200 is less than the 300 tokens"):
        build_sources(config(folder, "a_text_document", vocab_size=200), None)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("a", "did you mean .*/a_text_document"),
        ("a_text_document.bin", "did you mean .*/a_text_document"),
        ("a_txet_document", "did you mean .*/a_text_document"),
        (
            "zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz",
            "there is",
        ),
        ("absent/a", "absent does not exist; tools/preprocess_data.py"),
    ],
)
def test_a_missing_data_set_is_answered_with_the_nearest(folder, tokenizer, name, advice):
    with pytest.raises(UserError, match=advice) as refusal:
        build_sources(config(folder, name), tokenizer)
    assert str(folder / name) + ".bin" in str(refusal.value)


def test_half_a_pair(folder, tmp_path):
    (tmp_path / "x.idx").write_bytes((folder / "bare.idx").read_bytes())
    with pytest.raises(UserError, match=r"x\.bin not found; the other file of the pair is there"):
        open_dataset(str(tmp_path / "x"))


def test_a_record_of_other_files_is_refused(folder, tokenizer, tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"x{suffix}").write_bytes((folder / f"bare{suffix}").read_bytes())
    (tmp_path / "x.json").write_bytes((folder / "a_text_document.json").read_bytes())
    with pytest.raises(UserError, match=r"x\.bin is 8000 bytes long, but .*x\.json describes a file of \d+"):
        build_sources(config(tmp_path, "x"), tokenizer)
    (tmp_path / "x.json").write_text('{"format_version": 1}')
    with pytest.raises(UserError, match=r"x\.json is not the record of a data set"):
        build_sources(config(tmp_path, "x"), tokenizer)
    (tmp_path / "x.json").write_text((folder / "a_text_document.json").read_text().replace('on": 1,', 'on": 9,', 1))
    with pytest.raises(UserError, match="format version 9"):
        build_sources(config(tmp_path, "x"), tokenizer)


def test_too_little_data_names_set_and_flag(folder, tokenizer):
    with pytest.raises(UserError, match=r"--split 29,1, validation part: data set .*b_text_document"):
        build_sources(config(folder, "b_text_document", seq_length=256), tokenizer)
    with pytest.raises(UserError, match=r"b_text_document: --split 10000,1 .*leaves part 2"):
        build_sources(config(folder, "b_text_document", split="10000,1"), tokenizer)
