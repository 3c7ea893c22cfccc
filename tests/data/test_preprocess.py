"""Text to data sets: ids and bytes against a plain rewriting, any number of workers, nothing half-written."""

import json
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer

from megascale.data.indexed import IndexedDataset
from megascale.data.preprocess import PreprocessOptions, preprocess
from megascale.data.sidecar import read_sidecar, require_belongs
from megascale.data.tokenizer import TokenizerFiles, build_tokenizer, train_byte_level_bpe
from megascale.utils.errors import UserError
from megascale.utils.files import sha256_of

TEXTS = [f"document {number}: " + "the cat sat on the mat. " * (number % 7) for number in range(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_byte_level_bpe(TEXTS, 300, path)
    return TokenizerFiles(tokenizer_model=str(path))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text, "title": text[:12]}) + "\n" for text in TEXTS))
    return path


def run(tmp_path, source, model, name="out", **changes):
    options = {"inputs": (str(source),), "output_prefix": str(tmp_path / name), "tokenizer": model, **changes}
    return preprocess(PreprocessOptions(**options), show_progress=False)


def output_bytes(prefix):
    return [prefix.with_name(prefix.name + suffix).read_bytes() for suffix in (".bin", ".idx", ".json")]


@pytest.mark.parametrize("append_eod", [False, True])
def test_every_document_with_its_ids_in_order(tmp_path, source, model, append_eod):
    records = run(tmp_path, source, model, append_eod=append_eod)
    assert list(records) == [str(tmp_path / "out_text_document")]
    tokenizer = build_tokenizer(tokenizer_model=model.tokenizer_model)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.num_documents == len(TEXTS)
    for number, text in enumerate(TEXTS):
        expected = tokenizer.encode(text) + [tokenizer.eod_id] * append_eod
        assert dataset.tokens(number).tolist() == expected


def test_the_record_tells_how_it_was_made(tmp_path, source, model):
    (record,) = run(tmp_path, source, model, append_eod=True).values()
    prefix = str(tmp_path / "out_text_document")
    assert read_sidecar(prefix) == record
    tokenizer = build_tokenizer(tokenizer_model=model.tokenizer_model)
    assert (record.tokenizer.fingerprint, record.tokenizer.eod_id) == (tokenizer.fingerprint, tokenizer.eod_id)
    assert (record.num_documents, record.append_eod, record.json_key) == (300, True, "text")
    assert record.num_tokens == IndexedDataset(prefix).num_tokens
    assert (record.sources[0].path, record.sources[0].bytes) == (str(source), source.stat().st_size)
    assert record.bin.sha256 == sha256_of(prefix + ".bin")
    assert record.idx.sha256 == sha256_of(prefix + ".idx")


def test_workers_do_not_change_the_output(tmp_path, source, model, monkeypatch):
    run(tmp_path, source, model)
    # Small batches, so that three workers have many in flight and finish them out of order.
    monkeypatch.setattr("megascale.data.preprocess.read_batches", _small_batches)
    run(tmp_path, source, model, name="three", workers=3)
    assert output_bytes(tmp_path / "three_text_document") == output_bytes(tmp_path / "out_text_document")


def _small_batches(path, plain_text):
    from megascale.data.text_input import read_batches

    return read_batches(path, plain_text, batch_bytes=400)


def test_several_keys_and_several_files(tmp_path, source, model):
    second = tmp_path / "b.jsonl"
    second.write_text('{"text": "more", "title": "t"}\n')
    run(tmp_path, source, model, inputs=(str(source), str(second)), json_keys=("title", "text"))
    tokenizer = build_tokenizer(tokenizer_model=model.tokenizer_model)
    for key, last in (("title", "t"), ("text", "more")):
        dataset = IndexedDataset(tmp_path / f"out_{key}_document")
        assert dataset.num_documents == 301
        assert tokenizer.decode(dataset.tokens(300)) == last
        assert read_sidecar(dataset.prefix).json_key == key


def test_what_is_left_out_is_counted(tmp_path, model):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\nbroken\n\n{"text": ""}\n{"no": 1}\n{"no": 2}\n{"text": "b"}\n')
    (record,) = run(tmp_path, path, model, on_error="skip").values()
    assert record.num_documents == 2
    assert record.num_empty == 1
    assert record.skipped == {"blank": 1, "has no key 'text' (--json-keys)": 2, "not JSON": 1}


def test_a_bad_line_stops_and_leaves_nothing(tmp_path, source, model):
    with open(source, "a") as file:
        file.write("broken\n")
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"a\.jsonl, line 301: not JSON.*--on-error skip"):
            run(tmp_path, source, model, workers=workers)
    assert list(tmp_path.iterdir()) == [source]


