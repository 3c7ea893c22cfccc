"""Rules on the shape of the model and on how it is cut over ranks."""

from megascale.config.accounting import padded_vocab_size
from megascale.config.facts import Constraint, Facts, divisors, either, nearest_multiples, nearest_of

__all__ = ["LAYOUT_CONSTRAINTS"]

_TP = "tensor_model_parallel_size"
_PP = "pipeline_model_parallel_size"


def _heads_divide_hidden(facts: Facts) -> str | None:
    hidden, heads = facts.value("hidden_size"), facts.value("num_attention_heads")
    if hidden % heads == 0:
        return None
    tp = max(1, facts.value(_TP))
    fitting = [number for number in divisors(hidden) if number % tp == 0] or divisors(hidden)
    return (
        f"{facts.show('hidden_size')} is not divisible by {facts.show('num_attention_heads')} (remainder "
        f"{hidden % heads}). Nearest {facts.flag('hidden_size')}: {either(nearest_multiples(hidden, heads))}; "
        f"nearest {facts.flag('num_attention_heads')}: {either(nearest_of(heads, fitting))}."
    )


def _positions_hold_sequence(facts: Facts) -> str | None:
    seq_length, positions = facts.value("seq_length"), facts.value("max_position_embeddings")
    if seq_length <= positions:
        return None
    return (
        f"{facts.show('seq_length')} exceeds {facts.show('max_position_embeddings')}: later tokens would have no "
        f"position. Use {facts.flag('seq_length')} {positions} or less, or {facts.flag('max_position_embeddings')} "
        f"{seq_length} or more."
    )


def _world_size_as_launched(facts: Facts) -> str | None:
    stated = facts.value("world_size")
    if stated is None or stated == facts.world_size:
        return None
    return (
        f"{facts.show('world_size')} contradicts the launch, which has {facts.world_size} process(es). Launch {stated} "
        f"or drop the flag; to plan for {stated} processes without them, add --dry-run."
    )


def _tp_divides_world(facts: Facts) -> str | None:
    tp, pp = facts.value(_TP), facts.value(_PP)
    if facts.world_size % (tp * pp) == 0:
        return None
    stages = f" x {facts.show(_PP)}" if pp > 1 else ""
    advice = f"; {_valid_tp(facts)}" if facts.world_size % pp == 0 else ""
    return (
        f"{facts.show_world_size()} is not divisible by {facts.show(_TP)}{stages}. Nearest world size: "
        f"{either(nearest_multiples(facts.world_size, tp * pp))} processes (torchrun --nproc-per-node; --world-size "
        f"for a --dry-run){advice}."
    )


def _tp_divides_heads(facts: Facts) -> str | None:
    heads, tp, hidden = facts.value("num_attention_heads"), facts.value(_TP), facts.value("hidden_size")
    if heads % tp == 0:
        return None
    fitting = [number for number in divisors(hidden) if number % tp == 0] if hidden else []
    nearest = nearest_of(heads, fitting) or nearest_multiples(heads, tp)
    return (
        f"{facts.show('num_attention_heads')} is not divisible by {facts.show(_TP)}: a rank holds whole heads. "
        f"Nearest {facts.flag('num_attention_heads')}: {either(nearest)}; {_valid_tp(facts)}."
    )


def _tp_divides_ffn(facts: Facts) -> str | None:
    ffn, tp = facts.value("ffn_hidden_size"), facts.value(_TP)
    if ffn % tp == 0:
        return None
    return (
        f"{facts.show('ffn_hidden_size')} is not divisible by {facts.show(_TP)}. Nearest "
        f"{facts.flag('ffn_hidden_size')}: {either(nearest_multiples(ffn, tp))}; {_valid_tp(facts)}."
    )


def _tp_divides_vocabulary(facts: Facts) -> str | None:
    tp, multiple = facts.value(_TP), facts.value("make_vocab_size_divisible_by")
    padded = padded_vocab_size(facts.value("vocab_size"), multiple)
    if padded % tp == 0:
        return None
    return (
        f"the padded vocabulary of {padded} rows ({facts.show('vocab_size')}, "
        f"{facts.show('make_vocab_size_divisible_by')}) is not divisible by {facts.show(_TP)}. Nearest "
        f"{facts.flag('make_vocab_size_divisible_by')}: {either(nearest_multiples(multiple, tp))}; {_valid_tp(facts)}."
    )


