"""A configuration survives YAML and dictionaries exactly, and what is not one is refused in full."""

import json
import random
from dataclasses import replace

import pytest
import yaml

from megascale.config.schema import RunConfig, options
from megascale.config.serialization import from_dict, from_yaml, nearest_match, numbered, to_dict, to_yaml
from megascale.utils.errors import UserError

# Texts that YAML would rather read as something else.
_TEXTS = ("1e-5", "null", "yes", "29,1", "a: b", "#x", " x ", "é\nb", "0x10", "1_000", "2024-01-01", "~", "", "'", "5")
_FLOATS = (0.1, 1e-5, 1e-300, 2.0**32, 1 / 3, 1e22, 123456789.123456789)


def _random_config(generator: random.Random) -> RunConfig:
    config = RunConfig()
    for option in options():
        if option.default is None and generator.random() < 0.3:
            continue
        value = {
            "int": lambda: generator.randrange(10**12),
            "float": lambda: generator.choice(_FLOATS),
            "bool": lambda: generator.random() < 0.5,
            "str": lambda: generator.choice(_TEXTS),
            "list": lambda: tuple(generator.choices(_TEXTS, k=generator.randrange(4))),
        }[option.kind]()
        value = generator.choice(option.choices) if option.choices else value
        section = replace(getattr(config, option.section), **{option.name: value})
        config = replace(config, **{option.section: section})
    return config


def _types(config: RunConfig) -> list[type]:
    return [type(getattr(getattr(config, option.section), option.name)) for option in options()]


@pytest.mark.parametrize("seed", range(40))
def test_any_configuration_survives_exactly(seed):
    config = _random_config(random.Random(seed))
    for back in (
        from_yaml(to_yaml(config)),
        from_dict(to_dict(config)),
        from_dict(json.loads(json.dumps(to_dict(config)))),
    ):
        assert back == config
        assert _types(back) == _types(config)
    assert to_yaml(from_yaml(to_yaml(config))) == to_yaml(config)


def test_yaml_writes_every_field_by_section():
    values = yaml.safe_load(to_yaml(RunConfig()))
    assert [(section, name) for section, fields in values.items() for name in fields] == [o.key for o in options()]


def test_absent_fields_and_empty_sections_have_their_defaults():
    assert from_yaml("") == RunConfig()
    assert from_yaml("model:\ntrain: {}\n") == RunConfig()


def test_yaml_numbers_as_people_write_them():
    config = from_yaml("schedule: {lr: 3e-4, lr_warmup_iters: 1_000}\noptimizer: {clip_grad: 1}\ntrain: {fp16: yes}")
    assert (config.schedule.lr, config.schedule.lr_warmup_iters) == (3e-4, 1000)
    assert (config.optimizer.clip_grad, type(config.optimizer.clip_grad)) == (1.0, float)
    assert config.train.fp16 is True


def test_a_blend_may_mix_numbers_and_texts():
    assert from_yaml("data: {data_path: [0.3, a, 1, b]}").data.data_path == ("0.3", "a", "1", "b")
    assert from_yaml("data: {data_path: one prefix}").data.data_path == ("one prefix",)


def test_all_wrong_types_are_reported_together():
    text = "train: {seed: x, fp16: 3, micro_batch_size: 2.5}\n"
    text += "schedule: {lr: [1], lr_decay_style: cosin}\ndata: {split: 90}"
    with pytest.raises(UserError) as error:
        from_yaml(text, "run.yaml")
    message = str(error.value)
    for expected in (
        "6 problems",
        "run.yaml: train.seed 'x' is not a whole number.",
        "run.yaml: train.fp16 3 is not true or false.",
        "run.yaml: train.micro_batch_size 2.5 is not a whole number.",
        "run.yaml: schedule.lr [1] is not a number.",
        "run.yaml: schedule.lr_decay_style 'cosin' is not one of cosine, cosine-interp, linear, constant.",
        "run.yaml: data.split 90 is not text (put it in quotes).",
    ):
        assert expected in message


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: {clip_grad: off}",
        "train: {seed: true}",
        "schedule: {lr: null}",
        "train: {fp16: null}",
        "data: {split: no}",
    ],
)
def test_yaml_words_do_not_become_numbers(text):
    """Left to itself, pydantic reads `clip_grad: off` as 0.0, which turns clipping off by accident."""
    with pytest.raises(UserError, match="is not"):
        from_yaml(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {sed: 1}", "unknown name `train.sed`. Did you mean seed?"),
        ("trian: {seed: 1}", "unknown section `trian`. Did you mean train?"),
        ("train: {hidden_size: 1}", "`hidden_size` is in section `train` but belongs in section `model`"),
        ("hidden-size: 5", "`hidden-size` is not a section but a field: write it as `hidden_size` under `model:`"),
        ("train: 5", "section `train` must hold `name: value` lines, found 5"),
        ("[1, 2]", "expected sections such as `model:`, found list"),
        ("just words", "expected sections"),
        ("train: {seed: 1, seed: 2}", "`seed` is given twice"),
        ("train: {seed: 1}\ntrain: {fp16: true}", "`train` is given twice"),
        ("train: {seed: [1", "not readable as YAML"),
        ("!!python/object/apply:os.getcwd []", "not readable as YAML"),
    ],
)
def test_what_is_no_configuration_is_refused_by_name(text, message):
    with pytest.raises(UserError) as error:
        from_yaml(text, "run.yaml")
    assert message in str(error.value)
    assert "run.yaml" in str(error.value)


def test_unknown_names_and_wrong_types_are_reported_together():
    with pytest.raises(UserError) as error:
        from_dict({"train": {"sed": 1, "seed": "x"}, "modle": {}})
    assert "3 problems" in str(error.value)


def test_the_nearest_match_prefers_the_name_with_all_words():
    flags = [option.flag for option in options()]
    assert nearest_match("--num-heads", flags) == " Did you mean --num-attention-heads?"
    assert nearest_match("--num-layer", flags) == " Did you mean --num-layers?"
    assert nearest_match("--xyzzy", flags) == ""


def test_several_problems_are_numbered_and_a_single_one_is_not():
    assert numbered(["a."]) == "a."
    assert numbered(["a.", "b."]) == "2 problems:\n  1. a.\n  2. b."
