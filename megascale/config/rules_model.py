"""Rules on the architecture of the model."""

from megascale.config.facts import Constraint, Facts, divisors, either, nearest_multiples, nearest_of

__all__ = ["MODEL_CONSTRAINTS"]

_TP = "tensor_model_parallel_size"


def _groups_divide_heads(facts: Facts) -> str | None:
    heads, groups = facts.value("num_attention_heads"), facts.value("num_query_groups")
    if heads % groups == 0:
        return None
    return (
        f"{facts.show('num_attention_heads')} is not divisible by {facts.show('num_query_groups')}: groups are equal. "
        f"Nearest {facts.flag('num_attention_heads')}: {either(nearest_multiples(heads, groups))}; nearest "
        f"{facts.flag('num_query_groups')}: {either(nearest_of(groups, divisors(heads)))}."
    )


def _tp_divides_groups(facts: Facts) -> str | None:
    heads, groups, tp = (facts.value(name) for name in ("num_attention_heads", "num_query_groups", _TP))
    if groups % tp == 0 or not facts.was_given("num_query_groups") or groups == heads:
        return None  # where each head is a group, tp-divides-heads tells
    fitting = [number for number in divisors(heads) if number % tp == 0]
    return (
        f"{facts.show('num_query_groups')} is not divisible by {facts.show(_TP)}: a rank holds whole groups. Nearest "
        f"{facts.flag('num_query_groups')}: {either(nearest_of(groups, fitting) or nearest_multiples(groups, tp))}; "
        f"nearest {facts.flag(_TP)}: {either(nearest_of(tp, divisors(groups)))}."
    )


def _rotary_head_is_even(facts: Facts) -> str | None:
    hidden, heads = facts.value("hidden_size"), facts.value("num_attention_heads")
    if facts.value("position_embedding_type") != "rope" or hidden % heads or hidden // heads % 2 == 0:
        return None  # heads-divide-hidden tells where there is no head size
    fitting = [number for number in divisors(hidden) if hidden // number % 2 == 0]
    advice = f"; nearest {facts.flag('num_attention_heads')}: {either(nearest_of(heads, fitting))}" if fitting else ""
    return (
        f"{facts.show('position_embedding_type')} turns pairs of features, but a head has {hidden // heads} "
        f"({facts.show('hidden_size')} / {facts.show('num_attention_heads')}). Nearest {facts.flag('hidden_size')}: "
        f"{either(nearest_multiples(hidden, 2 * heads))}{advice}."
    )


def _rotary_base_needs_rotary(facts: Facts) -> str | None:
    if facts.value("position_embedding_type") == "rope" or not facts.chosen("rotary_base"):
        return None
    return (
        f"{facts.show('rotary_base')} would have no effect with {facts.show('position_embedding_type')}. Add "
        f"{facts.flag('position_embedding_type')} rope or drop the flag."
    )


MODEL_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "groups-divide-heads",
        ("num_attention_heads", "num_query_groups"),
        "The attention heads are divided evenly among the query groups.",
        _groups_divide_heads,
    ),
    Constraint(
        "tp-divides-groups",
        ("num_attention_heads", "num_query_groups", _TP),
        "Each rank of a tensor-parallel group holds the same number of whole query groups.",
        _tp_divides_groups,
    ),
    Constraint(
        "rotary-head-is-even",
        ("hidden_size", "num_attention_heads", "position_embedding_type"),
        "Rotary positions turn pairs of a head's features.",
        _rotary_head_is_even,
    ),
    Constraint(
        "rotary-base-needs-rotary",
        ("rotary_base", "position_embedding_type"),
        "The base of rotary positions is given with rotary positions only.",
        _rotary_base_needs_rotary,
    ),
)
