"""What is saved in one layout is loaded in any other, bit for bit, and nothing but the needed parts is read."""

from __future__ import annotations

import json
import random
import struct
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megascale.checkpoint import manifest as manifest_module
from megascale.checkpoint.boxes import Box
from megascale.checkpoint.load import find_latest, load_tensors, read_manifest
from megascale.checkpoint.save import save_checkpoint
from megascale.checkpoint.tensor_file import TensorFile, write_tensor_file
from megascale.checkpoint.tensors import TensorSlice
from megascale.config.layout import ParallelLayout
from megascale.parallel.context import ParallelContext
from tests.checkpoint.saving import cut, empty, even_boxes, random_boxes, save, small_checkpoint, weights
from tests.ranks import RankPool

SPLITS = [(dim, num_parts) for dim in (0, 1) for num_parts in (1, 2, 4)]
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("saved_as", "loaded_as"), list(product(SPLITS, SPLITS)))
def test_any_split_loads_as_any_other(tmp_path: Path, saved_as: tuple[int, int], loaded_as: tuple[int, int]) -> None:
    whole = torch.arange(8 * 12, dtype=torch.float32).reshape(8, 12)
    parts = [[cut("weight", whole, box)] for box in even_boxes((8, 12), *saved_as)]
    path = save(tmp_path, 1, parts)
    for box in even_boxes((8, 12), *loaded_as):
        wanted, expected = empty("weight", whole, box), cut("weight", whole, box)
        load_tensors(path, [wanted])
        assert torch.equal(wanted.data, expected.data)


@pytest.mark.parametrize("seed", range(12))
def test_random_partitions_load_as_random_boxes(tmp_path: Path, seed: int) -> None:
    """Uneven boxes that form no grid, several of one tensor on one rank, some ranks with nothing."""
    source = random.Random(seed)
    shapes = {"a": (7,), "b": (5, 9), "c": (3, 4, 6), "d": (2, 3, 2, 5)}
    tensors = {
        name: torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for name, shape in shapes.items()
    }
    by_rank: list[list[TensorSlice]] = [[] for _ in range(3)]
    for name, tensor in tensors.items():
        for box in random_boxes(shapes[name], source.randint(0, 6), source):
            by_rank[source.randrange(2)].append(cut(name, tensor, box))
    path = save(tmp_path, 5, by_rank)
    assert not (path / "rank_00002.safetensors").exists()

    wanted, expected = [], []
    for name, tensor in tensors.items():
        for box in random_boxes(shapes[name], source.randint(0, 6), source):
            wanted.append(empty(name, tensor, box))
            expected.append(cut(name, tensor, box))
    load_tensors(path, wanted)
    for got, right in zip(wanted, expected, strict=True):
        assert bits(got.data) == bits(right.data)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type_keeps_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    content = torch.randint(
        0, 2 if dtype is torch.bool else 256, (4, 6 * 8), generator=torch.Generator().manual_seed(1)
    )
    whole = content.to(torch.uint8).view(dtype)  # any bits at all, NaNs with payloads among them
    path = save(tmp_path, 1, [[cut("weight", whole, box)] for box in even_boxes(tuple(whole.shape), 1, 2)])
    wanted = TensorSlice.whole("weight", torch.zeros_like(whole))
    load_tensors(path, [wanted])
    assert bits(wanted.data) == bits(whole)


def test_scalars_empty_tensors_and_views(tmp_path: Path) -> None:
    scalar, nothing = torch.tensor(3.5, dtype=torch.bfloat16), torch.zeros(0, 4)
    matrix = torch.arange(24.0).reshape(4, 6)
    transposed = TensorSlice.whole("transposed", matrix.t())  # not contiguous
    path = save(tmp_path, 1, [[TensorSlice.whole("s", scalar), TensorSlice.whole("n", nothing), transposed]])
    targets = [torch.zeros((), dtype=torch.bfloat16), torch.ones(0, 4), torch.zeros(4, 6).t()]
    load_tensors(path, [TensorSlice.whole(n, t) for n, t in zip(("s", "n", "transposed"), targets, strict=True)])
    assert targets[0] == scalar
    assert torch.equal(targets[2], matrix.t())


def test_parameters_are_filled_in_place(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, 1)
    parameter = torch.nn.Parameter(torch.zeros(8, 12))
    before = parameter.data_ptr()
    load_tensors(path, [TensorSlice.whole("embedding.weight", parameter)])
    assert parameter.data_ptr() == before
    assert parameter.requires_grad
    assert torch.equal(parameter.detach(), weights()["embedding.weight"])


