"""Rules on batches, the schedule, precision, devices and checkpoints."""

from megascale.config.facts import Constraint, Facts, divisors, either, nearest_multiples, nearest_of
from megascale.config.loss_scale import LOSS_SCALE_FIELDS

__all__ = ["TRAINING_CONSTRAINTS"]

_TP = "tensor_model_parallel_size"
_PP = "pipeline_model_parallel_size"
_SCALER_OPTIONS = ("loss_scale_preset", *LOSS_SCALE_FIELDS)


def _batch_divides(facts: Facts) -> str | None:
    batch, micro, tp = facts.value("global_batch_size"), facts.value("micro_batch_size"), facts.value(_TP)
    ranks_per_model = tp * facts.value(_PP)
    if facts.world_size % ranks_per_model:
        return None  # there is no data-parallel size; tp-divides-world tells
    dp = facts.world_size // ranks_per_model
    if batch % (micro * dp) == 0:
        return None
    stages = f" / {facts.show(_PP)}" if facts.value(_PP) > 1 else ""
    if batch % dp == 0:
        fitting = either(nearest_of(micro, divisors(batch // dp)))
        micro_advice = f"nearest {facts.flag('micro_batch_size')}: {fitting}"
    else:
        micro_advice = f"no {facts.flag('micro_batch_size')} helps, since {batch} samples cannot be dealt to {dp} ranks"
    return (
        f"{facts.show('global_batch_size')} is not divisible by {micro * dp} = {facts.show('micro_batch_size')} x "
        f"data-parallel size {dp} ({facts.show_world_size()} / {facts.show(_TP)}{stages}). Nearest "
        f"{facts.flag('global_batch_size')}: {either(nearest_multiples(batch, micro * dp))}; {micro_advice}."
    )


def _floor_below_peak(facts: Facts) -> str | None:
    if facts.value("min_lr") <= facts.value("lr"):
        return None
    return (
        f"{facts.show('min_lr')} exceeds {facts.show('lr')}: the floor of the schedule would be above its peak. Use "
        f"{facts.flag('min_lr')} {facts.value('lr')} or less, or {facts.flag('lr')} {facts.value('min_lr')} or more."
    )


def _warmup_before_decay_ends(facts: Facts) -> str | None:
    warmup, decay = facts.value("lr_warmup_iters"), facts.value("lr_decay_iters")
    if warmup <= decay:
        return None
    return (
        f"{facts.show('lr_warmup_iters')} exceeds {facts.show('lr_decay_iters')}: the peak would never be reached. Use "
        f"{facts.flag('lr_warmup_iters')} {decay} or less, or {facts.flag('lr_decay_iters')} {warmup} or more (it is "
        f"{facts.flag('train_iters')} unless given)."
    )


def _constant_has_no_decay(facts: Facts) -> str | None:
    # Only the flag counts: a saved configuration records the derived value, which no one asked for.
    if facts.value("lr_decay_style") != "constant" or not facts.by_flag("lr_decay_iters"):
        return None
    return (
        f"{facts.show('lr_decay_iters')} would have no effect: {facts.show('lr_decay_style')} does not decay. Drop it "
        f"or choose another {facts.flag('lr_decay_style')}."
    )


def _one_precision(facts: Facts) -> str | None:
    if not (facts.value("fp16") and facts.value("bf16")):
        return None
    return f"{facts.show('fp16')} and {facts.show('bf16')} exclude each other: add --no-fp16 or --no-bf16."


def _half_is_not_double(facts: Facts) -> str | None:
    halves = [facts.show(name) for name in ("fp16", "bf16") if facts.value(name)]
    if not halves or facts.value("params_dtype") == "float32":
        return None
    return (
        f"{' '.join(halves)} computes in 16 bits from float32 master weights and cannot go with "
        f"{facts.show('params_dtype')}. Drop one of them."
    )


def _loss_scale_needs_fp16(facts: Facts) -> str | None:
    idle = [facts.show(name) for name in ("loss_scale", *_SCALER_OPTIONS) if facts.chosen(name)]
    if facts.value("fp16") or not idle:
        return None
    return f"{', '.join(idle)} would have no effect: only --fp16 scales the loss. Add --fp16 or drop the flag(s)."


def _constant_scale_is_not_dynamic(facts: Facts) -> str | None:
    idle = [facts.show(name) for name in _SCALER_OPTIONS if facts.chosen(name)]
    if not facts.value("fp16") or facts.value("loss_scale") is None or not idle:
        return None
    return (
        f"{', '.join(idle)} would have no effect: {facts.show('loss_scale')} keeps the scale constant. Drop "
        f"{facts.flag('loss_scale')} for a dynamic scale, or drop the other flag(s)."
    )


def _scale_starts_above_floor(facts: Facts) -> str | None:
    initial, floor = facts.value("initial_loss_scale"), facts.value("min_loss_scale")
    if initial is None or floor is None or initial >= floor:
        return None
    return (
        f"{facts.show('min_loss_scale')} exceeds {facts.show('initial_loss_scale')}. Use "
        f"{facts.flag('min_loss_scale')} {initial:g} or less, or {facts.flag('initial_loss_scale')} {floor:g} or more."
    )


def _nccl_needs_cuda(facts: Facts) -> str | None:
    if not (facts.value("device") == "cpu" and facts.value("distributed_backend") == "nccl"):
        return None
    return (
        f"{facts.show('distributed_backend')} needs GPUs, but {facts.show('device')} was chosen. Use "
        f"{facts.flag('distributed_backend')} gloo (or auto), or {facts.flag('device')} cuda."
    )


def _interval_needs_save(facts: Facts) -> str | None:
    if facts.value("save_interval") is None or facts.value("save") is not None:
        return None
    return f"{facts.show('save_interval')} would save nothing: give a run directory with --save DIRECTORY, or drop it."


TRAINING_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "batch-divides",
        ("global_batch_size", "micro_batch_size", _TP, _PP),
        "Each data-parallel rank computes the same whole number of micro-batches per step.",
        _batch_divides,
    ),
    Constraint(
        "floor-below-peak",
        ("min_lr", "lr"),
        "The floor of the learning rate is not above its peak.",
        _floor_below_peak,
    ),
    Constraint(
        "warmup-before-decay-ends",
        ("lr_warmup_iters", "lr_decay_iters"),
        "The warm-up is over when the decay ends.",
        _warmup_before_decay_ends,
    ),
    Constraint(
        "constant-has-no-decay",
        ("lr_decay_style", "lr_decay_iters"),
        "A constant learning rate takes no end of its decay.",
        _constant_has_no_decay,
    ),
    Constraint("one-precision", ("fp16", "bf16"), "There is one 16-bit type at most.", _one_precision),
    Constraint(
        "half-is-not-double",
        ("fp16", "bf16", "params_dtype"),
        "The 16-bit types have float32 master weights.",
        _half_is_not_double,
    ),
    Constraint(
        "loss-scale-needs-fp16",
        ("fp16", "loss_scale", *_SCALER_OPTIONS),
        "The options of loss scaling are given with --fp16 only.",
        _loss_scale_needs_fp16,
        handles_none=True,
    ),
    Constraint(
        "constant-scale-is-not-dynamic",
        ("fp16", "loss_scale", *_SCALER_OPTIONS),
        "The options of the dynamic loss scale are not given with a constant one.",
        _constant_scale_is_not_dynamic,
        handles_none=True,
    ),
    Constraint(
        "scale-starts-above-floor",
        ("initial_loss_scale", "min_loss_scale"),
        "The dynamic loss scale starts at its floor or above.",
        _scale_starts_above_floor,
    ),
    Constraint(
        "nccl-needs-cuda", ("device", "distributed_backend"), "NCCL connects GPUs, not cpu runs.", _nccl_needs_cuda
    ),
    Constraint(
        "interval-needs-save",
        ("save_interval", "save"),
        "Checkpoints at an interval need a run directory.",
        _interval_needs_save,
        handles_none=True,
    ),
)
