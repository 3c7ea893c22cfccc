"""What the options about checkpoints need of each other."""

from megascale.config.facts import Constraint, Facts

__all__ = ["CHECKPOINT_CONSTRAINTS"]

_SAVING_OPTIONS = ("async_save", "keep_last", "keep_every", "save_best")


def _saving_options_need_save(facts: Facts) -> str | None:
    idle = [facts.show(name) for name in _SAVING_OPTIONS if facts.value(name)]
    if facts.value("save") is not None or not idle:
        return None
    return f"{', '.join(idle)} would have no effect: give a run directory with --save DIRECTORY, or drop it."


def _every_needs_last(facts: Facts) -> str | None:
    if facts.value("keep_every") is None or facts.value("keep_last") is not None:
        return None
    return (
        f"{facts.show('keep_every')} would have no effect: without {facts.flag('keep_last')} all checkpoints are kept. "
        f"Add {facts.flag('keep_last')} N, or drop it."
    )


def _policy_needs_load(facts: Facts) -> str | None:
    if facts.value("load_policy") == "newest" or facts.value("load") is not None:
        return None
    return (
        f"{facts.show('load_policy')} would have no effect without {facts.flag('load')} DIRECTORY: add it, or drop it."
    )


CHECKPOINT_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "saving-options-need-save",
        (*_SAVING_OPTIONS, "save"),
        "How checkpoints are saved and kept is told with a run directory.",
        _saving_options_need_save,
        handles_none=True,
    ),
    Constraint(
        "every-needs-last",
        ("keep_every", "keep_last"),
        "Checkpoints are kept at an interval where others are removed.",
        _every_needs_last,
        handles_none=True,
    ),
    Constraint(
        "policy-needs-load",
        ("load_policy", "load"),
        "Which checkpoint is loaded is told with where it lies.",
        _policy_needs_load,
        handles_none=True,
    ),
)