def _valid_tp(facts: Facts) -> str:
    """Return the tensor-parallel sizes that suit everything that is known, next to the one that does not."""
    pp = facts.value(_PP)
    # If the world cannot be cut into pipeline stages, no tensor-parallel size mends that.
    per_stage = facts.world_size // pp if pp > 0 and facts.world_size % pp == 0 else None
    cut = [per_stage, facts.value("num_attention_heads"), facts.value("ffn_hidden_size")]
    cut.append(facts.value("num_query_groups"))
    multiple = facts.value("make_vocab_size_divisible_by")
    if facts.value("vocab_size") is not None and multiple > 0:
        cut.append(padded_vocab_size(facts.value("vocab_size"), multiple))
    known = [number for number in cut if number is not None and number > 0]
    fitting = [tp for tp in divisors(min(known)) if all(number % tp == 0 for number in known)]
    return f"{facts.flag(_TP)} that fit everything given: {either(fitting)}"


def _sequence_parallel_needs_tp(facts: Facts) -> str | None:
    if not facts.value("sequence_parallel") or facts.value(_TP) > 1:
        return None
    return (
        f"{facts.show('sequence_parallel')} has no effect with {facts.show(_TP)}: there are no ranks to split the "
        f"sequence over. Use {facts.flag(_TP)} 2 or more, or drop the flag."
    )


def _tp_divides_sequence(facts: Facts) -> str | None:
    seq_length, tp = facts.value("seq_length"), facts.value(_TP)
    if not facts.value("sequence_parallel") or seq_length % tp == 0:
        return None
    return (
        f"{facts.show('seq_length')} is not divisible by {facts.show(_TP)}, over which "
        f"{facts.flag('sequence_parallel')} splits it. Nearest {facts.flag('seq_length')}: "
        f"{either(nearest_multiples(seq_length, tp))}; or drop {facts.flag('sequence_parallel')}."
    )


def _overlap_needs_tp(facts: Facts) -> str | None:
    name = "async_tensor_model_parallel_allreduce"
    if not facts.value(name) or not facts.chosen(name) or facts.value(_TP) > 1:
        return None
    return (
        f"{facts.show(name)} has no effect with {facts.show(_TP)}: nothing is reduced over one rank. Use "
        f"{facts.flag(_TP)} 2 or more, or drop the flag."
    )


def _tokenizer_fits_vocabulary(facts: Facts) -> str | None:
    needed, vocabulary = facts.tokenizer_vocab_size, facts.value("vocab_size")
    if needed is None or needed <= vocabulary:
        return None
    return (
        f"{facts.show('vocab_size')} is less than the {needed} tokens of the tokenizer. Use {needed} or more, or leave "
        f"the flag out to take the tokenizer's."
    )


LAYOUT_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "heads-divide-hidden",
        ("hidden_size", "num_attention_heads"),
        "The hidden size is divided evenly among the attention heads.",
        _heads_divide_hidden,
    ),
    Constraint(
        "positions-hold-sequence",
        ("seq_length", "max_position_embeddings"),
        "A sample is not longer than there are positions.",
        _positions_hold_sequence,
    ),
    Constraint(
        "world-size-as-launched",
        ("world_size",),
        "A stated world size is the launched one, except in a dry run.",
        _world_size_as_launched,
    ),
    Constraint(
        "tp-divides-world",
        (_TP, _PP),
        "The processes of the run form whole copies of the model: tensor-parallel size x pipeline-parallel size each.",
        _tp_divides_world,
    ),
    Constraint(
        "tp-divides-heads",
        ("num_attention_heads", _TP),
        "Each rank of a tensor-parallel group holds the same number of whole attention heads.",
        _tp_divides_heads,
    ),
    Constraint(
        "tp-divides-ffn",
        ("ffn_hidden_size", _TP),
        "The width of the MLP is divided evenly in a tensor-parallel group.",
        _tp_divides_ffn,
    ),
    Constraint(
        "tp-divides-vocabulary",
        ("vocab_size", "make_vocab_size_divisible_by", _TP),
        "The padded vocabulary is divided evenly in a tensor-parallel group.",
        _tp_divides_vocabulary,
    ),
    Constraint(
        "sequence-parallel-needs-tp",
        ("sequence_parallel", _TP),
        "Sequence parallelism splits the sequence over a tensor-parallel group of two or more ranks.",
        _sequence_parallel_needs_tp,
    ),
    Constraint(
        "tp-divides-sequence",
        ("seq_length", "sequence_parallel", _TP),
        "With sequence parallelism, a sample is divided evenly in a tensor-parallel group.",
        _tp_divides_sequence,
    ),
    Constraint(
        "overlap-needs-tp",
        ("async_tensor_model_parallel_allreduce", _TP),
        "Overlapping the reductions of a tensor-parallel group needs one of two or more ranks.",
        _overlap_needs_tp,
    ),
    Constraint(
        "tokenizer-fits-vocabulary",
        ("vocab_size",),
        "The vocabulary of the model holds every token of the tokenizer.",
        _tokenizer_fits_vocabulary,
    ),
)
