"""From the command line to a checked configuration: preset < file < flag.

Flags stay strings and absent flags stay absent until everything is merged; then one validation sees all of it.
"""

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megascale.config.constraints import broken, require_valid
from megascale.config.presets import PRESETS
from megascale.config.schema import Option, RunConfig, options
from megascale.config.serialization import Key, known_values, nearest_match, numbered, read_yaml, validate
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError

__all__ = ["ParsedRun", "build_parser", "default_text", "parse_run_config"]

_FLAG = ""  # the origin of a value given on the command line
_UNSET = "NONE"
_TOKENIZER = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model")


@dataclass(frozen=True)
class ParsedRun:
    """What a command line asks for.

    config: checked, but not resolved: what the tokenizer says is not known yet.
    explicit: what was chosen by a flag, or by the file with another value than the default.
    origins: where each value that is not a default comes from; "" is a flag.
    world_size: processes to plan for: those of the launch, or --world-size in a dry run.
    audit_step: the step whose documents are asked for; None: none are.
    """

    config: RunConfig
    explicit: frozenset[Key]
    origins: Mapping[Key, str]
    world_size: int
    print_config: bool
    dry_run: bool
    config_file: str | None
    audit_step: int | None = None


def parse_run_config(
    argv: Sequence[str], environment: LaunchEnvironment, program: str = "pretrain_gpt.py", description: str = ""
) -> ParsedRun:
    """Return the run that the flags in `argv` (without the program's name) describe.

    --help prints the options, on rank 0 only, and ends the process.

    Raises:
        UserError: unknown flags or names, wrong types, or broken rules; all that can be told together, in one message.
    """
    if any(argument in ("-h", "--help") for argument in argv):
        if environment.rank == 0:
            build_parser(program, description).print_help()
        raise SystemExit(0)
    flags, problems = _parse_flags(argv, program)
    print_config, dry_run = bool(flags.pop("print_config", False)), bool(flags.pop("dry_run", False))
    config_file = flags.pop("config", None)
    audit_step = _audit_step(flags.pop("audit_data", None))
    by_name = {option.name: option for option in options()}
    from_flags = {by_name[name].key: _none_of_text(by_name[name], value) for name, value in flags.items()}
    from_file, file_problems = ({}, []) if config_file is None else _read_config_file(config_file)
    preset, from_preset, preset_problems = _read_preset(from_flags, from_file)

    origins: dict[Key, str] = dict.fromkeys(from_preset, f"preset {preset}")
    origins.update(dict.fromkeys(from_file, str(config_file)))
    origins.update(dict.fromkeys(from_flags, _FLAG))
    config, type_problems = validate({**from_preset, **from_file, **from_flags}, _namer(origins))
    problems += file_problems + preset_problems + type_problems
    if problems:
        raise UserError(numbered(problems))

    chosen_in_file = (key for key in from_file if getattr(getattr(config, key[0]), key[1]) != by_name[key[1]].default)
    explicit = frozenset(chosen_in_file) | frozenset(from_flags)
    planned = config.parallel.world_size if dry_run else None
    world_size = environment.world_size if planned is None else planned
    for_training = not (dry_run or print_config)  # an audit reads the data as well
    require_valid(broken(config, world_size, explicit=explicit, origins=origins, for_training=for_training))
    return ParsedRun(config, explicit, origins, world_size, print_config, dry_run, config_file, audit_step)


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing the usage, for the caller decides which rank speaks; takes -1e-4 for a value."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._negative_number_matcher = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")

    def error(self, message: str) -> NoReturn:
        raise UserError(re.sub(r"^argument ", "", message) + ". See --help.")


class _Formatter(argparse.HelpFormatter):
    """Writes all spellings of a flag and then its value once."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        value = "" if action.nargs == 0 else " " + self._format_args(action, str(action.metavar))
        return ", ".join(action.option_strings) + value


class _Once(argparse.Action):
    """Store a value and refuse another one: which of two the user means cannot be known."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        value = self.const if self.nargs == 0 else values
        if self.nargs == 0 and isinstance(self.const, bool):
            value = not str(option_string).startswith("--no-")
        before = getattr(namespace, self.dest, value)
        if before != value:
            first, second = (" ".join(item) if isinstance(item, list) else item for item in (before, value))
            shown = "both on and off" if isinstance(value, bool) else f"twice, as {first} and as {second}"
            parser.error(f"{self.option_strings[0]} is given {shown}; keep one")
        setattr(namespace, self.dest, value)


