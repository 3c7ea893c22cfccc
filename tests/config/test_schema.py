"""The schema describes every option completely and without ambiguity."""

import dataclasses
from collections import Counter

import pytest

from megascale.config.schema import RunConfig, options


def test_names_are_unique_over_all_sections():
    """A flag is a field's name, so two sections cannot share one."""
    assert [name for name, count in Counter(option.name for option in options()).items() if count > 1] == []


def test_flags_are_unique():
    flags = [flag for option in options() for flag in (option.flag, *option.aliases, *option.shorthands)]
    assert [flag for flag, count in Counter(flags).items() if count > 1] == []


def test_flags_have_megatrons_names():
    flags = {flag for option in options() for flag in (option.flag, *option.aliases, *option.shorthands)}
    megatron = (
        "--num-layers --hidden-size --num-attention-heads --seq-length --micro-batch-size --global-batch-size "
        "--tensor-model-parallel-size --model-parallel-size --lr --min-lr --lr-decay-style --lr-warmup-iters "
        "--clip-grad --data-path --tokenizer-type --tokenizer --vocab-file --merge-file --tokenizer-model --save "
        "--load --save-interval --train-iters --eval-interval --log-interval --hidden-dropout "
        "--attention-dropout --seed --fp16 --bf16 --loss-scale --exit-interval --checkpoint-activations --split "
        "--model --preset"
    )
    assert set(megatron.split()) <= flags


def test_every_option_says_what_it_is():
    for option in options():
        assert len(option.help) > 8, option.name
        assert option.kind in ("int", "float", "bool", "str", "list"), option.name
        assert option.default is None or type(option.default) in (int, float, bool, str, tuple), option.name
        assert type(option.default).__name__ == option.kind or option.default in (None, ()), option.name
        assert option.default is None or not option.choices or option.default in option.choices, option.name
    assert len(list(options())) > 50


def test_an_option_without_a_default_says_what_happens_then():
    silent = [option.name for option in options() if option.default is None and not (option.required or option.derived)]
    # For these, "none" is the meaning: no preset, no such file, no exit.
    assert silent == ["preset", "vocab_file", "merge_file", "tokenizer_model", "exit_interval", "save", "load"]


def test_a_configuration_cannot_be_changed_in_place():
    config = RunConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.seed = 1  # type: ignore[misc]
    assert hash(config) == hash(RunConfig())
