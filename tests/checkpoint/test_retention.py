"""What is kept and what goes: by pure rules, on disk, beside a reader, and with kills at every point."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from megascale.checkpoint import load as load_module
from megascale.checkpoint.holding import held, take_away
from megascale.checkpoint.load import find_latest, list_checkpoints, load_tensors
from megascale.checkpoint.retention import Retention, remove_surplus, surplus, validation_loss
from megascale.checkpoint.tensors import TensorSlice
from megascale.utils.errors import UserError
from tests.checkpoint.saving import small_checkpoint, weights
from tests.checkpoint.test_killed_saves import killing


def save_validated(directory: Path, step: int, loss: float | None = None) -> Path:
    """A checkpoint whose state tells a validation loss of its own step, as a run's does."""
    train = {"step": step, "validated": step if loss is not None else 0, "validation_loss": loss}
    return small_checkpoint(directory, step, state={"train": train})


def steps(directory: Path) -> list[int]:
    return [entry.step for entry in list_checkpoints(directory)]


def test_rules_keep_what_they_say() -> None:
    losses = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: math.nan, 60: 1.0}
    assert surplus(Retention(), losses) == []
    assert surplus(Retention(keep_best=True), losses) == [], "without --keep-last nothing goes"
    assert surplus(Retention(keep_last=1), losses) == [10, 20, 30, 40, 50]
    assert surplus(Retention(keep_last=9), losses) == []
    assert surplus(Retention(keep_last=2, keep_every=20), losses) == [10, 30]
    assert surplus(Retention(keep_last=1, keep_best=True), losses) == [10, 30, 40, 50], "of equal ones the oldest stays"
    assert surplus(Retention(keep_last=1, keep_best=True), {1: math.nan, 2: math.nan, 3: None}) == [1, 2]


def test_the_newest_is_kept_by_every_policy() -> None:
    for last, every, best in itertools.product((None, 1, 2, 7), (None, 3, 1000), (False, True)):
        for count in range(1, 8):
            losses = {step: float(-step) for step in range(5, 5 + count)}
            kept = set(losses) - set(surplus(Retention(last, every, best), losses))
            assert max(losses) in kept
            assert last is None or len(kept) >= min(last, count)


def test_a_policy_that_keeps_nothing_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        Retention(keep_last=0)


def test_what_is_not_kept_goes_and_leaves_nothing(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, None)):
        save_validated(tmp_path, step, loss)
    assert remove_surplus(tmp_path, Retention(keep_last=1, keep_every=3, keep_best=True), 5) == [1, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:08d}" for step in (2, 3, 5)]
    assert all(entry.problem is None for entry in list_checkpoints(tmp_path))


def test_a_loss_measured_at_another_step_is_not_the_checkpoints() -> None:
    assert validation_loss({"train": {"step": 7, "validated": 6, "validation_loss": 0.5}}) is None
    assert validation_loss({"train": {"step": 7, "validated": 7, "validation_loss": 0.5}}) == 0.5
    assert validation_loss({}) is None


def test_damaged_ones_do_not_count_as_kept_and_stay(tmp_path: Path) -> None:
    """keep 2 of 1..5 where 3 and 4 are damaged: 5 and 2 are the two, not 5 and 4."""
    for step in range(1, 6):
        save_validated(tmp_path, step)
    for step in (3, 4):
        (tmp_path / f"step_{step:08d}" / "rank_00001.safetensors").unlink()
    assert remove_surplus(tmp_path, Retention(keep_last=2), 5) == [1]
    assert steps(tmp_path) == [5, 4, 3, 2]


def test_nothing_goes_when_the_one_just_saved_is_not_complete(tmp_path: Path) -> None:
    for step in range(1, 4):
        save_validated(tmp_path, step)
    (tmp_path / "step_00000003" / "manifest.json").unlink()
    assert remove_surplus(tmp_path, Retention(keep_last=1), 3) == []
    assert steps(tmp_path) == [3, 2, 1]


