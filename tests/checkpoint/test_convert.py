"""Recutting changes no value and averaging is the exact mean, whatever layouts the checkpoints came from."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megascale.checkpoint.boxes import Box
from megascale.checkpoint.convert import average, newest_complete, reshard
from megascale.checkpoint.load import load_tensors, read_manifest, verify
from megascale.checkpoint.tensors import TensorSlice
from megascale.utils.errors import UserError
from tests.checkpoint.saving import cut, random_boxes, save

SHAPES = {
    "model.embedding": (8, 12),
    "model.row": (6, 8),
    "model.bias": (5,),
    "optimizer.exp_avg.embedding": (8, 12),
    "optimizer.exp_avg_sq.bias": (5,),
}
SPLITS = {"model.embedding": 0, "model.row": 1, "model.bias": None, "optimizer.exp_avg.embedding": 0}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def save_scattered(directory: Path, step: int, content: dict[str, torch.Tensor], num_ranks: int) -> Path:
    """A checkpoint in uneven boxes dealt to ranks at random: more than any layout (ZeRO-1, stages) would do."""
    source = random.Random(step)
    by_rank: list[list[TensorSlice]] = [[] for _ in range(num_ranks)]
    for name, tensor in content.items():
        for box in random_boxes(tuple(tensor.shape), 3, source):
            by_rank[source.randrange(num_ranks)].append(cut(name, tensor, box))
    state = {"train": {"step": step, "validated": step, "validation_loss": 1.5, "samples": 8 * step}}
    return save(directory, step, by_rank, state=state)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    found = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
    load_tensors(path, [TensorSlice.whole(name, tensor) for name, tensor in found.items()])
    return found


@pytest.mark.parametrize(("num_tp", "num_files"), [(1, 1), (2, 2), (4, 4), (2, 6), (1, 3), (1, 9)])
def test_reshard_cuts_as_asked_and_changes_no_value(tmp_path: Path, num_tp: int, num_files: int) -> None:
    content = tensors(0)
    source = save_scattered(tmp_path / "run", 7, content, num_ranks=3)
    path = reshard(source, tmp_path / "new", num_tp, num_files, SPLITS)
    manifest = verify(path)
    assert path == tmp_path / "new" / "checkpoints" / "step_00000007"
    assert (manifest.state, manifest.config) == (read_manifest(source).state, read_manifest(source).config)
    assert manifest.world_size == num_files
    assert all(torch.equal(found, content[name]) for name, found in loaded(path).items())
    per_slice = num_files // num_tp
    for name, tensor in manifest.tensors.items():
        dim = SPLITS.get(name)
        parts = sorted((int(part.file[5:10]) // per_slice, part.box) for part in tensor.slices)
        if dim is None:
            assert parts == [(0, Box((0,) * len(tensor.shape), tensor.shape))]
        else:
            assert [rank for rank, _ in parts] == list(range(num_tp))
            assert all(box.shape[dim] == tensor.shape[dim] // num_tp for _, box in parts)
            assert [box.offset[dim] for _, box in parts] == [r * tensor.shape[dim] // num_tp for r in range(num_tp)]


def test_there_and_back_is_bitwise_the_same_files(tmp_path: Path) -> None:
    """2 -> 1 -> 4 -> 2: the files depend on values and layout only."""
    path = reshard(save_scattered(tmp_path / "run", 7, tensors(0), 3), tmp_path / "a", 2, 2, SPLITS)
    first = read_manifest(path).files
    for number, num_tp in enumerate((1, 4, 2)):
        path = reshard(path, tmp_path / f"b{number}", num_tp, num_tp, SPLITS)
    assert read_manifest(path).files == first


def test_what_does_not_divide_is_named(tmp_path: Path) -> None:
    source = save_scattered(tmp_path / "run", 7, tensors(0), 1)
    with pytest.raises(UserError, match=r"--tensor-model-parallel-size 3 .*dim 0 of model.embedding is 8 long"):
        reshard(source, tmp_path / "new", 3, 3, SPLITS)
    with pytest.raises(UserError, match="--num-files 3 is not a multiple of --tensor-model-parallel-size 2"):
        reshard(source, tmp_path / "new", 2, 3, SPLITS)
    assert not (tmp_path / "new").exists()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_damage_and_occupied_places_are_refused(tmp_path: Path) -> None:
    source = save_scattered(tmp_path / "run", 7, tensors(0), 1)
    other = save_scattered(tmp_path / "run", 8, tensors(1), 1)
    with pytest.raises(UserError, match="already holds checkpoints"):
        reshard(source, tmp_path / "run", 1, 1, SPLITS)
    flip(other / "rank_00000.safetensors")
    for act in (
        lambda: reshard(other, tmp_path / "new", 1, 1, SPLITS),
        lambda: average([source, other], tmp_path / "new"),
    ):
        with pytest.raises(UserError, match=r"rank_00000\.safetensors is not what was saved"):
            act()
    assert not (tmp_path / "new").exists()


def test_the_mean_is_that_of_float64(tmp_path: Path) -> None:
    """Checkpoints of different layouts, given out of order; values that float32 sums would round otherwise."""
    contents = {step: tensors(step) for step in (30, 10, 50, 20, 40)}
    for step, content in contents.items():
        content["model.bias"] *= 10.0 ** (step / 10)
    paths = [save_scattered(tmp_path / f"run{step}", step, content, step // 10) for step, content in contents.items()]
    path, copied = average(paths, tmp_path / "mean")
    assert copied == ["optimizer.exp_avg.embedding", "optimizer.exp_avg_sq.bias"]
    manifest = verify(path)
    assert manifest.step == 50
    assert manifest.state["averaged_steps"] == [10, 20, 30, 40, 50]
    assert manifest.state["train"] == {"step": 50, "validated": 50, "validation_loss": None, "samples": 400}
    found = loaded(path)
    in_float32_differs = False
    for name in SHAPES:
        stack = np.stack([contents[step][name].numpy() for step in sorted(contents)])
        if name.startswith("optimizer."):
            assert torch.equal(found[name], contents[50][name])
            continue
        exact = stack.astype(np.float64).sum(axis=0) / 5
        assert np.array_equal(found[name].numpy(), exact.astype(np.float32)), name
        in_float32_differs |= not np.array_equal(stack.sum(axis=0, dtype=np.float32) / np.float32(5), found[name])
    assert in_float32_differs, "a sum in float32 would have been seen"


def test_averaging_equal_weights_changes_nothing(tmp_path: Path) -> None:
    content = tensors(0)
    paths = [save_scattered(tmp_path / str(step), step, content, 2) for step in (1, 2, 3)]
    path, _ = average(paths, tmp_path / "mean")
    assert all(torch.equal(found, content[name]) for name, found in loaded(path).items())


def test_what_has_no_mean_is_refused(tmp_path: Path) -> None:
    first = save_scattered(tmp_path / "run", 1, tensors(1), 1)
    second = save_scattered(tmp_path / "run", 2, {**tensors(2), "model.bias": torch.zeros(6)}, 1)
    with pytest.raises(UserError, match=r"model.bias is float32 \[5\] and float32 \[6\]"):
        average([first, second], tmp_path / "mean")
    with pytest.raises(UserError, match="a mean needs two or more"):
        average([first], tmp_path / "mean")
    with pytest.raises(UserError, match="given twice"):
        average([first, tmp_path / "run" / ".." / "run" / first.name], tmp_path / "mean")


def test_the_newest_complete_ones_are_counted_without_damaged_ones(tmp_path: Path) -> None:
    paths = [save_scattered(tmp_path / "run", step, tensors(step), 1) for step in (1, 2, 3)]
    (paths[1] / "rank_00000.json").unlink()
    assert newest_complete(tmp_path / "run", 2) == [paths[2], paths[0]]
    with pytest.raises(UserError, match=r"holds 2 complete checkpoints \(not complete: .*rank_00000.json is missing"):
        newest_complete(tmp_path / "run", 3)