def test_only_the_needed_part_is_read_and_each_file_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_checkpoint(tmp_path, 1)
    read, hashed = [], []
    plain_read = TensorFile.read

    def counting_read(self: TensorFile, *arguments: object) -> torch.Tensor:
        part = plain_read(self, *arguments)  # type: ignore[arg-type]
        read.append(part.numel())
        return part

    plain_hash = manifest_module.sha256_of
    monkeypatch.setattr(TensorFile, "read", counting_read)
    monkeypatch.setattr(manifest_module, "sha256_of", lambda file: (hashed.append(file.name), plain_hash(file))[1])
    whole = weights()["embedding.weight"]
    two = [empty("embedding.weight", whole, Box((1, 2), (2, 3))), empty("embedding.weight", whole, Box((0, 5), (4, 1)))]
    load_tensors(path, two)
    assert sum(read) == 2 * 3 + 4
    assert hashed == ["rank_00000.safetensors"], "the other file holds nothing that was wanted"
    hashed.clear()
    load_tensors(path, [TensorSlice.whole(name, torch.zeros_like(tensor)) for name, tensor in weights().items()])
    assert hashed == ["rank_00000.safetensors", "rank_00001.safetensors"]


def test_files_are_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    """Our writer against the format's own library, which checks header, holes and sizes."""
    tensors = {**weights(), "half": torch.randn(3, 5).bfloat16(), "flags": torch.tensor([True, False, True])}
    record = write_tensor_file(tmp_path / "x.safetensors", tensors)
    assert record.bytes == (tmp_path / "x.safetensors").stat().st_size
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    # The same content in another order gives the same bytes, so that two equal runs write equal checkpoints.
    assert write_tensor_file(tmp_path / "y.safetensors", dict(reversed(tensors.items()))) == record
    # Elements of 8 bytes start at multiples of 8 and so on, for readers that map the file.
    content = (tmp_path / "x.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    for key, entry in json.loads(content[8 : 8 + length]).items():
        assert (8 + length + entry["data_offsets"][0]) % tensors[key].element_size() == 0


def test_a_rank_file_of_a_single_process_is_a_plain_state_dict(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [[TensorSlice.whole(name, tensor) for name, tensor in weights().items()]])
    loaded = load_file(path / "rank_00000.safetensors")
    assert loaded.keys() == weights().keys()


def test_equal_saves_are_equal_bytes(tmp_path: Path) -> None:
    first, second = small_checkpoint(tmp_path / "a", 3), small_checkpoint(tmp_path / "b", 3)
    assert sorted(file.name for file in first.iterdir()) == sorted(file.name for file in second.iterdir())
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name


def test_a_wrong_offset_would_be_seen(tmp_path: Path) -> None:
    """The tests above can fail: the same data saved under swapped offsets loads as something else."""
    whole = torch.arange(96.0).reshape(8, 12)
    first, second = (cut("weight", whole, box) for box in even_boxes((8, 12), 0, 2))
    swapped = [
        TensorSlice("weight", (8, 12), second.offset, first.data),
        TensorSlice("weight", (8, 12), first.offset, second.data),
    ]
    path = save(tmp_path, 1, [[swapped[0]], [swapped[1]]])
    wanted = TensorSlice.whole("weight", torch.zeros(8, 12))
    load_tensors(path, [wanted])
    assert not torch.equal(wanted.data, whole)


def test_state_and_config_come_back_unchanged(tmp_path: Path) -> None:
    state = {
        "step": 7, "scale": 2.0**32, "third": 1 / 3, "big": 2**127 + 1, "none": None, "flag": True, "text": "é\n\u2028",
        "best": float("inf"), "nested": {"list": [1, 2.5, [], {}]},
    }  # fmt: skip
    manifest = read_manifest(small_checkpoint(tmp_path, 7, state=state, config={"data": {"data_path": ("a", "b")}}))
    assert manifest.state == state
    assert list(manifest.state) == list(state)
    assert [type(value) for value in manifest.state.values()] == [type(value) for value in state.values()]
    assert manifest.config == {"data": {"data_path": ["a", "b"]}}
    assert manifest.step == 7
    assert manifest.world_size == 2


def _save_by_rows_load_by_columns(context: ParallelContext, directory: str) -> list[torch.Tensor]:
    whole, rank, world_size = torch.arange(96.0).reshape(8, 12), context.rank, dist.get_world_size()
    rows, columns = even_boxes((8, 12), 0, world_size)[rank], even_boxes((8, 12), 1, world_size)[rank]
    path = save_checkpoint(directory, 2, [cut("w", whole, rows)], {}, {}, rank, world_size, dist.barrier)
    assert find_latest(directory) == path
    wanted = empty("w", whole, columns)
    load_tensors(path, [wanted])
    return [wanted.data, cut("w", whole, columns).data]


def test_real_processes_save_by_rows_and_load_by_columns(tmp_path: Path, ranks: RankPool) -> None:
    for loaded, expected in ranks(ParallelLayout(tp=2), _save_by_rows_load_by_columns, str(tmp_path)):
        assert torch.equal(loaded, expected)
