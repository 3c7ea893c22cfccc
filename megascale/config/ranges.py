"""The values that each number may take by itself."""

import math
from dataclasses import dataclass

from megascale.config.facts import Constraint, Facts

__all__ = ["RANGE_CONSTRAINTS"]


@dataclass(frozen=True)
class _Range:
    """Numbers from `low` to `high`; a bound is part of the range unless it is open."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return math.isfinite(value) and above and below  # every comparison with NaN is false

    def __str__(self) -> str:
        low = f"{'greater than' if self.low_open else 'at least'} {self.low:g}"
        if self.high == math.inf:
            return low
        return f"{low} and {'less than' if self.high_open else 'at most'} {self.high:.10g}"


_COUNT = _Range(1)
_NOT_NEGATIVE = _Range(0)
_POSITIVE = _Range(0, low_open=True)
_PROBABILITY = _Range(0, 1, high_open=True)
_SEED = _Range(0, 2**32 - 1)  # what numpy.random.RandomState takes as one word of a seed

_RANGES = {
    "num_layers": _COUNT,
    "hidden_size": _COUNT,
    "num_attention_heads": _COUNT,
    "num_query_groups": _COUNT,
    "ffn_hidden_size": _COUNT,
    "max_position_embeddings": _COUNT,
    "vocab_size": _COUNT,
    "make_vocab_size_divisible_by": _COUNT,
    "hidden_dropout": _PROBABILITY,
    "attention_dropout": _PROBABILITY,
    "init_method_std": _POSITIVE,
    "rotary_base": _POSITIVE,
    "layernorm_epsilon": _POSITIVE,
    "tensor_model_parallel_size": _COUNT,
    "pipeline_model_parallel_size": _COUNT,
    "num_layers_per_virtual_pipeline_stage": _COUNT,
    "bucket_cap_mb": _POSITIVE,
    "world_size": _COUNT,
    "distributed_timeout_minutes": _POSITIVE,
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _PROBABILITY,
    "adam_beta2": _PROBABILITY,
    "adam_eps": _POSITIVE,
    "clip_grad": _NOT_NEGATIVE,
    "lr": _POSITIVE,
    "min_lr": _NOT_NEGATIVE,
    "lr_warmup_iters": _NOT_NEGATIVE,
    "lr_decay_iters": _COUNT,
    "split_seed": _SEED,
    "num_shards": _COUNT,
    "seq_length": _COUNT,
    "micro_batch_size": _COUNT,
    "global_batch_size": _COUNT,
    "train_iters": _COUNT,
    "eval_interval": _COUNT,
    "eval_iters": _COUNT,
    "exit_interval": _COUNT,
    "seed": _SEED,
    "loss_scale": _POSITIVE,
    "initial_loss_scale": _POSITIVE,
    "loss_scale_window": _COUNT,
    "hysteresis": _COUNT,
    "min_loss_scale": _POSITIVE,
    "label_smoothing": _PROBABILITY,
    "save_interval": _COUNT,
    "keep_last": _COUNT,
    "keep_every": _COUNT,
    "loss_spike_threshold": _POSITIVE,
    "loss_spike_window": _Range(4),
    "max_skipped_steps": _NOT_NEGATIVE,
    "max_rewinds": _NOT_NEGATIVE,
    "exit_code_on_signal": _Range(0, 255),
    "hang_timeout_minutes": _NOT_NEGATIVE,
    "check_weight_hash_interval": _COUNT,
    "log_rank_times_interval": _COUNT,
    "log_interval": _COUNT,
}


def _constraint(name: str, allowed: _Range) -> Constraint:
    def check(facts: Facts) -> str | None:
        value = facts.value(name)
        # A derived value is as good as what it is derived from, which has its own range.
        if not facts.was_given(name) or value in allowed:
            return None
        nearest = ""
        if not allowed.low_open and value < allowed.low:
            nearest = f"; the nearest valid value is {allowed.low:.10g}"
        elif not allowed.high_open and allowed.high < value < math.inf:
            nearest = f"; the nearest valid value is {allowed.high:.10g}"
        return f"{facts.show(name)} is out of range: it must be {allowed}{nearest}."

    return Constraint(f"range-of-{name.replace('_', '-')}", (name,), f"It must be {allowed}.", check)


RANGE_CONSTRAINTS: tuple[Constraint, ...] = tuple(_constraint(name, allowed) for name, allowed in _RANGES.items())
