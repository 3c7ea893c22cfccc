"""Half precision: masters that gather what half cannot hold, and the loss scale's life."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale.config.derive import derive
from megascale.config.layout import ParallelLayout
from megascale.config.loss_scale import fill_loss_scale
from megascale.config.schema import TrainConfig
from megascale.optim.build import ModelOptimizer, NonFiniteGradients, StepResult
from megascale.optim.precision import LossScaler, NumericTypes
from megascale.parallel.context import ParallelContext, single_process
from megascale.parallel.sharding import initialise
from tests.full import gradient_of
from tests.model.tiny import tiny_batch, tiny_gpt
from tests.optim.toy import Toy, random_gradients, set_gradients, toy_config

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _optimizer(context: ParallelContext, **changes: Any) -> tuple[Toy, ModelOptimizer]:
    model = Toy(context.tp)
    initialise(model, 1)
    return model, ModelOptimizer(model, toy_config(**changes), context.tp, context.dp)


@pytest.mark.parametrize("precision", HALF)
def test_updates_below_halfs_resolution_gather_in_the_master(precision: str) -> None:
    """Adam with equal gradients moves a weight by the learning rate, 1e-5; below 1 float16 has steps of 4.9e-4."""
    context, steps, lr = single_process(), 1000, 1e-5
    model, optimizer = _optimizer(context, **{precision: True}, loss_scale=1.0 if precision == "fp16" else None, lr=lr)
    norm = model.get_parameter("norm")
    without_master = torch.nn.Parameter(torch.ones(5, dtype=HALF[precision]))
    adamw = torch.optim.AdamW([without_master], lr=lr, weight_decay=0.0)
    for _ in range(steps):
        gradient_of(norm).fill_(1.0)
        optimizer.step(1.0)
        without_master.grad = torch.ones_like(without_master)
        adamw.step()
    master = {name: tensor for name, tensor, _ in optimizer.tensors()}["model.norm"]
    assert master.tolist() == pytest.approx([1 - steps * lr] * 5, rel=1e-4)
    assert norm.dtype == HALF[precision]
    assert torch.equal(norm, master.to(HALF[precision])), "the model has the master, rounded"
    assert norm[0] < 1 - 0.5 * steps * lr
    assert without_master.tolist() == [1.0] * 5, "each update alone is lost"


@pytest.mark.parametrize("precision", HALF)
def test_the_model_is_half_and_trains_as_in_float32(precision: str) -> None:
    """The first masters are the float32 weights unrounded; 20 steps stay near the float32 ones."""
    context, losses = single_process(), dict[str, list[float]]()
    for name in ("fp32", precision):
        model = tiny_gpt(context, torch.float32)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        flags = {} if name == "fp32" else {precision: True}
        optimizer = ModelOptimizer(
            model, toy_config(**flags, lr=1e-2, initial_loss_scale=2.0**10), context.tp, context.dp
        )
        for key, tensor, d in optimizer.tensors():
            if key.startswith("model."):
                assert torch.equal(tensor, before[d.name])
        assert {p.dtype for p in model.parameters()} == {HALF.get(name, torch.float32)}
        batch = tiny_batch()
        losses[name] = []
        for _ in range(20):
            optimizer.zero_gradients()
            scale = optimizer.scaler.scale / 32
            loss = model(*batch, gradient_scale=scale)
            (loss * scale).backward()
            optimizer.step(32 / batch[2].sum().item())
            losses[name].append(loss.item())
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.15)
    assert losses[precision][0] == pytest.approx(losses["fp32"][0], rel=0.02)
    assert losses["fp32"][-1] < 0.5 * losses["fp32"][0]


@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_the_loss_scale_is_taken_out_again(scale: float) -> None:
    context = single_process()
    found = {}
    for precision in ("fp32", "fp16"):
        flags = {} if precision == "fp32" else {"fp16": True, "loss_scale": scale}
        model, optimizer = _optimizer(context, clip_grad=1.0, **flags)
        assert optimizer.scaler.scale == (1.0 if precision == "fp32" else scale)
        set_gradients(model, random_gradients(seed=3, scale=optimizer.scaler.scale))
        result = optimizer.step(0.5)
        moments = {name: tensor for name, tensor, _ in optimizer.tensors() if "exp_avg." in name}
        found[precision] = (result.grad_norm, torch.cat([m.flatten() for m in moments.values()]))
    assert found["fp16"][0] == pytest.approx(found["fp32"][0], rel=1e-3)
    torch.testing.assert_close(found["fp16"][1], found["fp32"][1], rtol=1e-3, atol=1e-6)


def _overflow(context: ParallelContext, where: str) -> tuple[StepResult, bool, int, dict[str, float], StepResult]:
    """One step with an inf on tp rank 1 only, then a clean one."""
    model, optimizer = _optimizer(context, fp16=True, initial_loss_scale=8.0, hysteresis=1)
    before = [tensor.clone() for _, tensor, _ in optimizer.tensors()]
    set_gradients(model, random_gradients(seed=1))
    if context.tp.rank == 1:
        gradient_of(model.get_parameter(where))[0] = float("inf")
    first = optimizer.step(1.0)
    unchanged = all(torch.equal(a, tensor) for a, (_, tensor, _) in zip(before, optimizer.tensors(), strict=True))
    num_updates, state = optimizer.num_updates, optimizer.scaler.state()
    set_gradients(model, random_gradients(seed=1))
    return first, unchanged, num_updates, state, optimizer.step(1.0)


@pytest.mark.parametrize("where", ["rows", "norm"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, where: str) -> None:
    for first, unchanged, num_updates, state, second in ranks(ParallelLayout(tp=2), _overflow, where):
        assert first.skipped
        assert unchanged, "weights and moments"
        assert num_updates == 0
        assert state["scale"] == 4.0
        assert not second.skipped
        assert second.lr == first.lr


def test_float32_does_not_hide_a_nan() -> None:
    for flags in ({}, {"bf16": True}, {"fp16": True, "loss_scale": 8.0}):
        model, optimizer = _optimizer(single_process(), **flags)
        gradient_of(model.get_parameter("norm"))[0] = float("nan")
        with pytest.raises(NonFiniteGradients, match="at update 1"):
            optimizer.step(1.0)


def test_an_overflow_at_the_smallest_scale_is_divergence() -> None:
    model, optimizer = _optimizer(single_process(), fp16=True, initial_loss_scale=4.0, min_loss_scale=1.0, hysteresis=1)
    gradient_of(model.get_parameter("norm"))[0] = float("inf")
    for scale in (2.0, 1.0):
        assert optimizer.step(1.0).skipped
        assert optimizer.scaler.scale == scale
    with pytest.raises(NonFiniteGradients, match="loss scale 1"):
        optimizer.step(1.0)


class _MegatronScaler:
    """Megatron-LM's rule, in its own terms: counts iterations since the last overflow."""

    def __init__(self, scale: float, window: int, minimum: float, hysteresis: int) -> None:
        self.scale, self.window, self.minimum = scale, window, minimum
        self.delayed_shift = self.shifts_left = hysteresis
        self.iteration, self.last_overflow = 0, -1

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.delayed_shift == 1 or self.shifts_left == 1:
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self.shifts_left -= 1
            self.last_overflow = self.iteration
        elif (self.iteration - self.last_overflow) % self.window == 0:
            self.shifts_left = self.delayed_shift
            self.scale *= 2
        self.iteration += 1


