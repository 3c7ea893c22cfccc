"""The three tools as a user types them: train a tokenizer, prepare, inspect; mistakes end with code 2 and one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def tool(name, *arguments):
    command = [sys.executable, str(TOOLS / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    texts = [f"page {number}. The cat sat on the mat." for number in range(50)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    trained = tool("train_tokenizer", "--input", folder / "a.jsonl", "--vocab-size", 270, "--output", folder / "t.json")
    assert trained.returncode == 0, trained.stderr
    assert "270 tokens" in trained.stdout
    arguments = ["--input", folder / "a.jsonl", "--output-prefix", folder / "a", "--tokenizer-model", folder / "t.json"]
    done = tool("preprocess_data", *arguments, "--append-eod", "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert "a_text_document: 50 documents" in done.stdout
    return folder, arguments


def test_inspecting(prepared):
    folder, _ = prepared
    shown = tool("inspect_dataset", folder / "a_text_document", "--document", 7, "--tokenizer-model", folder / "t.json")
    assert "page 7. The cat sat on the mat.<|endoftext|>" in shown.stdout
    verified = tool("inspect_dataset", folder / "a_text_document", "--verify")
    assert verified.returncode == 0
    assert "documents  50" in verified.stdout
    assert verified.stdout.count("as recorded") == 2


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("preprocess_data", [], "exists"),
        ("preprocess_data", ["--overwrite", "--json-keys", "body"], "line 1: has no key 'body'"),
        ("preprocess_data", ["--tokenizer-model", "absent.json"], "absent.json cannot be read"),
    ],
)
def test_mistakes_end_with_one_message(prepared, name, change, message):
    _, arguments = prepared
    failed = tool(name, *arguments, *change)
    assert failed.returncode == 2
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1


def test_other_tools_mistakes(prepared):
    folder, _ = prepared
    for failed in (
        tool("inspect_dataset", folder / "a_text_documnet"),
        tool("train_tokenizer", "--input", folder / "a.jsonl", "--vocab-size", 9, "--output", folder / "u.json"),
        tool("train_tokenizer", "--input", folder / "a.jsonl", "--vocab-size", 290, "--output", folder / "t.json"),
    ):
        assert failed.returncode == 2
        assert failed.stderr.startswith("error: ")
        assert len(failed.stderr.strip().splitlines()) == 1
