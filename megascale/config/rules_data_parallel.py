"""Rules on how gradients are summed and who updates the weights, and on the types that both go with."""

from megascale.config.facts import Constraint, Facts

__all__ = ["DATA_PARALLEL_CONSTRAINTS"]


def _buckets_need_overlap(facts: Facts) -> str | None:
    if not facts.chosen("bucket_cap_mb") or facts.value("overlap_grad_reduce") or facts.value("overlap_param_gather"):
        return None
    return (
        f"{facts.show('bucket_cap_mb')} would have no effect: without overlap all gradients go in one message. Add "
        f"{facts.flag('overlap_grad_reduce')} or drop it."
    )


def _gather_needs_sharing(facts: Facts) -> str | None:
    if not facts.value("overlap_param_gather") or facts.value("use_distributed_optimizer"):
        return None
    return (
        f"{facts.show('overlap_param_gather')} would have no effect: only the distributed optimizer gathers weights. "
        f"Add {facts.flag('use_distributed_optimizer')} or drop it."
    )


def _wide_sums_need_half(facts: Facts) -> str | None:
    idle = [facts.show("accumulate_allreduce_grads_in_fp32")] if _wide(facts) else []
    idle += [facts.show("grad_reduce_dtype")] if facts.value("grad_reduce_dtype") is not None else []
    if facts.value("fp16") or facts.value("bf16") or not idle:
        return None
    return (
        f"{', '.join(idle)} would have no effect: gradients are added up and sent in {facts.show('params_dtype')}. Add "
        f"--bf16 or --fp16, or drop the flag(s)."
    )


def _pure_needs_fp16(facts: Facts) -> str | None:
    if not facts.value("fp16_pure") or facts.value("fp16"):
        return None
    return f"{facts.show('fp16_pure')} would have no effect: it is about the masters of --fp16. Add --fp16 or drop it."


def _pure_has_no_wide_sums(facts: Facts) -> str | None:
    if not facts.value("fp16_pure") or not _wide(facts):
        return None
    return (
        f"{facts.show('fp16_pure')} updates float16 weights from float16 gradients, but "
        f"{facts.show('accumulate_allreduce_grads_in_fp32')}: drop one of them."
    )


def _apex_needs_cuda(facts: Facts) -> str | None:
    if facts.value("optimizer_backend") != "apex":
        return None
    wrong = [facts.show("device")] if facts.value("device") == "cpu" else []
    wrong += [facts.show("params_dtype")] if facts.value("params_dtype") == "float64" else []
    if not wrong:
        return None
    return (
        f"{facts.show('optimizer_backend')} does not go with {' and '.join(wrong)}: NVIDIA's apex updates float32 and "
        f"16-bit weights on GPUs. Use {facts.flag('optimizer_backend')} torch, or auto."
    )


def _wide(facts: Facts) -> bool:
    return bool(facts.value("accumulate_allreduce_grads_in_fp32"))


DATA_PARALLEL_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "buckets-need-overlap",
        ("bucket_cap_mb", "overlap_grad_reduce", "overlap_param_gather"),
        "The size of the buckets is given with overlapped communication only.",
        _buckets_need_overlap,
    ),
    Constraint(
        "gather-needs-sharing",
        ("overlap_param_gather", "use_distributed_optimizer"),
        "Only the distributed optimizer has parameters to gather.",
        _gather_needs_sharing,
    ),
    Constraint(
        "wide-sums-need-half",
        ("accumulate_allreduce_grads_in_fp32", "grad_reduce_dtype", "fp16", "bf16", "params_dtype"),
        "The types of sums and messages of gradients are chosen in 16-bit training only.",
        _wide_sums_need_half,
    ),
    Constraint("pure-needs-fp16", ("fp16_pure", "fp16"), "Pure float16 is a kind of --fp16.", _pure_needs_fp16),
    Constraint(
        "pure-has-no-wide-sums",
        ("fp16_pure", "accumulate_allreduce_grads_in_fp32"),
        "Pure float16 has float16 gradients.",
        _pure_has_no_wide_sums,
    ),
    Constraint(
        "apex-needs-cuda",
        ("optimizer_backend", "device", "params_dtype"),
        "NVIDIA's apex updates float32 and 16-bit weights on GPUs only.",
        _apex_needs_cuda,
    ),
)