PRESETS: dict[str, dict[str, Any]] = {
    "Megatron-LM": {},
    "Ott et al.": {"loss_scale_preset": "fairseq"},
    "Transformer-XL": {"loss_scale_preset": "transformer-xl"},
    "small": {"initial_loss_scale": 2.0**4, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 0.5},
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("overflow_rate", [0.0, 0.001, 0.2, 0.6])
def test_the_scale_follows_megatrons_rule(preset: str, overflow_rate: float) -> None:
    train = fill_loss_scale(TrainConfig(fp16=True, **PRESETS[preset]))
    ours = LossScaler(train)
    theirs = _MegatronScaler(train.initial_loss_scale, train.loss_scale_window, train.min_loss_scale, train.hysteresis)
    draws = torch.rand(5000, generator=torch.Generator().manual_seed(1)) < overflow_rate
    for step, overflow in enumerate(draws.tolist()):
        ours.update(overflow)
        theirs.update(overflow)
        assert ours.scale == theirs.scale, f"at step {step}"


def _scales(updates: str, **options: Any) -> list[float]:
    """The scale after each update: x is an overflow."""
    scaler = LossScaler(fill_loss_scale(TrainConfig(fp16=True, **options)))
    scales = []
    for update in updates:
        scaler.update(update == "x")
        scales.append(scaler.scale)
    return scales


def test_the_scale_by_hand() -> None:
    start = {"initial_loss_scale": 16.0, "loss_scale_window": 3}
    assert _scales("x.xx", hysteresis=2, **start) == [16, 16, 8, 4], "the first overflow is forgiven"
    assert _scales("x.xx", hysteresis=1, **start) == [8, 8, 4, 2]
    assert _scales("......", hysteresis=1, **start) == [16, 16, 32, 32, 32, 64], "doubles after every window"
    assert _scales("..x...", hysteresis=1, **start) == [16, 16, 8, 8, 8, 16], "the window starts anew"
    assert _scales("xx...x", hysteresis=2, **start) == [16, 8, 8, 8, 16, 16], "growth forgives again"
    assert _scales("xxxxx", hysteresis=1, min_loss_scale=4.0, **start) == [8, 4, 4, 4, 4]
    assert LossScaler(fill_loss_scale(TrainConfig(fp16=True))).scale == 2.0**32


def test_a_constant_scale_is_constant() -> None:
    for train, scale in (
        (TrainConfig(fp16=True, loss_scale=64.0), 64.0),
        (TrainConfig(bf16=True), 1.0),
        (TrainConfig(), 1.0),
    ):
        scaler = LossScaler(train)
        for overflow in (True, False) * 1000:
            scaler.update(overflow)
        assert scaler.scale == scale
        assert not scaler.exhausted
        scaler.load_state({"scale": 4.0, "clean_steps": 0, "tolerance": 0})
        assert scaler.scale == scale


def test_the_presets_constants() -> None:
    """Megatron-LM's, those of fairseq 0.5 (trainer), and those of Transformer-XL's training script."""
    names = ("initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale")

    def constants(**options: Any) -> list[Any]:
        filled = fill_loss_scale(TrainConfig(fp16=True, **options))
        return [getattr(filled, name) for name in names]

    assert constants() == constants(loss_scale_preset="megatron") == [2.0**32, 1000, 2, 1.0]
    assert constants(loss_scale_preset="fairseq") == [128.0, 2000, 1, 1e-4]
    assert constants(loss_scale_preset="transformer-xl") == [65536.0, 1000, 1, 1.0]
    assert constants(loss_scale_preset="fairseq", hysteresis=3) == [128.0, 2000, 3, 1e-4], "a flag beats the preset"
    assert fill_loss_scale(TrainConfig()) == TrainConfig(), "a run without a loss scale has none of its constants"


def _clean_updates_until_growth(preset: str) -> int:
    scaler = LossScaler(fill_loss_scale(TrainConfig(fp16=True, loss_scale_preset=preset)))
    start, count = scaler.scale, 0
    while scaler.scale == start:
        scaler.update(overflow=False)
        count += 1
    assert scaler.scale == 2 * start
    return count


def test_the_scale_grows_after_the_presets_window() -> None:
    assert {p: _clean_updates_until_growth(p) for p in ("megatron", "fairseq", "transformer-xl")} == {
        "megatron": 1000,
        "fairseq": 2000,
        "transformer-xl": 1000,
    }


def test_the_scalers_state_is_all_there_is() -> None:
    train = fill_loss_scale(TrainConfig(fp16=True, initial_loss_scale=16.0, loss_scale_window=4, hysteresis=2))
    through, resumed = LossScaler(train), LossScaler(train)
    updates = ".x...x.x......x......"
    for index, update in enumerate(updates):
        if index % 3 == 0:
            state, resumed = resumed.state(), LossScaler(train)
            resumed.load_state(state)
        through.update(update == "x")
        resumed.update(update == "x")
        assert through.state() == resumed.state()


def _sum_of_equal_gradients(precision: str, wide: bool, num_micro_batches: int) -> float:
    """Add up gradients of 1 in each element of one weight, by backward passes."""
    model, optimizer = _optimizer(
        single_process(), **{precision: True}, loss_scale=1.0 if precision == "fp16" else None,
        accumulate_allreduce_grads_in_fp32=wide,
    )  # fmt: skip
    optimizer.zero_gradients()
    for _ in range(num_micro_batches):
        model.get_parameter("norm").sum().backward()
    views = {d.name: view for d, view in zip(optimizer.gradients.declared, optimizer.gradients.views, strict=True)}
    return views["norm"][0].item()


def test_float32_sums_count_what_half_sums_lose() -> None:
    """bfloat16 has 8 significant bits: 256 + 1 is 256. float16 has 11."""
    assert _sum_of_equal_gradients("bf16", wide=False, num_micro_batches=512) == 256.0
    assert _sum_of_equal_gradients("bf16", wide=True, num_micro_batches=512) == 512.0
    assert _sum_of_equal_gradients("fp16", wide=False, num_micro_batches=2100) == 2048.0
    assert _sum_of_equal_gradients("fp16", wide=True, num_micro_batches=2100) == 2100.0


def test_float32_sums_are_the_default_of_bfloat16_only() -> None:
    def types(**flags: Any) -> tuple[torch.dtype, torch.dtype]:
        config = derive(toy_config(**flags), world_size=1)
        found = NumericTypes.of(config.train, torch.float32)
        return found.gradients, found.reduction

    assert types() == (torch.float32, torch.float32)
    assert types(bf16=True) == (torch.float32, torch.float32)
    assert types(fp16=True) == (torch.float16, torch.float16), "Ott et al. 2018: the all-reduce is in fp16"
    assert types(bf16=True, accumulate_allreduce_grads_in_fp32=False) == (torch.bfloat16, torch.bfloat16)
    assert types(bf16=True, grad_reduce_dtype="half") == (torch.float32, torch.bfloat16)
    assert types(fp16=True, grad_reduce_dtype="float32") == (torch.float16, torch.float32)


@pytest.mark.parametrize("precision", HALF)
def test_a_model_with_float32_sums_trains_as_in_float32(precision: str) -> None:
    """Eight micro-batches per update: nearer to float32 than sums in half precision are."""
    errors = {}
    for wide in (False, True):
        totals = {}
        for name in ("fp32", precision):
            model = tiny_gpt(single_process(), torch.float32)
            flags = {} if name == "fp32" else {precision: True, "accumulate_allreduce_grads_in_fp32": wide}
            flags |= {"loss_scale": 1.0} if name == "fp16" else {}
            context = single_process()
            optimizer = ModelOptimizer(model, toy_config(**flags), context.tp, context.dp)
            for seed in range(8):
                model(*tiny_batch(seed=seed)).backward()
            assert wide is False or name == "fp32" or all(p.grad is None for p in model.parameters())
            totals[name] = torch.cat([view.flatten().float() for view in optimizer.gradients.views])
        errors[wide] = ((totals[precision] - totals["fp32"]).norm() / totals["fp32"].norm()).item()
    assert errors[True] < errors[False] < 0.1


def test_pure_float16_loses_updates_that_masters_keep() -> None:
    """Shoeybi et al.'s recipe ends at a learning rate of 1e-5: below 1, float16 has steps of 4.9e-4."""
    weights = {}
    for pure in (False, True):
        model, optimizer = _optimizer(single_process(), fp16=True, fp16_pure=pure, loss_scale=1.0, lr=1e-5)
        for _ in range(200):
            gradient_of(model.get_parameter("norm")).fill_(1.0)
            optimizer.step(1.0)
        weights[pure] = model.get_parameter("norm").tolist()
        kept = {tensor.dtype for _, tensor, _ in optimizer.tensors()}
        assert kept == {torch.float16 if pure else torch.float32}, "weights and moments"
    assert weights[True] == [1.0] * 5
    assert weights[False] == pytest.approx([0.998] * 5, abs=5e-4)


def test_pure_float16_learns_at_first() -> None:
    """It is an optimizer all the same: at a large learning rate the loss falls."""
    context = single_process()
    model = tiny_gpt(context, torch.float32)
    optimizer = ModelOptimizer(
        model, toy_config(fp16=True, fp16_pure=True, loss_scale=128.0, lr=1e-2, adam_eps=1e-4), context.tp, context.dp
    )
    batch, losses = tiny_batch(), []
    for _ in range(20):
        optimizer.zero_gradients()
        loss = model(*batch, gradient_scale=128.0 / 32)
        (loss * (128.0 / 32)).backward()
        optimizer.step(32 / batch[2].sum().item())
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_what_is_done_is_told() -> None:
    _, optimizer = _optimizer(single_process(), bf16=True, accumulate_allreduce_grads_in_fp32=True)
    assert optimizer.describe() == (
        "torch's fused AdamW on float32 weights; gradients added up in float32, sent in float32"
    )
