"""Learning rates against the values of the paper's and Megatron-LM v2.5's formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megascale.config.schema import ScheduleConfig
from megascale.optim.schedule import learning_rate

# Shoeybi et al. 2019, section 4.1: 3,000 steps of warm-up, cosine over the other 297,000, stopped at 1e-5.
PAPER = ScheduleConfig(lr=1.5e-4, min_lr=1e-5, lr_decay_style="cosine", lr_warmup_iters=3_000, lr_decay_iters=300_000)


@pytest.mark.parametrize(
    ("update", "paper", "interpolated"),
    [
        (1, 5e-8, 5e-8),
        (1_500, 7.5e-5, 7.5e-5),
        (3_000, 1.5e-4, 1.5e-4),
        (151_500, 7.5e-5, 8.0e-5),
        (250_000, 1.025e-5, 1.956e-5),
        (250_622, 1e-5, 1.933e-5),
        (300_000, 1e-5, 1e-5),
        (400_000, 1e-5, 1e-5),
    ],
)
def test_the_papers_table(update: int, paper: float, interpolated: float) -> None:
    assert learning_rate(PAPER, update) == pytest.approx(paper, rel=5e-4)
    assert learning_rate(replace(PAPER, lr_decay_style="cosine-interp"), update) == pytest.approx(
        interpolated, rel=5e-4
    )


def test_the_floor_is_reached_at_update_250622() -> None:
    assert learning_rate(PAPER, 250_621) > 1e-5
    assert learning_rate(PAPER, 250_622) == 1e-5
    # A cosine over all 300,000 updates, as in the code's v1.0, would not be at the floor by then.
    assert 0.75e-4 * (1 + math.cos(math.pi * (250_622 - 3_000) / 300_000)) > 1.1e-5


@pytest.mark.parametrize("style", ["cosine", "cosine-interp", "linear"])
def test_it_rises_then_falls(style: str) -> None:
    schedule = ScheduleConfig(lr=1.0, min_lr=0.1, lr_decay_style=style, lr_warmup_iters=5, lr_decay_iters=20)  # type: ignore[arg-type]
    rates = [learning_rate(schedule, update) for update in range(1, 31)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[19:] == pytest.approx([0.1] * 11)


def test_linear_and_constant() -> None:
    schedule = ScheduleConfig(lr=1.0, min_lr=0.1, lr_decay_style="linear", lr_decay_iters=10)
    assert [learning_rate(schedule, update) for update in (1, 5, 9, 10)] == pytest.approx([0.9, 0.5, 0.1, 0.1])
    constant = replace(schedule, lr_decay_style="constant", lr_warmup_iters=2)
    assert [learning_rate(constant, update) for update in (1, 2, 3, 100)] == [0.5, 1.0, 1.0, 1.0]


def test_a_warm_up_that_fills_the_decay() -> None:
    schedule = ScheduleConfig(lr=1.0, min_lr=0.1, lr_warmup_iters=10, lr_decay_iters=10)
    assert [learning_rate(schedule, update) for update in (10, 11)] == [1.0, 0.1]
