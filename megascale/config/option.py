"""One option of a run: how a field of the schema is described, and what is read out of its description."""

from dataclasses import MISSING, Field, dataclass, field
from typing import Any, Literal, get_args, get_origin

__all__ = ["Option", "as_option", "option", "required"]


def option(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    aliases: tuple[str, ...] = (),
    shorthands: dict[str, str] | None = None,
    metavar: str | None = None,
    derived: str | None = None,
    required: bool = False,
) -> Any:
    """Describe one field.

    flag: its flag, where that is not the field's name with dashes. aliases: other spellings of the flag.
    shorthands: flags without a value that stand for one value of this option.
    metavar: what its value is called in --help. derived: what the value is when none is given.
    required: there is no such value.
    """
    metadata = {
        "help": help,
        "flag": flag,
        "aliases": aliases,
        "shorthands": shorthands or {},
        "metavar": metavar,
        "derived": derived,
        "required": required,
    }
    return field(default=default, metadata=metadata)


def required(help: str) -> Any:
    """Describe a field that a flag, a file or a preset must give."""
    return option(None, help, required=True)


@dataclass(frozen=True)
class Option:
    """One field of one section, as the command line, the documentation and the error messages need it.

    kind: "int", "float", "bool", "str" or "list" (of strings). choices: the only values allowed, empty for any.
    optional: whether None is a value of the resolved option, not just a gap that is filled in.
    """

    section: str
    name: str
    kind: str
    default: Any
    optional: bool
    choices: tuple[str, ...]
    help: str
    flag: str
    aliases: tuple[str, ...]
    shorthands: dict[str, str]
    metavar: str | None
    derived: str | None
    required: bool

    @property
    def key(self) -> tuple[str, str]:
        """The section and the name."""
        return (self.section, self.name)


def as_option(section: str, description: "Field[Any]", hint: Any) -> Option:
    """Return what the field `description` of a section with the type hint `hint` says."""
    assert description.default is not MISSING, f"{section}.{description.name} has no default"
    alternatives = [hint] if get_origin(hint) in (None, Literal, tuple) else list(get_args(hint))
    optional = type(None) in alternatives
    (value_type,) = (alternative for alternative in alternatives if alternative is not type(None))
    choices = tuple(get_args(value_type)) if get_origin(value_type) is Literal else ()
    kind = "str" if choices else "list" if get_origin(value_type) is tuple else value_type.__name__
    settings = dict(description.metadata)
    if settings["metavar"] is None and kind != "bool":
        settings["metavar"] = "{" + ",".join(choices) + "}" if choices else {"int": "N", "float": "X"}.get(kind, "TEXT")
    settings["flag"] = settings["flag"] or "--" + description.name.replace("_", "-")
    return Option(
        section=section,
        name=description.name,
        kind=kind,
        default=description.default,
        optional=optional,
        choices=choices,
        **settings,
    )
