"""Bad steps: what is done about them, and that the record names the rank, the samples, the module and the parameter."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megascale.config.layout import ParallelLayout
from megascale.config.schema import FaultConfig
from megascale.parallel.context import ParallelContext
from megascale.train.failures import RunStopped
from megascale.train.guard import is_spike
from megascale.train.metrics import INCIDENTS_FILE
from tests.train.training import GeneratedSamples, build_trainer, exact_records, losses, small_config

STEPS, BAD_STEP = 8, 5
BATCH, MICRO = 8, 2
# Of step 5's samples 32 to 39, data-parallel rank 1 of 2 reads 36 to 39; the second of its micro-batches is 38 to 39.
BAD_SAMPLE = 39


class Poisoned:
    """Multiplies what a module puts out while it reads one sample: the attention of one rank, or the final norm."""

    def __init__(self, context: ParallelContext, model: torch.nn.Module, factor: float) -> None:
        self._bad_tokens = torch.from_numpy(GeneratedSamples().sample(BAD_SAMPLE)[:-1])
        self._factor, self._applies = factor, False
        # Of pipeline stages only the first reads tokens; any may spoil its own, and the last layer is the last one's.
        is_first = context.pp.rank == 0
        if is_first:
            model.word_embedding.register_forward_pre_hook(self._look)
        if math.isfinite(factor):
            model.final_norm.register_forward_hook(self._spoil)
        elif context.tp.rank == context.tp.size - 1:
            layer = "0" if context.pp.size > 1 else "1"
            block = model.blocks.get_submodule(layer) if is_first else None
            if block is not None:
                block.attention.core.register_forward_hook(self._spoil)

    def _look(self, module, inputs) -> None:
        tokens = inputs[0] if inputs[0].shape[0] == len(self._bad_tokens) else inputs[0].t()
        self._applies = any(torch.equal(row, self._bad_tokens) for row in tokens.t())

    def _spoil(self, module, inputs, output):
        return output * self._factor if self._applies else output


def _config(parallel=None, **faults):
    return small_config(
        parallel=parallel or {},
        train={"train_iters": STEPS, "micro_batch_size": MICRO, "global_batch_size": BATCH, "eval_interval": 1000},
        checkpoint={"save": "run", "save_interval": 2},
        faults=faults,
    )


def _train(context: ParallelContext, run: Path, factor: float, faults: dict) -> tuple[str, int, int, int, int]:
    trainer = build_trainer(context, _config(**faults), run)
    Poisoned(context, trainer.model, factor)
    ended = "done"
    with trainer.metrics:
        try:
            trainer.fit()
        except RunStopped as error:
            ended = str(error)
    state, health = trainer.state, trainer.state.health
    return ended, state.step, state.samples, health.num_skipped, health.num_rewinds


def _incidents(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / INCIDENTS_FILE).read_text().splitlines()]


def _steps(run: Path) -> list[int]:
    return [r["step"] for r in exact_records(run) if r["kind"] == "train"]


@pytest.mark.parametrize("policy", ["stop", "skip", "rewind"])
def test_a_nan_is_traced_to_rank_samples_module_and_parameter(ranks, tmp_path, policy) -> None:
    results = ranks(ParallelLayout(tp=2, dp=2), _train, tmp_path, math.nan, {"on_nonfinite": policy})
    assert len(set(results)) == 1, "all ranks did the same"
    ended, step, samples, num_skipped, num_rewinds = results[0]
    (incident,) = _incidents(tmp_path)
    assert incident["step"] == BAD_STEP
    assert incident["samples"] == [32, 39]
    assert incident["action"] == policy
    assert incident["reproduced"]
    first = incident["findings"][0]
    # Of the replica that read the sample, the rank in whose own heads it began comes first.
    assert (first["rank"], first["micro_batches"], first["samples"]) == (3, [3], [38, 39])
    assert first["first_nonfinite_output"] == "blocks.1.attention.core"
    assert "blocks.1.attention.qkv.weight" in first["nonfinite_gradients"] or first["num_nonfinite_gradients"] > 8
    assert {finding["rank"] for finding in incident["findings"]} == {2, 3}
    if policy == "stop":
        assert "step 5: loss not finite" in ended
        assert "rank 3 on" in ended
        assert step == BAD_STEP - 1
    elif policy == "skip":
        assert (ended, step, samples, num_skipped) == ("done", STEPS, STEPS * BATCH, 1)
        assert _steps(tmp_path) == list(range(1, STEPS + 1))
    else:
        # Back to the checkpoint of step 4, then on with sample 40: one batch is never trained on.
        assert (ended, step, samples, num_rewinds) == ("done", STEPS, (STEPS + 1) * BATCH, 1)
        assert _steps(tmp_path) == list(range(1, STEPS + 1))


def _skip_one(context: ParallelContext, run: Path) -> list[float]:
    """The weights after a run in which the update of the bad step was left out by hand."""
    trainer = build_trainer(context, _config(), run)
    update = trainer.guard.update

    def left_out(state, batch, loss, normaliser):
        if state.step == BAD_STEP - 1:
            return trainer.guard._refuse("by hand", "skip", state, batch, loss)
        return update(state, batch, loss, normaliser)

    trainer.guard.update = left_out
    with trainer.metrics:
        trainer.fit()
    return [float(w.double().sum()) for w in trainer.optimizer.weights]


def _skip_by_policy(context: ParallelContext, run: Path) -> list[float]:
    trainer = build_trainer(context, _config(on_nonfinite="skip"), run)
    Poisoned(context, trainer.model, math.nan)
    with trainer.metrics:
        trainer.fit()
    return [float(w.double().sum()) for w in trainer.optimizer.weights]


def test_a_skipped_step_leaves_no_trace_in_the_weights(ranks, tmp_path) -> None:
    by_hand = ranks(ParallelLayout(tp=2), _skip_one, tmp_path / "hand")
    by_policy = ranks(ParallelLayout(tp=2), _skip_by_policy, tmp_path / "policy")
    assert by_policy == by_hand
    after = slice(BAD_STEP, STEPS)
    assert losses(tmp_path / "policy")[after] == losses(tmp_path / "hand")[after]


@pytest.mark.parametrize(
    ("layout", "parallel", "found_by"),
    [
        (ParallelLayout(dp=2), {"overlap_grad_reduce": True, "use_distributed_optimizer": True}, {1}),
        (ParallelLayout(pp=2), {"pipeline_model_parallel_size": 2}, {0, 1}),
    ],
)
def test_reductions_under_way_and_pipelines_are_put_in_order(ranks, tmp_path, layout, parallel, found_by) -> None:
    """A refused update has started to sum its gradients; and the stages of a pipeline look together."""
    results = ranks(layout, _train, tmp_path, math.nan, {"on_nonfinite": "skip", "parallel": parallel})
    assert len(set(results)) == 1
    ended, step, _, num_skipped, _ = results[0]
    assert (ended, step, num_skipped) == ("done", STEPS, 1)
    (incident,) = _incidents(tmp_path)
    assert {finding["rank"] for finding in incident["findings"]} == found_by
    reference = tmp_path / "plain"
    ranks(ParallelLayout(), _train, reference, math.nan, {"on_nonfinite": "skip"})
    ours, theirs = ([x for x in losses(run) if x is not None] for run in (tmp_path, reference))
    assert len(ours) == STEPS  # one of them is of the validation, and that of the bad step is no number
    assert ours == pytest.approx(theirs, rel=1e-10)


def test_skipping_has_a_limit(ranks, tmp_path) -> None:
    faults = {"on_nonfinite": "skip", "max_skipped_steps": 0}
    ((ended, *_),) = ranks(ParallelLayout(), _train, tmp_path, math.nan, faults)
    assert "--max-skipped-steps is 0" in ended
    assert _incidents(tmp_path)[0]["action"] == "stop"


def test_a_spike_names_the_micro_batch(ranks, tmp_path) -> None:
    faults = {"on_loss_spike": "skip", "loss_spike_window": 6, "loss_spike_threshold": 6.0}
    results = ranks(ParallelLayout(dp=2), _train, tmp_path, 100.0, faults)
    assert results[0][0] == "done"
    incident = _incidents(tmp_path)[0]
    assert (incident["step"], incident["kind"], incident["action"]) == (BAD_STEP, "loss spike", "skip")
    assert incident["findings"][0]["samples"] == [38, 39]
    assert incident["findings"][0]["loss"] > incident["findings"][1]["loss"] + 0.1
    # Without the policy the same spike goes unnoticed.
    ranks(ParallelLayout(dp=2), _train, tmp_path / "ignored", 100.0, {})
    assert not (tmp_path / "ignored" / INCIDENTS_FILE).exists()


def test_what_a_spike_is() -> None:
    faults = FaultConfig(loss_spike_window=8, loss_spike_threshold=3.0)
    recent = [2.0, 2.2, 1.8, 2.0]  # mean 2, standard deviation 0.1414
    assert not is_spike(2.42, recent, faults)
    assert is_spike(2.43, recent, faults)
    assert not is_spike(9.0, recent[:3], faults), "less than half a window is known"
    assert not is_spike(math.nan, recent, faults), "the policy on what is not finite takes it"