def test_later_ones_left_by_a_fallback_push_nothing_out(tmp_path: Path) -> None:
    """After going back from a silently damaged step 9, the run saves 3: its name is no proof that 9 is good."""
    for step in (1, 2, 3, 9):
        save_validated(tmp_path, step)
    assert remove_surplus(tmp_path, Retention(keep_last=2), 3) == [1]
    assert steps(tmp_path) == [9, 3, 2]


def test_a_checkpoint_that_is_being_loaded_stays_until_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal runs in the middle of the load, between the checks of the files and the reading of the tensors."""
    save_validated(tmp_path, 1)
    save_validated(tmp_path, 2)
    removed: list[list[int]] = []
    plain = load_module.open_tensor_file

    def removing(path: Path):  # type: ignore[no-untyped-def]
        removed.append(remove_surplus(tmp_path, Retention(keep_last=1), 2))
        return plain(path)

    def load() -> torch.Tensor:
        target = TensorSlice.whole("embedding.weight", torch.zeros(8, 12))
        load_tensors(tmp_path / "step_00000001", [target])
        return target.data

    monkeypatch.setattr(load_module, "open_tensor_file", removing)
    assert torch.equal(load(), weights()["embedding.weight"])
    assert removed == [[], []], "one attempt for each file"
    # Planted bug: a reader that holds nothing.
    monkeypatch.setattr(load_module, "held", lambda path: nullcontext())
    with pytest.raises(UserError, match="cannot be read"):
        load()
    assert steps(tmp_path) == [2]


def test_a_reader_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    save_validated(tmp_path, 1)
    save_validated(tmp_path, 2)
    code = (
        "import sys, time; from pathlib import Path; from megascale.checkpoint.holding import held\n"
        f"with held(Path({str(tmp_path / 'step_00000001')!r})): print('held', flush=True); time.sleep(60)"
    )
    reader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert reader.stdout is not None
    reader.stdout.readline()
    assert remove_surplus(tmp_path, Retention(keep_last=1), 2) == []
    reader.kill()
    reader.wait()
    reader.stdout.close()
    assert remove_surplus(tmp_path, Retention(keep_last=1), 2) == [1]


def test_a_checkpoint_removed_before_it_could_be_held_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_validated(tmp_path, 1)
    plain = Path.open

    def opening(self: Path, *arguments: str):  # type: ignore[no-untyped-def]
        file = plain(self, *arguments)
        monkeypatch.setattr(Path, "open", plain)
        assert take_away(path, tmp_path / ".step_00000001.removed")
        return file

    monkeypatch.setattr(Path, "open", opening)
    with pytest.raises(UserError, match=r"step_00000001 was removed just now.*--keep-last"), held(path):
        pass


def test_what_a_killed_removal_left_goes_with_the_next_save(tmp_path: Path) -> None:
    path = save_validated(tmp_path, 1)
    path.rename(tmp_path / ".step_00000001.removed")
    assert find_latest(tmp_path) is None, "it is no checkpoint any more"
    save_validated(tmp_path, 2)
    assert [found.name for found in tmp_path.iterdir()] == ["step_00000002"]


def test_kills_at_every_point_of_a_save_with_removal(repository: Path, tmp_path: Path) -> None:
    """Steps 1 and 2 are there; 3 is saved and only the newest kept: at every moment the newest is whole."""
    sights = killing(repository, "points", str(tmp_path / "right"), "retain", "--only")
    assert not [sight for sight in sights if "error" in sight or sight["damaged"]]
    values = [sight["value"] for sight in sights]
    turn = values.index(3)
    assert values == [2] * turn + [3] * (len(values) - turn)
    assert any("step_00000001" not in sight["names"] for sight in sights[:-1]), "some kills hit the removal"
    assert sights[-1]["names"] == ["step_00000003"]


def test_kills_would_find_a_removal_in_place(repository: Path, tmp_path: Path) -> None:
    sights = killing(repository, "points", str(tmp_path / "wrong"), "retain", "--only", "--remove-in-place")
    assert [sight for sight in sights if sight["damaged"]]
