"""Learning-rate schedules as pure functions of the update number, counted from 1.

Warm-up is linear: update n of the first w runs at lr * n / w. (The 2019 code steps its schedule after the optimizer, so
that its first update runs at 0; ours does not waste one.)
"""

from __future__ import annotations

import math

from megascale.config.schema import ScheduleConfig


def learning_rate(schedule: ScheduleConfig, update: int) -> float:
    """Return the learning rate of the `update`-th optimizer update.

    Args:
        schedule: Resolved: `lr_decay_iters` (D below) is set; w is `lr_warmup_iters`.
        update: n, counted from 1. Skipped fp16 steps do not count.

    | style         | after warm-up, with x = (n - w) / (D - w) up to 1                                      |
    |---------------|-----------------------------------------------------------------------------------------|
    | cosine        | max(min_lr, lr/2 (1 + cos(pi x))): Shoeybi et al. 2019, "stop the decay at" the minimum |
    | cosine-interp | min_lr + (lr - min_lr)/2 (1 + cos(pi x)): Megatron-LM since v2                          |
    | linear        | max(min_lr, lr (1 - x))                                                                 |
    | constant      | lr                                                                                      |
    """
    assert update >= 1, "updates are counted from 1"
    assert schedule.lr_decay_iters is not None, "the configuration is resolved"
    peak, floor, warmup = schedule.lr, schedule.min_lr, schedule.lr_warmup_iters
    if update <= warmup:
        return peak * update / warmup
    progress = min(1.0, (update - warmup) / max(1, schedule.lr_decay_iters - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    match schedule.lr_decay_style:
        case "cosine":
            return max(floor, peak * cosine)
        case "cosine-interp":
            return floor + (peak - floor) * cosine
        case "linear":
            return max(floor, peak * (1.0 - progress))
        case "constant":
            return peak