def build_parser(program: str = "pretrain_gpt.py", description: str = "") -> argparse.ArgumentParser:
    """Return the parser of all flags, grouped by section, which yields strings and leaves absent flags absent."""
    parser = _Parser(
        prog=program,
        usage=f"{program} [--config FILE] [--model PRESET] [options]",
        description=description or None,
        epilog="A flag overrides the same option in --config, which overrides the preset. The value "
        f"{_UNSET} unsets an option that has no fixed default.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
        formatter_class=_Formatter,
    )
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="store_true", help="print this and exit")
    general.add_argument("--config", metavar="FILE", action=_Once, help="YAML file of options by section")
    general.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    general.add_argument("--dry-run", action="store_true", help="check, describe the run and exit; needs no data")
    general.add_argument(
        "--audit-data", metavar="STEP", action=_Once, help="print which documents a step reads and exit"
    )
    groups: dict[str, Any] = {}
    titles = {section: f"{section} ({_summary_of(section)})" for section in RunConfig.__dataclass_fields__}
    for option in options():
        group = groups.setdefault(option.section, None) or parser.add_argument_group(titles[option.section])
        groups[option.section] = group
        _add_flag(group, option)
    return parser


def _summary_of(section: str) -> str:
    section_type: Any = RunConfig.__dataclass_fields__[section].type
    return str(section_type.__doc__).splitlines()[0].rstrip(".")


def _add_flag(group: Any, option: Option) -> None:
    names = [option.flag, *option.aliases]
    text = f"{option.help} [{default_text(option)}]"
    if option.name == "preset":
        text += f": {', '.join(PRESETS)}"
    text = text.replace("%", "%%")
    if option.kind == "bool":
        negative = ["--no-" + name.removeprefix("--") for name in names]
        group.add_argument(*names, *negative, dest=option.name, action=_Once, nargs=0, const=True, help=text)
    else:
        nargs = "+" if option.kind == "list" else None
        group.add_argument(*names, dest=option.name, action=_Once, nargs=nargs, metavar=option.metavar, help=text)
    for flag, value in option.shorthands.items():
        meaning = f"same as {option.flag} {value}"
        group.add_argument(flag, dest=option.name, action=_Once, nargs=0, const=value, help=meaning)


def default_text(option: Option) -> str:
    """Return what the value is when none is given, in words where it is no constant."""
    if option.required:
        return "required, or by a preset"
    if option.derived:
        return option.derived
    if option.default is None or option.default == ():
        return "none"
    return str(option.default).lower() if option.kind == "bool" else str(option.default)


def _parse_flags(argv: Sequence[str], program: str) -> tuple[dict[str, Any], list[str]]:
    """Return the given flags by field name, and a sentence for each argument that is none."""
    parser = build_parser(program)
    namespace, unknown = parser.parse_known_args(list(argv))
    known = list(parser._option_string_actions)
    problems = []
    for position, argument in enumerate(unknown):
        if argument.startswith("-"):
            problems.append(f"unknown flag {argument}.{nearest_match(argument.split('=')[0], known)}")
        elif position == 0 or not unknown[position - 1].startswith("-"):
            problems.append(f"unexpected argument {argument!r}: every value belongs to a flag.")
    return vars(namespace), problems


def _audit_step(text: str | None) -> int | None:
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    raise UserError(f"--audit-data {text} is not the number of a step.")


def _none_of_text(option: Option, value: Any) -> Any:
    return None if value == _UNSET and option.default is None else value


def _read_config_file(path: str) -> tuple[dict[Key, Any], list[str]]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise UserError(f"--config {path} cannot be read: {reason}.") from None
    return known_values(read_yaml(text, path), path)


def _read_preset(
    from_flags: Mapping[Key, Any], from_file: Mapping[Key, Any]
) -> tuple[str | None, dict[Key, Any], list[str]]:
    """Return the name of the preset, its values, and what is wrong with the name."""
    key = ("model", "preset")
    name = from_flags.get(key, from_file.get(key))
    if name is None:
        return None, {}, []
    if not isinstance(name, str) or name not in PRESETS:
        source = "--model" if key in from_flags else "model.preset"
        match = nearest_match(str(name), PRESETS)
        return None, {}, [f"{source} {name!r} is not a preset.{match} The presets are {', '.join(PRESETS)}."]
    values = {(section, field): value for section, fields in PRESETS[name].items() for field, value in fields.items()}
    given = {**from_file, **from_flags}
    if any(given.get(("data", field)) is not None for field in _TOKENIZER):
        # A preset's vocabulary stands for the tokenizer it was trained with; another tokenizer brings its own.
        values.pop(("model", "vocab_size"), None)
    return name, values, []


def _namer(origins: Mapping[Key, str]) -> Callable[[Option], str]:
    def name_of(option: Option) -> str:
        origin = origins.get(option.key, _FLAG)
        return f"{origin}: {option.section}.{option.name}" if origin else option.flag

    return name_of
