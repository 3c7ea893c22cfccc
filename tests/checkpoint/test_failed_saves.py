"""A save that fails on any rank, in any phase, fails on every rank without a hang and leaves what was there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.checkpoint import save as save_module
from megascale.checkpoint.boxes import Box
from megascale.checkpoint.load import find_latest, list_checkpoints, load_tensors, read_manifest, verify
from megascale.checkpoint.save import SaveError, save_checkpoint
from megascale.checkpoint.tensors import TensorSlice
from tests.checkpoint.saving import cut, even_boxes, run_ranks, save, save_results, small_checkpoint, weights


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for a publication that will not come need not wait long here."""
    monkeypatch.setattr(save_module, "VISIBLE_WITHIN_SECONDS", 0.2)


def columns(value: float = 0.0) -> list[list[TensorSlice]]:
    """Three ranks: two halves of a matrix, and a data-parallel replica that has nothing to write."""
    whole = torch.arange(12.0).reshape(3, 4) + value
    return [[cut("weight", whole, box)] for box in even_boxes((3, 4), 1, 2)] + [[]]


def all_failed(results: list[Any], message: str = "") -> None:
    assert all(isinstance(result, SaveError) for result in results), results
    assert any(message in str(result) for result in results), [str(result) for result in results]


def fail_once(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, when: Callable[..., bool]) -> None:
    """Let `target.name` raise 'no space left' on the first call for which `when` holds."""
    plain = getattr(target, name)
    failed = []

    def failing(*arguments: Any, **keywords: Any) -> Any:
        if not failed and when(*arguments, **keywords):
            failed.append(True)
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(*arguments, **keywords)

    monkeypatch.setattr(target, name, failing)


STAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "prepare: rank 0 cannot clear": lambda patch: fail_once(patch, save_module, "_clear_leftovers", lambda root: True),
    "write: rank 0's tensors": lambda patch: fail_once(
        patch, save_module, "write_tensor_file", lambda path, tensors: path.name == "rank_00000.safetensors"
    ),
    "write: rank 1's tensors": lambda patch: fail_once(
        patch, save_module, "write_tensor_file", lambda path, tensors: path.name == "rank_00001.safetensors"
    ),
    "write: rank 2's record": lambda patch: fail_once(
        patch, save_module, "atomic_writer", lambda path, mode: path.name == "rank_00002.json"
    ),
    "publish: the manifest": lambda patch: fail_once(
        patch, save_module, "atomic_writer", lambda path, mode: path.name == "manifest.json"
    ),
    "publish: setting the former one aside": lambda patch: fail_once(
        patch, os, "rename", lambda source, target: target.name.endswith(".replaced")
    ),
    "publish: taking the name": lambda patch: fail_once(
        patch, os, "rename", lambda source, target: source.name.endswith(".partial")
    ),
}


@pytest.mark.parametrize(
    ("stage", "step"),
    [(stage, step) for stage in STAGES for step in (4, 5) if step == 4 or "aside" not in stage],
)
def test_a_failure_anywhere_fails_everywhere_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, step: int
) -> None:
    """Step 4 is saved a second time, step 5 is new."""
    older = save(tmp_path, 4, columns(), state={"value": 1})
    with monkeypatch.context() as patch:
        STAGES[stage](patch)
        all_failed(save_results(tmp_path, step, columns(), state={"value": 2}), "No space left on device")
    # The very same tensors were written, so only the state tells the two apart, and rank 2's record not at all.
    assert find_latest(tmp_path) == older
    assert verify(older).state == {"value": 1}
    # The next save is not in the way of what the failed one left behind, and removes it.
    newer = save(tmp_path, step, columns(), state={"value": 3})
    assert find_latest(tmp_path) == newer
    assert verify(newer).state == {"value": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"step_00000004", newer.name})


def test_slices_that_leave_a_gap_or_overlap_are_not_published(tmp_path: Path) -> None:
    older = save(tmp_path, 1, columns())
    first, second, nothing = columns()
    for by_rank, message in (
        ([first, nothing, nothing], "gap"),
        ([first, second, second], "overlap"),
        ([first, [second[0], TensorSlice("weight", (3, 5), (0, 4), torch.zeros(3, 1))], nothing], "disagree"),
        ([first, [TensorSlice("weight", (3, 4), (0, 2), torch.zeros(3, 2).double())], nothing], "disagree"),
        ([first, [TensorSlice.whole("weight#1", torch.zeros(1)), *second, *second], nothing], "would both be stored"),
    ):
        all_failed(save_results(tmp_path, 2, by_rank), message)
        assert [entry.path for entry in list_checkpoints(tmp_path)] == [older]


def test_replicas_that_all_write_are_refused(tmp_path: Path) -> None:
    """Two data-parallel ranks that both bring a replicated tensor: a wrong layout, not something to choose from."""
    bias = TensorSlice.whole("bias", torch.zeros(4))
    all_failed(
        save_results(tmp_path, 1, [[bias], [bias]]), "tensor bias of shape [4]: the parts [0:4] and [0:4] overlap"
    )


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {1: 2}}, "state['a'] has the key 1"),
        ({"a": [torch.zeros(2)]}, "state['a'][0] is of type Tensor"),
        ({"path": Path("x")}, "state['path'] is of type"),
    ],
)
def test_state_that_json_would_change_is_refused_before_writing(tmp_path: Path, state: Any, message: str) -> None:
    all_failed(save_results(tmp_path, 1, [columns()[0]], state=state), message)