def test_a_batch_that_fails_leaves_the_old_data_set(tmp_path, source, model):
    run(tmp_path, source, model)
    before = output_bytes(tmp_path / "out_text_document")
    with open(source, "a") as file:
        file.write("broken\n")
    with pytest.raises(UserError):
        run(tmp_path, source, model, overwrite=True)
    assert output_bytes(tmp_path / "out_text_document") == before


# A run over an endless input, whose workers leave a file named after their process.
ENDLESS_RUN = """
import os, sys, time
from pathlib import Path
from megascale.data import preprocess as module
from megascale.data.text_input import RecordBatch
from megascale.data.tokenizer import TokenizerFiles

source, model, output = sys.argv[1:]
encode_batch = module.encode_batch

def encode_and_sign(batch, options):
    Path(output).with_name(f"worker-{os.getpid()}").touch()
    return encode_batch(batch, options)

def endless(path, plain_text):
    while True:
        yield RecordBatch(path, True, [(1, b'{"text": "the cat sat on the mat"}')] * 100, 0)
        time.sleep(0.01)

module.encode_batch, module.read_batches = encode_and_sign, endless
if __name__ == "__main__":
    files = TokenizerFiles(tokenizer_model=model)
    module.preprocess(module.PreprocessOptions((source,), output, files, workers=2), show_progress=False)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc to see whether a process lives")
def test_a_kill_leaves_no_data_set_and_no_worker(tmp_path, source, model):
    """kill -9 in the middle: nothing has a final name, and the workers notice that they are alone."""
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS_RUN)
    process = subprocess.Popen([sys.executable, script, source, model.tokenizer_model, tmp_path / "out"])
    deadline = time.monotonic() + 60
    try:
        while len(workers := list(tmp_path.glob("worker-*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    while any(Path("/proc", worker.name.removeprefix("worker-")).exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list(tmp_path.glob("out*"))


def test_existing_output_is_kept_unless_told(tmp_path, source, model):
    run(tmp_path, source, model)
    with pytest.raises(UserError, match=r"out_text_document\.bin exists.*--overwrite"):
        run(tmp_path, source, model)
    run(tmp_path, source, model, overwrite=True, append_eod=True)
    record = read_sidecar(tmp_path / "out_text_document")
    require_belongs(record, IndexedDataset(tmp_path / "out_text_document"))
    assert record.append_eod


def test_no_document_at_all_is_an_error(tmp_path, model):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n\n{"other": 1}\n')
    with pytest.raises(
        UserError, match=r"no document is left \(1 blank; 1 has no key 'text'.*; 1 with an empty 'text'\)"
    ):
        run(tmp_path, path, model, on_error="skip")
    assert list(tmp_path.iterdir()) == [path]


def test_wrong_options(tmp_path, source, model):
    for changes, message in (
        ({"workers": 0}, "--workers 0 must be at least 1"),
        ({"output_prefix": str(tmp_path / "absent" / "x")}, "absent does not exist"),
        ({"tokenizer": TokenizerFiles()}, "say which tokenizer"),
        ({"inputs": (str(tmp_path / "absent.jsonl"),)}, "is not a file"),
    ):
        with pytest.raises(UserError, match=message):
            run(tmp_path, source, model, **changes)


def test_real_text_with_gpt2s_vocabulary(tmp_path, real_data):
    """Ids equal the library's own and bytes equal Megatron's layout, written here by hand."""
    files = TokenizerFiles(vocab_file=str(real_data / "gpt2/vocab.json"), merge_file=str(real_data / "gpt2/merges.txt"))
    source = real_data / "lambada/lambada_test.jsonl"
    run(tmp_path, source, files, append_eod=True)
    library = ByteLevelBPETokenizer(files.vocab_file, files.merge_file)
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    documents = [[*encoding.ids, 50256] for encoding in library.encode_batch(texts)]
    flat = np.concatenate([np.array(ids, dtype="<u2") for ids in documents])
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(documents), len(documents) + 1)
    lengths = np.array([len(ids) for ids in documents])
    index += lengths.astype("<i4").tobytes()
    index += ((np.cumsum(lengths) - lengths) * 2).astype("<i8").tobytes()
    index += np.arange(len(documents) + 1).astype("<i8").tobytes()
    assert (tmp_path / "out_text_document.bin").read_bytes() == flat.tobytes()
    assert (tmp_path / "out_text_document.idx").read_bytes() == index


def test_a_long_real_document_is_cut_without_a_trace(tmp_path, real_data):
    """Shakespeare in one document: 9 pieces, the ids of the whole."""
    files = TokenizerFiles(vocab_file=str(real_data / "gpt2/vocab.json"), merge_file=str(real_data / "gpt2/merges.txt"))
    source = real_data / "text/shakespeare.txt"
    run(tmp_path, source, files)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    library = ByteLevelBPETokenizer(files.vocab_file, files.merge_file)
    assert dataset.num_documents == 1
    assert dataset.tokens(0).tolist() == library.encode(source.read_text()).ids
