"""A damaged or unfitting checkpoint is refused, naming the file or tensor, before a single value is changed."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.checkpoint.load import find_latest, list_checkpoints, load_tensors, read_manifest, verify
from megascale.checkpoint.records import FileRecord, SliceRecord, to_text
from megascale.checkpoint.tensors import TensorSlice
from megascale.utils.errors import UserError
from tests.checkpoint.saving import small_checkpoint, weights

FILES = ["rank_00000.safetensors", "rank_00001.safetensors", "rank_00000.json", "rank_00001.json", "manifest.json"]


def targets() -> list[TensorSlice]:
    return [TensorSlice.whole(name, torch.zeros_like(tensor)) for name, tensor in weights().items()]


def rewrite_manifest(path: Path, **changes: Any) -> None:
    """Change the manifest as a broken writer would: consistent with its own digest."""
    (path / "manifest.json").write_text(to_text(replace(read_manifest(path), **changes)))


def test_an_intact_checkpoint_is_verified(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, 4)
    assert verify(path) == read_manifest(path)
    assert find_latest(tmp_path) == find_latest(path) == path


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_byte_is_found(tmp_path: Path, name: str) -> None:
    """Bytes over the whole file, ends included; in JSON a flip changes the content or breaks the syntax."""
    path = small_checkpoint(tmp_path, 4)
    content = (path / name).read_bytes()
    step = max(1, len(content) // 40)
    for position in sorted({*range(0, len(content), step), len(content) - 1}):
        if name.endswith(".json") and chr(content[position]).isspace():
            continue  # another kind of white space would mean the same
        flipped = bytearray(content)
        flipped[position] ^= 0x04
        (path / name).write_bytes(flipped)
        with pytest.raises(UserError, match=name):
            verify(path)
    (path / name).write_bytes(content)
    verify(path)


def test_a_flipped_byte_stops_the_load_before_it_changes_anything(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, 4)
    file = path / "rank_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert find_latest(tmp_path) == path, "the size is right: only the hash can tell"
    wanted = targets()
    with pytest.raises(UserError, match=r"rank_00001\.safetensors"):
        load_tensors(path, wanted)
    assert all(not item.data.any() for item in wanted)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, name: str, keep: float) -> None:
    older = small_checkpoint(tmp_path, 3)
    path = small_checkpoint(tmp_path, 4)
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(UserError, match=name):
        verify(path)
    with pytest.raises(UserError, match=name):
        find_latest(path)
    assert find_latest(tmp_path) == older


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    older = small_checkpoint(tmp_path, 3)
    path = small_checkpoint(tmp_path, 4)
    (path / name).unlink()
    with pytest.raises(UserError, match=name):
        verify(path)
    if not name.endswith("json"):
        with pytest.raises(UserError, match=name):
            load_tensors(path, targets())
    assert find_latest(tmp_path) == older


def test_what_is_passed_over_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older = small_checkpoint(tmp_path / "checkpoints", 3)
    (small_checkpoint(tmp_path / "checkpoints", 4) / "rank_00000.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        assert find_latest(tmp_path) == older
    assert "step 4" in caplog.text
    assert "rank_00000.safetensors is missing" in caplog.text
    skipped: list[int] = []
    assert find_latest(tmp_path, on_skipped=lambda entry: skipped.append(entry.step)) == older
    assert skipped == [4]
    assert [(entry.step, entry.problem is None) for entry in list_checkpoints(tmp_path)] == [(4, False), (3, True)]


def test_only_damaged_checkpoints_are_not_taken_for_a_new_run(tmp_path: Path) -> None:
    (small_checkpoint(tmp_path, 3) / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"(?s)no checkpoint in .* can be loaded.*manifest\.json"):
        find_latest(tmp_path)


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "never_made") is None
    (tmp_path / ".step_00000009.partial").mkdir()
    assert find_latest(tmp_path) is None
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        find_latest(tmp_path / "file")


def test_newest_is_by_step_not_by_name_or_time(tmp_path: Path) -> None:
    newest = small_checkpoint(tmp_path, 100_000_000)  # nine digits: before step 99,999,999 in the order of names
    small_checkpoint(tmp_path, 99_999_999)
    assert find_latest(tmp_path) == newest


def test_a_checkpoint_copied_elsewhere_loads_and_one_renamed_to_another_step_does_not(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, 4)
    shutil.copytree(path, tmp_path / "kept" / "best")
    assert find_latest(tmp_path / "kept" / "best") == tmp_path / "kept" / "best"
    path.rename(tmp_path / "step_00000009")
    with pytest.raises(UserError, match=r"named after step 9.*is of step 4"):
        find_latest(tmp_path / "step_00000009")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda item: replace_name(item, "embeding.weight"), r"embeding\.weight is not in it.*embedding\.weight"),
        (lambda item: cut_shape(item, (8, 6)), r"shape \[8, 12\] in it, this run has \[8, 6\]"),
        (lambda item: TensorSlice.whole(item.name, item.data.double()), "is float32 in it, this run has float64"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[TensorSlice], TensorSlice], message: str
) -> None:
    path = small_checkpoint(tmp_path, 4)
    first, *others = targets()
    with pytest.raises(UserError, match=message):
        load_tensors(path, [*others, change(first)])
    assert all(not item.data.any() for item in others)


def replace_name(item: TensorSlice, name: str) -> TensorSlice:
    return TensorSlice(name, item.global_shape, item.offset, item.data)


def cut_shape(item: TensorSlice, shape: tuple[int, ...]) -> TensorSlice:
    return TensorSlice.whole(item.name, torch.zeros(shape))


def test_all_misfits_are_reported_together_and_counted(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, 4)
    with pytest.raises(UserError) as caught:
        load_tensors(path, [TensorSlice.whole(f"other.{index}", torch.zeros(2)) for index in range(11)])
    assert "other.0" in str(caught.value)
    assert "3 more" in str(caught.value)


def test_another_format_version_says_so(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, 4)
    rewrite_manifest(path, format_version=99, megascale_version="7.0")
    with pytest.raises(UserError, match=r"format 99 \(written by megascale 7\.0\).*reads format 1"):
        read_manifest(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"step": 4}', "\x80", '{"format_version": 1}'])
def test_what_is_no_manifest_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = small_checkpoint(tmp_path, 4)
    (path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"manifest\.json"):
        read_manifest(path)


def test_values_edited_by_hand_are_refused(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, 4)
    file = path / "manifest.json"
    document = json.loads(file.read_text())
    document["state"]["step"] = 5
    file.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"manifest\.json does not match its own sha256"):
        read_manifest(path)
    document["state"]["step"] = 4
    file.write_text(json.dumps(document, indent=8))  # spacing is not content
    assert read_manifest(path).state == {"step": 4}


def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    """Valid digest and structure, impossible content: what a faulty writer could leave."""
    path = small_checkpoint(tmp_path, 4)
    manifest = read_manifest(path)
    matrix = manifest.tensors["embedding.weight"]
    first, second = matrix.slices
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "gap": ({"tensors": {"w": replace(matrix, slices=(first,))}}, "gap"),
        "overlap": ({"tensors": {"w": replace(matrix, slices=(first, replace(second, offset=(3, 0))))}}, "overlap"),
        "outside": (
            {"tensors": {"w": replace(matrix, slices=(first, replace(second, offset=(5, 0))))}},
            "does not fit",
        ),
        "same key": ({"tensors": {"w": replace(matrix, slices=(first, replace(first, offset=(4, 0))))}}, "2 times"),
        "unlisted": (
            {"tensors": {"w": replace(matrix, slices=(first, SliceRecord("other.safetensors", "w", (4, 0), (4, 12))))}},
            "other.safetensors, which is not among the files",
        ),
        "elsewhere": ({"files": {**manifest.files, "../../secret": FileRecord(1, "0" * 64)}}, "not a plain file name"),
        "no hash": ({"files": {**manifest.files, "extra.bin": FileRecord(1, "")}}, "no valid size and sha256"),
        "negative shape": ({"tensors": {"w": replace(matrix, shape=(-8, -12))}}, "is not a shape"),
    }
    for name, (changes, message) in wrong.items():
        rewrite_manifest(path, **changes)
        with pytest.raises(UserError, match=message):
            read_manifest(path)
        rewrite_back = to_text(manifest)
        (path / "manifest.json").write_text(rewrite_back)
        assert read_manifest(path) == manifest, name


@pytest.mark.parametrize("value", ["7", 7.0, True, None])
def test_a_field_of_another_type_is_refused(tmp_path: Path, value: Any) -> None:
    path = small_checkpoint(tmp_path, 4)
    (path / "manifest.json").write_text(to_text(replace(read_manifest(path), step=value)))
    with pytest.raises(UserError, match=r"manifest\.json has not the structure.*step"):
        read_manifest(path)


def test_checking_a_checkpoint_needs_no_torch(tmp_path: Path) -> None:
    small_checkpoint(tmp_path, 4)
    code = (
        "import sys; from megascale.checkpoint.manifest import find_latest, read_manifest, verify;"
        f"verify(find_latest({str(tmp_path)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_slices_that_cannot_be_are_refused_when_made() -> None:
    with pytest.raises(ValueError, match=r"w.*\[2\].*\[3\].*\[4\]"):
        TensorSlice("w", (4,), (2,), torch.zeros(3))
    with pytest.raises(ValueError, match="does not lie in"):
        TensorSlice("w", (4, 1), (0,), torch.zeros(3))
    with pytest.raises(ValueError, match="needs a name"):
        TensorSlice("", (3,), (0,), torch.zeros(3))
    with pytest.raises(ValueError, match="meta"):
        TensorSlice.whole("w", torch.zeros(3, device="meta"))
