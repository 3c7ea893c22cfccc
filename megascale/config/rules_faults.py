"""What the options about failures need of each other, and those that would have no effect."""

from megascale.config.facts import Constraint, Facts

__all__ = ["FAULT_CONSTRAINTS"]

_POLICIES = ("on_nonfinite", "on_loss_spike")
_SPIKE_OPTIONS = ("loss_spike_threshold", "loss_spike_window")
# Of each limit, the policy that it limits.
_LIMITS = {"max_skipped_steps": "skip", "max_rewinds": "rewind"}


def _rewind_needs_checkpoints(facts: Facts) -> str | None:
    rewinding = [facts.show(name) for name in _POLICIES if facts.value(name) == "rewind"]
    missing = [facts.flag(name) for name in ("save", "save_interval") if facts.value(name) is None]
    if not rewinding or not missing:
        return None
    return f"{' and '.join(rewinding)} goes back to a checkpoint of the run, but {' and '.join(missing)} not given."


def _spike_options_need_a_policy(facts: Facts) -> str | None:
    idle = [facts.show(name) for name in _SPIKE_OPTIONS if facts.chosen(name)]
    if facts.value("on_loss_spike") != "ignore" or not idle:
        return None
    return (
        f"{', '.join(idle)} would have no effect: add {facts.flag('on_loss_spike')} stop, skip or rewind, or drop it."
    )


def _limits_need_a_policy(facts: Facts) -> str | None:
    chosen = {facts.value(name) for name in _POLICIES}
    idle = [(name, policy) for name, policy in _LIMITS.items() if facts.chosen(name) and policy not in chosen]
    if not idle:
        return None
    texts = [f"{facts.show(name)} would have no effect without a policy {policy!r}" for name, policy in idle]
    return f"{'; '.join(texts)}: set {' or '.join(facts.flag(name) for name in _POLICIES)}, or drop it."


def _hang_is_told_in_time(facts: Facts) -> str | None:
    hang, timeout = facts.value("hang_timeout_minutes"), facts.value("distributed_timeout_minutes")
    if hang is None or hang < timeout:
        return None
    return (
        f"{facts.show('hang_timeout_minutes')} is not less than {facts.show('distributed_timeout_minutes')}: the "
        f"waiting ranks would end before a hang is told. Use {facts.flag('hang_timeout_minutes')} {timeout / 2:g}, or "
        f"{facts.flag('distributed_timeout_minutes')} {2 * hang:g}."
    )


def _digests_need_save(facts: Facts) -> str | None:
    if not facts.value("log_digests") or facts.value("save") is not None:
        return None
    return f"{facts.show('log_digests')} would write nothing: give a run directory with --save DIRECTORY, or drop it."


FAULT_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "rewind-needs-checkpoints",
        (*_POLICIES, "save", "save_interval"),
        "A run that goes back to a checkpoint writes checkpoints.",
        _rewind_needs_checkpoints,
        handles_none=True,
    ),
    Constraint(
        "spike-options-need-a-policy",
        ("on_loss_spike", *_SPIKE_OPTIONS),
        "What a loss spike is matters only where something follows from it.",
        _spike_options_need_a_policy,
    ),
    Constraint(
        "limits-need-a-policy",
        (*_POLICIES, *_LIMITS),
        "A limit on skipped updates or rewinds is given with the policy that it limits.",
        _limits_need_a_policy,
    ),
    Constraint(
        "hang-is-told-in-time",
        ("hang_timeout_minutes", "distributed_timeout_minutes"),
        "A hang is told before the collectives time out.",
        _hang_is_told_in_time,
        handles_none=True,
    ),
    Constraint(
        "digests-need-save",
        ("log_digests", "save"),
        "Fingerprints are written into a run directory.",
        _digests_need_save,
        handles_none=True,
    ),
)
