"""What a rule looks at and what it is made of; the rules themselves are in ranges.py and the rules_*.py files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megascale.config.derive import derive
from megascale.config.schema import Option, RunConfig, options

__all__ = ["Constraint", "Facts", "Violation", "divisors", "either", "nearest_multiples", "nearest_of"]


@dataclass(frozen=True)
class Violation:
    """One broken rule: which, the fields it is about, and what to tell the user."""

    constraint: str
    fields: tuple[str, ...]
    message: str


@dataclass(frozen=True)
class Constraint:
    """One rule of the configuration.

    id: its stable name. fields: what it reads. explanation: the rule in general, for the documentation.
    check: returns what is wrong with the given facts, None when the rule holds. It is not called while a field is out
    of range or, unless `handles_none`, unknown; so it may divide.
    """

    id: str
    fields: tuple[str, ...]
    explanation: str
    check: "Callable[[Facts], str | None]"
    handles_none: bool = False


@dataclass(frozen=True)
class Facts:
    """A configuration, where its values come from, and the launch it is for.

    given: as the user gave it. full: with what can be derived. explicit: what was chosen by a flag, or by a file with
    another value than the default. origins: a few words on where a value comes from, "" for a flag.
    for_training: whether the run is to train, and so needs data. final: whether the tokenizer has been read.
    """

    given: RunConfig
    full: RunConfig
    world_size: int
    tokenizer_vocab_size: int | None = None
    explicit: frozenset[tuple[str, str]] = frozenset()
    origins: Mapping[tuple[str, str], str] = field(default_factory=dict)
    for_training: bool = False
    final: bool = False
    by_name: Mapping[str, Option] = field(default_factory=lambda: {option.name: option for option in options()})

    @classmethod
    def of(
        cls, config: RunConfig, world_size: int, tokenizer_vocab_size: int | None = None, **circumstances: Any
    ) -> "Facts":
        """Return the facts about a configuration; `circumstances` are the remaining fields."""
        full = derive(config, world_size, tokenizer_vocab_size)
        return cls(config, full, world_size, tokenizer_vocab_size, **circumstances)

    def value(self, name: str) -> Any:
        """Return the value of the field `name`, derived if need be, None when it is unknown."""
        return getattr(getattr(self.full, self.by_name[name].section), name)

    def was_given(self, name: str) -> bool:
        """Return whether the value is not a derived one."""
        return getattr(getattr(self.given, self.by_name[name].section), name) is not None

    def chosen(self, name: str) -> bool:
        """Return whether the user wants the option to have an effect."""
        option = self.by_name[name]
        return self.was_given(name) and (option.key in self.explicit or self.value(name) != option.default)

    def by_flag(self, name: str) -> bool:
        """Return whether the option was given on the command line."""
        return self.origins.get(self.by_name[name].key) == ""

    def flag(self, name: str) -> str:
        """Return the flag of the field `name`."""
        return self.by_name[name].flag

    def show(self, name: str) -> str:
        """Return the flag with its value and, if it was not given by flag, where the value comes from."""
        option, value = self.by_name[name], self.value(name)
        if option.kind == "bool":
            text = option.flag if value else "--no-" + option.flag.removeprefix("--")
        else:
            text = f"{option.flag} {' '.join(value) if option.kind == 'list' else value}"
        origin = self.origins.get(option.key)
        if origin is None:
            is_default = value == option.default
            origin = "default" if is_default else "" if self.was_given(name) else f"derived: {option.derived}"
        return f"{text} ({origin})" if origin else text

    def show_world_size(self) -> str:
        """Return the world size and who says so."""
        planned = self.given.parallel.world_size == self.world_size
        return f"world size {self.world_size} ({'--world-size' if planned else 'as launched'})"


def divisors(number: int) -> list[int]:
    """Return all divisors of `number` >= 1 in ascending order."""
    small = [candidate for candidate in range(1, int(number**0.5) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def nearest_multiples(value: int, multiple: int) -> list[int]:
    """Return the positive multiples next to `value`, below and above."""
    below = value // multiple * multiple
    return [number for number in (below, below + multiple) if number > 0]


def nearest_of(value: int, candidates: Iterable[int]) -> list[int]:
    """Return the candidates next to `value`, below and above, as far as there are any."""
    ordered = sorted(candidates)
    below = [number for number in ordered if number <= value][-1:]
    above = [number for number in ordered if number > value][:1]
    return below + above


def either(values: Sequence[object]) -> str:
    """Return "1", "1 or 2", "1, 2 or 3"."""
    texts = [str(value) for value in values]
    return " or ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)
