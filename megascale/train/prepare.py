"""Everything that can be found wrong before torch is imported: the flags, and every file they name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from megascale.checkpoint.manifest import Manifest, read_manifest
from megascale.config.cli import ParsedRun
from megascale.config.derive import derive
from megascale.config.describe import describe_run
from megascale.config.layout import ParallelLayout
from megascale.config.resolution import resolve
from megascale.config.schema import RunConfig, options
from megascale.config.serialization import known_values, numbered, to_dict, to_yaml, validate
from megascale.data.build import Sources, build_sources, stored_vocab_size
from megascale.data.tokenizer import Tokenizer, build_tokenizer
from megascale.train.start import Start, find_start
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError

Result = TypeVar("Result")


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to launch.

    Attributes:
        config: Resolved and checked.
        layout: The grid of ranks.
        sources: Training and validation samples.
        start: The checkpoint to go on from; None: from initial weights.
        passed_over: Newer checkpoints that are not taken, and what is wrong with each.
        changes: How the configuration differs from the one in that checkpoint, a line each.
    """

    config: RunConfig
    layout: ParallelLayout
    sources: Sources
    start: Path | None
    passed_over: tuple[str, ...]
    changes: list[str]


def prepare(parsed: ParsedRun, environment: LaunchEnvironment, start: Start | None = None) -> PreparedRun:
    """Open the tokenizer, the data and the checkpoint that a parsed command line names.

    Args:
        parsed: The command line.
        environment: How the process was launched.
        start: Where to begin, when that is known already; otherwise where --load says.

    Raises:
        UserError: whatever is wrong with any of them, in one message.
    """
    problems: list[str] = []

    def attempt(action: Callable[[], Result]) -> Result | None:
        try:
            return action()
        except UserError as error:
            problems.append(str(error))
            return None

    tokenizer = attempt(lambda: open_tokenizer(parsed.config))
    start = start or attempt(lambda: find_start(parsed.config)) or Start(None)
    path = start.path
    manifest = attempt(lambda: read_manifest(path)) if path else None
    config = None if problems else attempt(lambda: resolve_run(parsed, tokenizer, manifest))
    sources = attempt(lambda: build_sources(config, tokenizer)) if config else None
    if config and manifest:
        attempt(lambda: require_same_model(config, manifest, path))
    if problems or config is None or sources is None:
        raise UserError(numbered(problems))
    parallel = config.parallel
    layout = ParallelLayout.of_world(
        environment.world_size, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    )
    changes = config_changes(manifest, config) if manifest else []
    return PreparedRun(config, layout, sources, path, start.passed_over, changes)


def open_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Build the tokenizer whose files the configuration names; None when it names none."""
    data = config.data
    if not (data.tokenizer_model or data.vocab_file):
        return None
    return build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file, data.tokenizer_model)


def resolve_run(parsed: ParsedRun, tokenizer: Tokenizer | None, manifest: Manifest | None = None) -> RunConfig:
    """Fill in what the tokenizer, or else the records beside the data sets, say of the vocabulary.

    A global batch size that is not given stays what it was in the checkpoint, also on another number of ranks.

    Raises:
        UserError: a rule is broken, or the vocabulary stays unknown.
    """
    vocab_size = tokenizer.vocab_size if tokenizer else None
    if vocab_size is None and parsed.config.data.data_path:
        vocab_size = stored_vocab_size(parsed.config)
    config = parsed.config
    # Unresolved, a field may be None although its type is that of the resolved one.
    if manifest is not None and to_dict(config)["train"]["global_batch_size"] is None:
        before = manifest.config["train"]["global_batch_size"]
        config = replace(config, train=replace(config.train, global_batch_size=before))
    return resolve(config, parsed.world_size, vocab_size)


# Fields of the model section that may differ from the checkpoint's: they shape no tensor.
_FREE_MODEL_FIELDS = ("preset", "hidden_dropout", "attention_dropout", "init_method_std")


def require_same_model(config: RunConfig, manifest: Manifest, start: Path | None) -> None:
    """Check that a checkpoint holds the model that the configuration describes.

    Raises:
        UserError: naming each flag that differs with both values.
    """
    keys = [("model", o.name) for o in options() if o.section == "model" and o.name not in _FREE_MODEL_FIELDS]
    keys += [("train", "params_dtype"), ("train", "fp16_pure")]  # the types of the weights in a checkpoint
    differing = [line for key, line in _differences(manifest, config) if key in keys]
    if differing:
        raise UserError(
            f"checkpoint {start} is of another model: {'; '.join(differing)}. Give the flags it was trained with "
            f"(config.yaml of its run), or another --load"
        )


def config_changes(manifest: Manifest, config: RunConfig) -> list[str]:
    """Return how the configuration differs from the checkpoint's, apart from where files lie and what is logged."""
    return [line for (section, _), line in _differences(manifest, config) if section not in ("checkpoint", "logging")]


def _differences(manifest: Manifest, config: RunConfig) -> list[tuple[tuple[str, str], str]]:
    # An option that is newer than the checkpoint has its default, or what follows from the options that are there.
    known, _ = known_values(manifest.config, "checkpoint")
    stored, _ = validate(known, lambda option: option.flag)
    before = to_dict(derive(stored, world_size=1))
    found = []
    for option in options():
        now = getattr(getattr(config, option.section), option.name)
        now = list(now) if isinstance(now, tuple) else now
        then = before[option.section][option.name]
        if now != then:
            found.append((option.key, f"{option.flag} {then} in the checkpoint, {now} now"))
    return found


def print_description(parsed: ParsedRun, environment: LaunchEnvironment) -> None:
    """Print what --print-config and --dry-run ask for, on rank 0.

    Raises:
        UserError: the configuration is invalid, or --dry-run names files that are.
    """
    tokenizer = open_tokenizer(parsed.config)
    config = resolve_run(parsed, tokenizer)
    sources = build_sources(config, tokenizer) if parsed.dry_run and config.data.data_path else None
    if environment.rank == 0:
        if parsed.print_config:
            print(to_yaml(config), end="")
        if parsed.dry_run:
            print(describe_run(config, parsed.world_size))
            if sources is not None:
                print(sources.describe())
