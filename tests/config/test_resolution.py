"""What is derived, and that a resolved configuration stays what it is."""

from dataclasses import replace

import pytest

from megascale.config.presets import PRESETS
from megascale.config.resolution import resolve
from megascale.config.schema import options
from megascale.config.serialization import from_dict
from megascale.utils.errors import UserError
from tests.config.examples import small_run, with_fields


def test_what_is_derived():
    config = with_fields(small_run(), model__vocab_size=None, train__micro_batch_size=3, data__tokenizer_model="t.json")
    config = with_fields(config, parallel__tensor_model_parallel_size=2)
    resolved = resolve(config, world_size=8, tokenizer_vocab_size=777)
    assert resolved.model.ffn_hidden_size == 4 * 48
    assert resolved.model.max_position_embeddings == resolved.data.seq_length == 1024
    assert resolved.model.vocab_size == 777
    assert resolved.train.global_batch_size == 3 * 4
    assert resolved.schedule.lr_decay_iters == resolved.train.train_iters == 20
    assert resolved.data.tokenizer_type == "HuggingFaceTokenizer"


def test_what_was_given_is_kept():
    config = with_fields(
        small_run(),
        model__num_query_groups=2,
        model__ffn_hidden_size=8,
        model__max_position_embeddings=2048,
        train__global_batch_size=64,
        train__accumulate_allreduce_grads_in_fp32=False,
        schedule__lr_decay_iters=10,
    )
    resolved = resolve(config, world_size=2, tokenizer_vocab_size=900)
    changed = {
        o.name
        for o in options()
        if getattr(getattr(config, o.section), o.name) != getattr(getattr(resolved, o.section), o.name)
    }
    assert changed == set()
    assert resolved.model.vocab_size == 1000


@pytest.mark.parametrize(
    ("hidden_size", "ffn_hidden_size"), [(24, 64), (48, 128), (96, 256), (4096, 10944), (1536, 4096)]
)
def test_the_mlp_of_swiglu_has_as_many_parameters_in_three_matrices(hidden_size, ffn_hidden_size):
    """8/3 of the hidden size, up to a multiple of 64."""
    config = with_fields(small_run(), model__hidden_size=hidden_size, model__activation="swiglu")
    assert resolve(config, 1).model.ffn_hidden_size == ffn_hidden_size
    assert 0 <= ffn_hidden_size - 8 * hidden_size / 3 < 64


def test_two_byte_pair_files_mean_gpt2():
    config = with_fields(small_run(), data__vocab_file="v", data__merge_file="m")
    assert resolve(config, 1, 1000).data.tokenizer_type == "GPT2BPETokenizer"


def test_nothing_that_must_be_known_is_left_open():
    resolved = resolve(small_run(), 1, None)
    open_options = {
        o.name for o in options() if not o.optional and getattr(getattr(resolved, o.section), o.name) is None
    }
    assert open_options == set()


@pytest.mark.parametrize("preset", PRESETS)
def test_resolving_again_changes_nothing(preset):
    config = from_dict(PRESETS[preset])
    world_size = 2 * config.parallel.tensor_model_parallel_size
    vocab_size = config.model.vocab_size or 50257
    once = resolve(config, world_size, vocab_size)
    assert resolve(once, world_size, vocab_size) == once
    assert resolve(once, world_size, None) == once


def test_a_run_may_go_on_with_another_number_of_replicas():
    """The saved configuration holds the batch, which is the training's, and no world size, which is the launch's."""
    config = with_fields(small_run(), parallel__world_size=4)
    saved = resolve(config, world_size=4, tokenizer_vocab_size=None)
    assert saved.parallel.world_size is None
    assert saved.train.global_batch_size == 8 * 4
    for world_size in (1, 2, 4):
        assert resolve(saved, world_size) == saved
    # With 8 ranks the batch of 32 leaves 4 samples to each: a smaller micro-batch is asked for, the batch stays.
    with pytest.raises(UserError, match="--global-batch-size 32 is not divisible by 64") as error:
        resolve(saved, 8)
    assert "nearest --micro-batch-size: 4" in str(error.value)
    smaller = replace(saved, train=replace(saved.train, micro_batch_size=4))
    assert resolve(smaller, 8).train.global_batch_size == 32


def test_an_unknown_vocabulary_is_refused():
    config = with_fields(small_run(), model__vocab_size=None)
    with pytest.raises(UserError, match="--vocab-size NUMBER"):
        resolve(config, 1, None)


def test_resolving_checks_the_tokenizer_against_the_vocabulary():
    with pytest.raises(UserError, match="--vocab-size 1000 is less than the 1001 tokens"):
        resolve(small_run(), 1, 1001)


def test_all_broken_rules_are_told_at_once():
    config = with_fields(
        small_run(), model__num_attention_heads=5, train__fp16=True, train__bf16=True, schedule__min_lr=1.0
    )
    with pytest.raises(UserError) as error:
        resolve(config, 1, None)
    message = str(error.value)
    assert "3 problems" in message
    for part in ("--num-attention-heads 5", "--fp16 and --bf16", "--min-lr 1.0"):
        assert part in message
