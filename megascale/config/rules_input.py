"""Rules on what has to be given: the required options, the data and the tokenizer."""

from megascale.config.data_flags import parse_data_path, parse_split
from megascale.config.facts import Constraint, Facts
from megascale.config.presets import PRESETS
from megascale.utils.errors import UserError

__all__ = ["INPUT_CONSTRAINTS"]

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "train_iters")
_TOKENIZER_FILES = ("vocab_file", "merge_file", "tokenizer_model")


def _required_are_given(facts: Facts) -> str | None:
    missing = [facts.flag(name) for name in _REQUIRED if facts.value(name) is None]
    if not missing:
        return None
    return f"{', '.join(missing)} not given. Give each, or all by a preset: --model {{{','.join(PRESETS)}}}."


def _training_needs_data(facts: Facts) -> str | None:
    if facts.value("data_path") or not facts.for_training:
        return None
    if facts.value("valid_data_path"):
        return f"{facts.show('valid_data_path')} has no training data beside it: give --data-path PREFIX as well."
    return (
        "--data-path is not given: name the data set(s) that tools/preprocess_data.py wrote, by the path without .bin "
        "or .idx. To look at the configuration without data, add --dry-run."
    )


def _vocabulary_is_known(facts: Facts) -> str | None:
    if facts.value("vocab_size") is not None:
        return None
    if not facts.final and any(facts.value(name) for name in (*_TOKENIZER_FILES, "data_path")):
        return None  # what these files say is read later
    return (
        "the size of the vocabulary is not known: give a tokenizer (--tokenizer-model FILE, or --vocab-file FILE with "
        "--merge-file FILE) or --vocab-size NUMBER."
    )


def _data_path_alternates(facts: Facts) -> str | None:
    return _data_path_problem(facts, "data_path")


def _valid_data_path_alternates(facts: Facts) -> str | None:
    return _data_path_problem(facts, "valid_data_path")


def _data_path_problem(facts: Facts, name: str) -> str | None:
    try:
        parse_data_path(facts.value(name), facts.flag(name))
    except UserError as error:
        return str(error)
    return None


def _split_is_ratios(facts: Facts) -> str | None:
    try:
        parse_split(facts.value("split"))
    except UserError as error:
        return str(error)
    return None


def _split_needs_one_source(facts: Facts) -> str | None:
    idle = [facts.show(name) for name in ("split", "split_seed") if facts.chosen(name)]
    if not facts.value("valid_data_path") or not idle:
        return None
    return (
        f"{', '.join(idle)} would have no effect: with --valid-data-path everything in --data-path trains. Drop one or "
        f"the other."
    )


def _tokenizer_files_fit(facts: Facts) -> str | None:
    kind = facts.value("tokenizer_type")
    vocab_file, merge_file, tokenizer_model = (facts.value(name) for name in _TOKENIZER_FILES)
    given = ", ".join(facts.show(name) for name in _TOKENIZER_FILES if facts.value(name))
    if (vocab_file or merge_file) and tokenizer_model:
        return f"{given}: files of two tokenizers. Keep --vocab-file with --merge-file, or --tokenizer-model."
    if bool(vocab_file) != bool(merge_file):
        missing = "--merge-file merges.txt" if vocab_file else "--vocab-file vocab.json"
        return f"{given} is half of a GPT-2 tokenizer: give {missing} as well."
    if kind == "GPT2BPETokenizer" and not vocab_file:
        return (
            f"{facts.show('tokenizer_type')} needs --vocab-file vocab.json and --merge-file merges.txt; given: "
            f"{given or 'neither'}."
        )
    if kind == "HuggingFaceTokenizer" and not tokenizer_model:
        return (
            f"{facts.show('tokenizer_type')} needs --tokenizer-model tokenizer.json; given: {given or 'no such file'}."
        )
    return None


INPUT_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "required-are-given",
        _REQUIRED,
        "The shape of the model and the length of the run are given, one by one or by a preset.",
        _required_are_given,
        handles_none=True,
    ),
    Constraint("training-needs-data", ("data_path", "valid_data_path"), "Training has data.", _training_needs_data),
    Constraint(
        "vocabulary-is-known",
        ("vocab_size", *_TOKENIZER_FILES, "data_path"),
        "The size of the vocabulary is given or follows from a tokenizer.",
        _vocabulary_is_known,
        handles_none=True,
    ),
    Constraint(
        "data-path-alternates",
        ("data_path",),
        "Data sets are given as prefixes only, or as a positive weight before each prefix.",
        _data_path_alternates,
    ),
    Constraint(
        "valid-data-path-alternates",
        ("valid_data_path",),
        "Validation data sets are given as prefixes only, or as a positive weight before each prefix.",
        _valid_data_path_alternates,
    ),
    Constraint(
        "split-is-ratios",
        ("split",),
        "A split is two or three numbers, none negative and the first not zero.",
        _split_is_ratios,
    ),
    Constraint(
        "split-needs-one-source",
        ("split", "split_seed", "valid_data_path"),
        "Documents are split only where validation has no data of its own.",
        _split_needs_one_source,
    ),
    Constraint(
        "tokenizer-files-fit",
        ("tokenizer_type", *_TOKENIZER_FILES),
        "The files given are those of the tokenizer, all of them and no others.",
        _tokenizer_files_fit,
        handles_none=True,
    ),
)