def test_an_element_type_without_a_name_is_refused(tmp_path: Path) -> None:
    complex_tensor = TensorSlice.whole("z", torch.zeros(2, dtype=torch.complex64))
    all_failed(save_results(tmp_path, 1, [[complex_tensor]]), "type torch.complex64, a checkpoint can hold float64")


def test_directories_that_are_not_shared_are_named_as_the_reason(tmp_path: Path) -> None:
    """Rank 1 of 2 writes to a disk of its own: rank 0 sees nothing of it."""

    def act(rank: int, barrier: Callable[[], None]) -> Path:
        own = tmp_path / f"host_{rank}"
        return save_checkpoint(own, 1, columns()[rank], {}, {}, rank, 2, barrier)

    all_failed(run_ranks(2, act), "ranks [1] of 2 wrote nothing into")
    assert "not on a file system that all hosts share" in str(run_ranks(2, act)[0])


@pytest.mark.parametrize(("step", "rank", "world_size"), [(-1, 0, 1), (0, 1, 1), (0, -1, 1)])
def test_impossible_numbers_are_refused_at_once(tmp_path: Path, step: int, rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"step {step} .* rank {rank}"):
        save_checkpoint(tmp_path, step, [], {}, {}, rank, world_size, lambda: None)


def test_a_smaller_world_leaves_no_files_of_a_larger_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed save of three ranks, then the same step saved by one: rank_00002.json must not come back."""
    with monkeypatch.context() as patch:
        STAGES["publish: the manifest"](patch)
        all_failed(save_results(tmp_path, 1, columns()))
    assert (tmp_path / ".step_00000001.partial" / "rank_00002.json").exists()
    path = save(tmp_path, 1, [[TensorSlice.whole("weight", torch.ones(3, 4))]])
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "rank_00000.json",
        "rank_00000.safetensors",
    ]


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_reached_again(tmp_path: Path) -> None:
    """After a fallback to step 3 the run comes to step 4 again, where the damaged one still stands."""
    small_checkpoint(tmp_path, 3)
    (small_checkpoint(tmp_path, 4) / "rank_00000.json").unlink()
    assert find_latest(tmp_path) == tmp_path / "step_00000003"
    saved_again = small_checkpoint(tmp_path, 4)
    verify(saved_again)
    assert find_latest(tmp_path) == saved_again


def test_a_checkpoint_set_aside_when_the_process_died_is_found_and_gets_its_name_back(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, 4)
    aside = tmp_path / ".step_00000004.replaced"
    shutil.move(path, aside)
    assert find_latest(tmp_path) == aside
    target = TensorSlice.whole("embedding.weight", torch.zeros(8, 12))
    load_tensors(aside, [target])
    assert torch.equal(target.data, weights()["embedding.weight"])
    small_checkpoint(tmp_path, 5)
    assert [entry.path for entry in list_checkpoints(tmp_path)] == [tmp_path / "step_00000005", path]


def test_everything_is_on_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL cannot lose what was written, a power cut can: the order of fsync and rename, as the system sees it."""
    events: list[tuple[str, str]] = []
    plain_fsync, plain_rename, plain_replace = os.fsync, os.rename, os.replace

    def fsync(descriptor: int) -> None:
        plain_fsync(descriptor)
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def renaming(plain: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def rename(source: Any, target: Any) -> None:
            plain(source, target)
            events.append(("from", str(source)))
            events.append(("to", str(target)))

        return rename

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renaming(plain_rename))
    monkeypatch.setattr(os, "replace", renaming(plain_replace))
    path = save(tmp_path, 1, [columns()[0] + columns()[1]])
    partial = tmp_path / ".step_00000001.partial"
    published = events.index(("to", str(path)))
    for file in path.iterdir():
        named = events.index(("to", str(partial / file.name)))
        (temporary,) = [name for kind, name in events[named - 1 : named] if kind == "from"]
        assert ("fsync", temporary) in events[: named - 1], f"{file.name}: content before its name"
        assert ("fsync", str(partial)) in events[named:published], f"{file.name}: its name before the directory's"
    assert ("fsync", str(tmp_path)) in events[published:], "the directory's name before the return"


def test_several_slices_of_a_tensor_on_one_rank(tmp_path: Path) -> None:
    """As a flat optimizer shard gives them: the end of one row, whole rows, the start of another."""
    whole = torch.arange(20.0).reshape(4, 5)
    first = [cut("w", whole, Box((0, 0), (1, 5))), cut("w", whole, Box((1, 0), (1, 3)))]
    second = [cut("w", whole, Box((1, 3), (1, 2))), cut("w", whole, Box((2, 0), (2, 5)))]
    path = save(tmp_path, 1, [first, second])
    assert [part.key for part in read_manifest(path).tensors["w"].slices] == ["w", "w#1", "w", "w#1"]
    target = TensorSlice.whole("w", torch.zeros(4, 5))
    load_tensors(path, [target])
    assert torch.equal(target.data, whole)
