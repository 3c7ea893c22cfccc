"""Drift, slow ranks and digests: each finds what is planted on one rank, and is silent when nothing is."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megascale.config.layout import ParallelLayout
from megascale.parallel.context import ParallelContext
from megascale.train.compare import compare_runs
from megascale.train.failures import RunStopped
from megascale.train.fingerprint import fingerprints
from megascale.train.metrics import INCIDENTS_FILE
from megascale.train.observe import observing
from megascale.train.observers import Observer, Observers
from megascale.train.stragglers import RANK_TIMES_FILE, describe_ranks, slow_ranks
from megascale.utils.errors import UserError
from tests.train.training import build_trainer, small_config

STEPS = 6


class ChangesAWeight(Observer):
    """Adds a little to one element of a parameter of one rank after a step, as a flipped bit would."""

    def __init__(self, model: torch.nn.Module, name: str, at_step: int) -> None:
        self._parameter, self._at_step = dict(model.named_parameters())[name], at_step

    def after_step(self, state, batch, step) -> None:
        if state.step == self._at_step:
            with torch.no_grad():
                self._parameter.view(-1)[-1] += 1e-9


class IsSlow(Observer):
    def after_step(self, state, batch, step) -> None:
        time.sleep(0.05)


def _config(logging=None, **faults):
    faults = {"hang_timeout_minutes": 0.0, **faults}
    train = {"train_iters": STEPS, "eval_interval": 3, "micro_batch_size": 2}
    return small_config(train=train, checkpoint={"save": "run"}, faults=faults, logging=logging or {})


def _train(
    context: ParallelContext, run: Path, config, planted: tuple[int, str, int] | None = None, slow: int | None = None
) -> str:
    trainer = build_trainer(context, config, run)
    first: list[Observer] = []
    if planted and planted[0] == context.rank:
        first.append(ChangesAWeight(trainer.model, *planted[1:]))
    if slow == context.rank:
        first.append(IsSlow())
    watched = observing(config, run, context, trainer.model, trainer.optimizer, trainer.metrics, trainer.state.step)
    with trainer.metrics, watched as observers:
        trainer.observers = Observers([*first, *observers])
        try:
            trainer.fit()
        except RunStopped as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("rank", "parameter"),
    [(3, "blocks.0.attention.qkv.weight"), (1, "blocks.1.mlp_norm.weight"), (2, "word_embedding.weight")],
)
def test_a_drifted_replica_is_named(ranks, tmp_path, rank, parameter) -> None:
    """A split parameter is compared over dp, a replicated one over tp and dp."""
    config = _config(check_weight_hash_interval=2)
    told = ranks(ParallelLayout(tp=2, dp=2), _train, tmp_path, config, (rank, parameter, 3))
    assert all(parameter in text and "after step 4" in text for text in told)
    (incident,) = [json.loads(line) for line in (tmp_path / INCIDENTS_FILE).read_text().splitlines()]
    assert incident["kind"] == "drift"
    named = {r for found in incident["differing"] for r in [*found["ranks"], found["as_on_rank"]]}
    assert rank in named
    assert not (tmp_path / "checkpoints").exists(), "drifted weights must not reach a checkpoint"


def test_no_drift_is_seen_where_there_is_none(ranks, tmp_path) -> None:
    assert set(ranks(ParallelLayout(tp=2, dp=2), _train, tmp_path, _config(check_weight_hash_interval=1))) == {""}


def test_a_slow_rank_is_named_though_all_steps_take_equally_long(ranks, tmp_path) -> None:
    config = _config({"log_rank_times_interval": 3})
    ranks(ParallelLayout(tp=2, dp=2), _train, tmp_path, config, None, 2)
    reports = [json.loads(line) for line in (tmp_path / RANK_TIMES_FILE).read_text().splitlines()]
    assert [r["step"] for r in reports] == [3, 6]
    last = reports[-1]
    assert last["slow"][0] == 2
    by_rank = {r["rank"]: r for r in last["ranks"]}
    assert by_rank[2]["p50"] > 0.05
    assert by_rank[2]["p95"] >= by_rank[2]["p50"]
    # Whole steps do not tell: the others wait for rank 2.
    assert all(r["step_p50"] > 0.045 for r in last["ranks"])
    assert all(r["p50"] < by_rank[2]["p50"] / 1.2 for r in last["ranks"] if r["rank"] != 2)


def test_what_slow_means() -> None:
    times = [{"rank": r, "host": "h", "p50": p, "p95": p, "step_p50": 2.0} for r, p in enumerate([1.0, 1.1, 1.3, 1.0])]
    median, slow = slow_ranks(times)
    assert median == 1.0
    assert [r["rank"] for r in slow] == [2]
    assert "slow: rank 2 on h" in describe_ranks(7, median, slow, times)
    assert slow_ranks(times[:2])[1] == []


@pytest.fixture(scope="module")
def digested(ranks, tmp_path_factory) -> Path:
    """Runs with digests: twice the same, one with a changed weight, one at another layout, one with other data."""
    folder = tmp_path_factory.mktemp("runs")
    config, layout = _config({"log_digests": True}), ParallelLayout(tp=2, dp=2)
    for name in ("a", "same"):
        assert set(ranks(layout, _train, folder / name, config)) == {""}
    ranks(layout, _train, folder / "changed", config, (3, "blocks.1.mlp.down.weight", 4))
    ranks(ParallelLayout(dp=2), _train, folder / "other-layout", config)
    sharing = replace(config, parallel=replace(config.parallel, use_distributed_optimizer=True))
    ranks(layout, _train, folder / "sharing", sharing)
    seeded = small_config(
        train={"train_iters": STEPS, "micro_batch_size": 2, "seed": 4321},
        checkpoint={"save": "run"},
        faults={"hang_timeout_minutes": 0.0},
        logging={"log_digests": True},
    )
    ranks(layout, _train, folder / "other-seed", seeded)
    return folder


def test_equal_runs_compare_equal(digested) -> None:
    same, text = compare_runs(digested / "a", digested / "same")
    assert same, text
    assert "steps 1 to 6, bit for bit, on all 4 ranks" in text


def test_the_first_step_rank_and_tensor_that_differ_are_named(digested) -> None:
    same, text = compare_runs(digested / "a", digested / "changed")
    assert not same
    # The change came after the update of step 4 and before its digest.
    assert "the runs part at step 4: weight of blocks.1.mlp.down.weight on rank 3" in text


def test_a_shared_optimizer_is_another_layout(digested) -> None:
    """Its ranks sum their own share of the gradients only, so bits are not to be compared."""
    same, text = compare_runs(digested / "a", digested / "sharing")
    assert same, text
    assert "tp=2 dp=2 pp=1 distributed_optimizer" in text


def test_layouts_are_compared_within_a_tolerance(digested) -> None:
    same, text = compare_runs(digested / "a", digested / "other-layout")
    assert same, text
    assert "tp=2 dp=2 pp=1 and tp=1 dp=2 pp=1" in text
    assert not compare_runs(digested / "a", digested / "other-layout", tolerance=0.0)[0]
    same, text = compare_runs(digested / "changed", digested / "other-layout", tolerance=1e-13)
    assert not same
    assert "step 5: the loss is" in text or "step 5: the gradient norm is" in text or "step 6" in text


def test_another_seed_parts_at_the_first_step(digested) -> None:
    same, text = compare_runs(digested / "a", digested / "other-seed")
    assert not same
    assert "step 1: the loss on rank 0" in text


def test_other_samples_are_told_before_the_loss(digested, tmp_path) -> None:
    damaged = tmp_path / "other-samples"
    (damaged / "digests").mkdir(parents=True)
    for path in (digested / "a" / "digests").iterdir():
        lines = path.read_text().splitlines()
        digest = json.loads(lines[3])
        digest["tokens"] = "0" * 16
        lines[3] = json.dumps(digest)
        (damaged / "digests" / path.name).write_text("\n".join(lines) + "\n")
    assert "step 3: rank 0 reads other tokens in samples 16 to 23" in compare_runs(digested / "a", damaged)[1]


def test_runs_without_digests_cannot_be_compared(tmp_path) -> None:
    with pytest.raises(UserError, match="--log-digests"):
        compare_runs(tmp_path, tmp_path)


def test_a_fingerprint_sees_any_single_change_and_any_swap() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
        (before,) = fingerprints([x]).tolist()
        assert fingerprints([x.clone()]).tolist() == [before]
        for position in (0, 499, 999):
            changed = x.clone()
            changed[position] = torch.nextafter(changed[position].float(), torch.tensor(9e9)).to(dtype) + 1
            assert fingerprints([changed]).tolist() != [before]
        assert fingerprints([x.flip(0)]).tolist() != [before]
    assert fingerprints([torch.tensor([0.0])]).tolist() != fingerprints([torch.tensor([-0.0])]).tolist()
