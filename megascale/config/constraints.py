"""All rules of the configuration as one list, and the check that reports every broken one at once."""

from collections.abc import Mapping

from megascale.config.facts import Constraint, Facts, Violation
from megascale.config.ranges import RANGE_CONSTRAINTS
from megascale.config.rules_checkpoint import CHECKPOINT_CONSTRAINTS
from megascale.config.rules_data_parallel import DATA_PARALLEL_CONSTRAINTS
from megascale.config.rules_faults import FAULT_CONSTRAINTS
from megascale.config.rules_input import INPUT_CONSTRAINTS
from megascale.config.rules_layout import LAYOUT_CONSTRAINTS
from megascale.config.rules_model import MODEL_CONSTRAINTS
from megascale.config.rules_pipeline import PIPELINE_CONSTRAINTS
from megascale.config.rules_training import TRAINING_CONSTRAINTS
from megascale.config.schema import RunConfig
from megascale.config.serialization import numbered
from megascale.utils.errors import UserError

__all__ = ["CONSTRAINTS", "Constraint", "Violation", "broken", "require_valid"]

CONSTRAINTS: tuple[Constraint, ...] = (
    *INPUT_CONSTRAINTS,
    *RANGE_CONSTRAINTS,
    *MODEL_CONSTRAINTS,
    *LAYOUT_CONSTRAINTS,
    *PIPELINE_CONSTRAINTS,
    *TRAINING_CONSTRAINTS,
    *DATA_PARALLEL_CONSTRAINTS,
    *CHECKPOINT_CONSTRAINTS,
    *FAULT_CONSTRAINTS,
)


def broken(
    config: RunConfig,
    world_size: int,
    *,
    tokenizer_vocab_size: int | None = None,
    explicit: frozenset[tuple[str, str]] = frozenset(),
    origins: Mapping[tuple[str, str], str] | None = None,
    for_training: bool = False,
    final: bool = False,
) -> list[Violation]:
    """Return every rule that `config` breaks on `world_size` processes; an empty list means that it is valid.

    tokenizer_vocab_size: tokens of the tokenizer, None while it has not been read; then what depends on it is not
        checked, unless `final` says that there will be no tokenizer.
    explicit, origins: what the user chose and where, as `parse_run_config` returns them; they sharpen the messages.
    for_training: whether data is needed.
    """
    facts = Facts.of(
        config,
        world_size,
        tokenizer_vocab_size,
        explicit=explicit,
        origins=origins or {},
        for_training=for_training,
        final=final,
    )
    violations = _violations(RANGE_CONSTRAINTS, facts)
    out_of_range = {name for violation in violations for name in violation.fields}
    checkable = tuple(
        constraint
        for constraint in CONSTRAINTS
        if constraint not in RANGE_CONSTRAINTS
        and not out_of_range.intersection(constraint.fields)
        and (constraint.handles_none or _all_known(facts, constraint))
    )
    violations += _violations(checkable, facts)
    order = [constraint.id for constraint in CONSTRAINTS]
    return sorted(violations, key=lambda violation: order.index(violation.constraint))


def require_valid(violations: list[Violation]) -> None:
    """Raise one UserError that tells all of `violations`, if there are any."""
    if violations:
        raise UserError(numbered([violation.message for violation in violations]))


def _all_known(facts: Facts, constraint: Constraint) -> bool:
    # A value that is optional, such as the stated world size, is known to be None.
    return all(facts.value(name) is not None or facts.by_name[name].optional for name in constraint.fields)


def _violations(constraints: tuple[Constraint, ...], facts: Facts) -> list[Violation]:
    found = ((constraint, constraint.check(facts)) for constraint in constraints)
    return [Violation(constraint.id, constraint.fields, message) for constraint, message in found if message]
