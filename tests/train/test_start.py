"""Which checkpoint a run starts from when the newest is damaged, and that all ranks agree on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.checkpoint.manifest import list_checkpoints
from megascale.config.layout import ParallelLayout
from megascale.config.schema import CheckpointConfig, RunConfig
from megascale.parallel.context import ParallelContext
from megascale.train.agreed_start import agree_on_start
from megascale.train.prepare import PreparedRun
from megascale.train.start import Start, find_start, offer_older
from megascale.utils.errors import UserError
from tests.checkpoint.saving import small_checkpoint

INTACT = "newest-intact"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints: of steps 10, 20 and 30."""
    for step in (10, 20, 30):
        small_checkpoint(tmp_path / "run" / "checkpoints", step)
    return tmp_path / "run"


def path_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def flip(path: Path) -> None:
    """Change one bit of a tensor: only the hash can tell."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def config(load: Path, policy: str = "newest", save: Path | None = None) -> RunConfig:
    checkpoint = CheckpointConfig(load=str(load), load_policy=policy, save=str(save) if save else None)
    return RunConfig(checkpoint=checkpoint)


def test_the_newest_is_taken(run: Path) -> None:
    assert find_start(config(run)) == find_start(config(run, INTACT, save=run)) == Start(path_of(run, 30))


@pytest.mark.parametrize("damage", ["rank_00000.safetensors", "rank_00001.json", "manifest.json"])
def test_a_damaged_newest_is_refused_by_name_and_the_one_before_offered(run: Path, damage: str) -> None:
    (path_of(run, 30) / damage).unlink()
    with pytest.raises(UserError) as caught:
        find_start(config(run))
    for told in (damage, "step 30", str(path_of(run, 20)), "--load-policy newest-intact"):
        assert told in str(caught.value)
    start = find_start(config(run, INTACT))
    assert start.path == path_of(run, 20)
    assert len(start.passed_over) == 1
    assert damage in start.passed_over[0]


def test_half_a_manifest_is_refused_by_name(run: Path) -> None:
    manifest = path_of(run, 30) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[: manifest.stat().st_size // 2])
    with pytest.raises(UserError, match=r"step 30.*manifest\.json is not valid JSON.*step_00000020"):
        find_start(config(run))


def test_one_checkpoint_by_name_is_taken_or_refused_never_replaced(run: Path) -> None:
    assert find_start(config(path_of(run, 20), INTACT)).path == path_of(run, 20)
    (path_of(run, 20) / "rank_00000.json").unlink()
    with pytest.raises(UserError, match=r"rank_00000\.json is missing"):
        find_start(config(path_of(run, 20), INTACT))


def test_nothing_intact_is_an_error_that_names_all(run: Path) -> None:
    damaged = {path_of(run, step): f"damage of {step}" for step in (10, 20, 30)}
    with pytest.raises(UserError, match=r"damage of 30; .*damage of 20; .*damage of 10"):
        find_start(config(run, INTACT), damaged)


def test_going_back_within_the_run_directory_is_allowed_past_damaged_ones_only(run: Path) -> None:
    start = find_start(config(run, INTACT, save=run), {path_of(run, 30): "damaged"})
    assert start.path == path_of(run, 20)
    with pytest.raises(UserError, match=r"is older than checkpoint .*step_00000030"):
        find_start(config(path_of(run, 20), save=run))


def test_the_offer_is_only_of_older_ones(run: Path) -> None:
    assert str(path_of(run, 10)) in offer_older(path_of(run, 20))
    assert "There is no older one" in offer_older(path_of(run, 10))


def _agree(context: ParallelContext, load: Path, policy: str, blind_rank: int | None = None) -> object:
    """What a rank starts from; the blind rank's host does not see the newest checkpoint yet."""
    settings = config(load, policy)
    own = find_start(settings)
    if context.rank == blind_rank:
        own = Start(list_checkpoints(load)[1].path)

    def prepared(start: Start) -> PreparedRun:
        return PreparedRun(settings, context.layout, None, start.path, start.passed_over, [])  # type: ignore[arg-type]

    try:
        agreed = agree_on_start(
            prepared(own), context.world, lambda damaged: find_start(settings, damaged), prepare_again=prepared
        )
    except UserError as error:
        return str(error)
    return agreed.start, agreed.passed_over


@pytest.mark.parametrize("blind_rank", [0, 1])
def test_all_ranks_take_what_rank_0_found(ranks, run, blind_rank) -> None:
    """A host that sees a directory late: either way the ranks do not start from different steps."""
    first, second = ranks(ParallelLayout(dp=2), _agree, run, "newest", blind_rank)
    assert first == second == (path_of(run, 20 if blind_rank == 0 else 30), ())


@pytest.mark.parametrize("file", ["rank_00000.safetensors", "rank_00001.safetensors"])
def test_a_flipped_byte_that_one_rank_finds_sends_all_ranks_back(ranks, run, file) -> None:
    flip(path_of(run, 30) / file)
    (path_of(run, 20) / "rank_00001.json").unlink()
    answers = ranks(ParallelLayout(dp=2), _agree, run, INTACT)
    assert answers[0] == answers[1]
    start, passed_over = answers[0]
    assert start == path_of(run, 10)
    assert len(passed_over) == 2
    assert f"the content of {file} is not what was saved" in passed_over[0]
    assert "rank_00001.json is missing" in passed_over[1]


def test_without_the_proof_the_flipped_byte_is_not_seen_here(ranks, run) -> None:
    """The policy newest hashes on loading only: what the test above finds, the proof found."""
    flip(path_of(run, 30) / "rank_00001.safetensors")
    assert ranks(ParallelLayout(), _agree, run, "newest") == [(path_of(run, 30), ())]


def test_when_nothing_is_intact_every_rank_says_so(ranks, run) -> None:
    for step in (10, 20, 30):
        flip(path_of(run, step) / "rank_00000.safetensors")
    first, second = ranks(ParallelLayout(dp=2), _agree, run, INTACT)
    assert first == second
    assert "no checkpoint in" in first
    assert first.count("is not what was saved") == 3


def test_each_file_is_hashed_by_one_rank(ranks, run) -> None:
    first, second = ranks(ParallelLayout(dp=2), _counting, run)
    assert len(first) == len(second) == 2, "both have a share"
    assert len({*first, *second}) == 4


def _counting(context: ParallelContext, load: Path) -> list[str]:
    from megascale.checkpoint import manifest as manifest_module

    hashed: list[str] = []
    patch = pytest.MonkeyPatch()
    plain = manifest_module.sha256_of

    def counting(path: Path) -> str:
        hashed.append(path.name)
        return plain(path)

    patch.setattr(manifest_module, "sha256_of", counting)
    try:
        _agree(context, load, INTACT)
    finally:
        patch.undo()
    return hashed
