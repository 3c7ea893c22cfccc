"""Rules on how the layers are cut into pipeline stages."""

from megascale.config.facts import Constraint, Facts, divisors, either, nearest_multiples, nearest_of
from megascale.config.pipeline import num_chunks

__all__ = ["PIPELINE_CONSTRAINTS"]

_TP = "tensor_model_parallel_size"
_PP = "pipeline_model_parallel_size"
_DEPTH = "num_layers_per_virtual_pipeline_stage"


def _pp_divides_layers(facts: Facts) -> str | None:
    layers, pp = facts.value("num_layers"), facts.value(_PP)
    if layers % pp == 0:
        return None
    return (
        f"{facts.show('num_layers')} is not divisible by {facts.show(_PP)}: every stage holds equally many layers. "
        f"Nearest {facts.flag('num_layers')}: {either(nearest_multiples(layers, pp))}; nearest {facts.flag(_PP)}: "
        f"{either(nearest_of(pp, divisors(layers)))}."
    )


def _chunks_divide_stage(facts: Facts) -> str | None:
    layers, pp, depth = facts.value("num_layers"), facts.value(_PP), facts.value(_DEPTH)
    if depth is None or pp == 1 or layers % pp or (layers // pp) % depth == 0:
        return None
    return (
        f"{facts.show(_DEPTH)} does not divide the {layers // pp} layers of a rank ({facts.show('num_layers')} / "
        f"{facts.show(_PP)}). Nearest: {either(nearest_of(depth, divisors(layers // pp)))}."
    )


def _chunks_need_a_pipeline(facts: Facts) -> str | None:
    if not facts.chosen(_DEPTH) or facts.value(_PP) != 1:
        return None
    return (
        f"{facts.show(_DEPTH)} would have no effect: {facts.show(_PP)} is no pipeline. Drop it or use "
        f"{facts.flag(_PP)} 2 or more."
    )


def _interleaving_takes_whole_groups(facts: Facts) -> str | None:
    batch, micro, pp = facts.value("global_batch_size"), facts.value("micro_batch_size"), facts.value(_PP)
    per_stage = facts.value(_TP) * pp
    layers, depth = facts.value("num_layers"), facts.value(_DEPTH)
    if depth is None or facts.world_size % per_stage or layers % (pp * depth) or num_chunks(facts.full) == 1:
        return None  # not interleaved, or another rule tells
    dp = facts.world_size // per_stage
    if batch % (micro * dp) or batch // (micro * dp) % pp == 0:
        return None
    return (
        f"the interleaved schedule ({facts.show(_DEPTH)}) takes {pp} micro-batches at a time ({facts.show(_PP)}), but "
        f"{facts.show('global_batch_size')} gives each rank {batch // (micro * dp)} of {facts.show('micro_batch_size')}"
        f" at data-parallel size {dp}. Nearest {facts.flag('global_batch_size')}: "
        f"{either(nearest_multiples(batch, micro * dp * pp))}; or drop {facts.flag(_DEPTH)}."
    )


PIPELINE_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "pp-divides-layers",
        ("num_layers", _PP),
        "Each pipeline stage holds the same number of layers.",
        _pp_divides_layers,
    ),
    Constraint(
        "chunks-divide-stage",
        ("num_layers", _PP, _DEPTH),
        "The layers of a pipeline rank are divided evenly into its virtual stages.",
        _chunks_divide_stage,
    ),
    Constraint(
        "chunks-need-a-pipeline",
        (_PP, _DEPTH),
        "Virtual pipeline stages are for pipelines.",
        _chunks_need_a_pipeline,
    ),
    Constraint(
        "interleaving-takes-whole-groups",
        ("num_layers", "global_batch_size", "micro_batch_size", _TP, _PP, _DEPTH),
        "With virtual pipeline stages, the micro-batches of a rank are a multiple of the pipeline-parallel size.",
        _interleaving_takes_whole_groups,
    ),
)
