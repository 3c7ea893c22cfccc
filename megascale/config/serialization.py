"""A configuration as plain values, as YAML text, and back without loss.

`validate` is the one way in: flags, YAML and dictionaries all become a RunConfig here, and everything that is wrong
with their names and types is reported together.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from megascale.config.schema import Option, RunConfig, options
from megascale.utils.errors import UserError

__all__ = [
    "Key",
    "from_dict",
    "from_yaml",
    "known_values",
    "nearest_match",
    "numbered",
    "read_yaml",
    "to_dict",
    "to_yaml",
    "validate",
]

Key = tuple[str, str]  # section and field

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text (put it in quotes)",
    "list": "a list of texts",
}


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the configuration by section and field, in values that JSON and YAML can hold."""
    return {
        section: {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        for section, values in asdict(config).items()
    }


def from_dict(values: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """Return the configuration that `to_dict` turned into `values`; fields that are absent get their defaults.

    source: what to call `values` in an error message.

    Raises:
        UserError: unknown sections or fields, or values of a wrong type; all of them in one message.
    """
    known, problems = known_values(values, source)
    config, type_problems = validate(known, lambda option: f"{source}: {option.section}.{option.name}")
    if problems or type_problems:
        raise UserError(numbered(problems + type_problems))
    return config


def to_yaml(config: RunConfig) -> str:
    """Return the configuration as YAML, every field written out, so that the text does not depend on any default."""
    return str(
        yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)
    )


def from_yaml(text: str, source: str = "configuration") -> RunConfig:
    """Return the configuration written in YAML, the inverse of `to_yaml`."""
    return from_dict(read_yaml(text, source), source)


def validate(values: Mapping[Key, Any], name_of: Callable[[Option], str]) -> tuple[RunConfig, list[str]]:
    """Turn strings and plain values into a typed configuration, and tell what is wrong with their types.

    values: by section and field; only names that exist. name_of: how the user gave an option, for the messages.

    Returns the configuration and the problems, one sentence each; where there are any, the fields concerned have their
    defaults.
    """
    by_key = {option.key: option for option in options()}
    problems: dict[Key, str] = {}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        option = by_key[key]
        if value is None and option.default is None:
            continue  # as if not given
        if value is None or (isinstance(value, bool) and option.kind != "bool"):
            problems[key] = _type_problem(option, name_of(option), value)  # pydantic would read `lr: yes` as 1.0
        else:
            sections.setdefault(key[0], {})[key[1]] = _as_list(value) if option.kind == "list" else value
    adapter = TypeAdapter(RunConfig)
    try:
        config = adapter.validate_python(sections)
    except ValidationError as error:
        for section, name in dict.fromkeys((str(item["loc"][0]), str(item["loc"][1])) for item in error.errors()):
            option = by_key[(section, name)]
            problems[option.key] = _type_problem(option, name_of(option), sections[section].pop(name))
        config = adapter.validate_python(sections)
    return config, [problems[key] for key in by_key if key in problems]


def known_values(values: Any, source: str) -> tuple[dict[Key, Any], list[str]]:
    """Return the values whose section and name exist, and what is wrong with the others, one sentence each."""
    if not isinstance(values, Mapping):
        return {}, [f"{source}: expected sections such as `model:`, found {type(values).__name__} {values!r}."]
    names: dict[str, list[str]] = {}
    for option in options():
        names.setdefault(option.section, []).append(option.name)
    known: dict[Key, Any] = {}
    problems = []
    for section, fields in values.items():
        if section not in names:
            problems.append(f"{source}: {_unknown_section(str(section), names)}")
        elif fields is not None and not isinstance(fields, Mapping):
            problems.append(f"{source}: section `{section}` must hold `name: value` lines, found {fields!r}.")
        else:
            for name, value in (fields or {}).items():
                if name in names[section]:
                    known[(section, name)] = value
                else:
                    problems.append(f"{source}: {_unknown_field(section, str(name), names)}")
    return known, problems


def _unknown_section(section: str, names: dict[str, list[str]]) -> str:
    homes = [home for home, fields in names.items() if section.replace("-", "_") in fields]
    if homes:
        name = section.replace("-", "_")
        return f"`{section}` is not a section but a field: write it as `{name}` under `{homes[0]}:`."
    return f"unknown section `{section}`.{nearest_match(section, names)} The sections are {', '.join(names)}."


def _unknown_field(section: str, name: str, names: dict[str, list[str]]) -> str:
    homes = [home for home, fields in names.items() if name in fields]
    if homes:
        return f"`{name}` is in section `{section}` but belongs in section `{homes[0]}`."
    everything = [f"{home}.{field}" for home, fields in names.items() for field in fields]
    match = nearest_match(name, names[section]) or nearest_match(f"{section}.{name}", everything)
    return f"unknown name `{section}.{name}`.{match}"


def nearest_match(name: str, candidates: Iterable[str]) -> str:
    """Return " Did you mean X?", or "" when no candidate resembles `name`."""
    names = list(candidates)
    # --num-heads looks most like --num-shards, but only --num-attention-heads has both of its words.
    with_all_words = [candidate for candidate in names if _words(name) <= _words(candidate)]
    matches = with_all_words if len(with_all_words) == 1 else difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {matches[0]}?" if matches else ""


def _words(name: str) -> set[str]:
    return set(re.split(r"[-_.]", name.strip("-")))


def numbered(problems: list[str]) -> str:
    """Return several sentences as one message, a line each."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems:\n" + "\n".join(f"  {number}. {text}" for number, text in enumerate(problems, 1))


def _as_list(value: Any) -> Any:
    """Let YAML give a single text, and numbers (the weights of a blend) among the texts of a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple):
        return value
    return [str(item) if isinstance(item, int | float) and not isinstance(item, bool) else item for item in value]


def _type_problem(option: Option, name: str, value: Any) -> str:
    shown = "null" if value is None else repr(value)
    if option.choices:
        return f"{name} {shown} is not one of {', '.join(option.choices)}."
    return f"{name} {shown} is not {_KINDS[option.kind]}."


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML lets the last of two equal keys win silently; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping, refusing a key that is written twice."""
        seen = set()
        for key_node, _ in node.value:
            key = (key_node.tag, key_node.value) if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"`{key_node.value}` is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(text: str, source: str) -> Any:
    """Return what a YAML text says, an empty one being an empty mapping.

    Raises:
        UserError: it is not YAML, or a key is given twice.
    """
    try:
        # The loader is a SafeLoader: it builds plain values only.
        values = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not readable as YAML: {error}") from None
    return {} if values is None else values
