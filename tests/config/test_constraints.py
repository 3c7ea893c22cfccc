"""Every rule is broken once here, is told with its numbers, and offers values that are indeed valid."""

import math
import random
import re

import pytest

from megascale.config.constraints import CONSTRAINTS, broken, require_valid
from megascale.config.ranges import RANGE_CONSTRAINTS
from megascale.config.schema import RunConfig, options
from megascale.utils.errors import UserError
from tests.config.examples import small_run, with_fields

_FLAG_OF = {option.name: option.flag for option in options()}
_TP = "parallel__tensor_model_parallel_size"
_PP = "parallel__pipeline_model_parallel_size"
_DEPTH = "parallel__num_layers_per_virtual_pipeline_stage"

# rule broken: (changes to a valid run, world size, what the message must hold)
CASES = {
    "required-are-given": (
        {"model__num_layers": None, "train__train_iters": None},
        1,
        ["--num-layers, --train-iters not given", "gpt2-124m"],
    ),
    "vocabulary-is-known": ({"model__vocab_size": None}, 1, ["--tokenizer-model FILE", "--vocab-size NUMBER"]),
    "data-path-alternates": ({"data__data_path": ("0.5", "a", "b")}, 1, ["--data-path 0.5 a b", "odd number"]),
    "valid-data-path-alternates": ({"data__valid_data_path": ("a", "2")}, 1, ["--valid-data-path a 2", "./2"]),
    "split-is-ratios": ({"data__split": "29;1"}, 1, ["--split '29;1'", "two or three numbers"]),
    "split-needs-one-source": (
        {"data__split": "9,1", "data__data_path": ("a",), "data__valid_data_path": ("b",)},
        1,
        ["--split 9,1", "--valid-data-path"],
    ),
    "tokenizer-files-fit": ({"data__vocab_file": "v.json"}, 1, ["--vocab-file v.json", "--merge-file"]),
    "heads-divide-hidden": (
        {"model__num_attention_heads": 5},
        1,
        ["--hidden-size 48", "--num-attention-heads 5", "remainder 3", "45 or 50", "4 or 6"],
    ),
    "groups-divide-heads": (
        {"model__num_query_groups": 3},
        1,
        ["--num-attention-heads 4", "--num-query-groups 3", "3 or 6", "2 or 4"],
    ),
    "tp-divides-groups": (
        {_TP: 4, "model__num_query_groups": 2},
        4,
        ["--num-query-groups 2", "--tensor-model-parallel-size 4", "nearest --tensor-model-parallel-size: 2"],
    ),
    "rotary-head-is-even": (
        {"model__hidden_size": 12, "model__position_embedding_type": "rope"},
        1,
        ["--position-embedding-type rope", "has 3", "--hidden-size: 8 or 16", "--num-attention-heads: 3 or 6"],
    ),
    "rotary-base-needs-rotary": (
        {"model__rotary_base": 5e5},
        1,
        ["--rotary-base 500000.0", "--position-embedding-type learned_absolute (default)"],
    ),
    "positions-hold-sequence": (
        {"model__max_position_embeddings": 512},
        1,
        ["--seq-length 1024", "--max-position-embeddings 512"],
    ),
    "world-size-as-launched": ({"parallel__world_size": 4}, 2, ["--world-size 4", "2 process", "--dry-run"]),
    "tp-divides-world": ({_TP: 4}, 6, ["world size 6", "--tensor-model-parallel-size 4", "4 or 8", "1 or 2"]),
    "tp-divides-heads": (
        {_TP: 3, "model__make_vocab_size_divisible_by": 3},
        3,
        ["--num-attention-heads 4", "--tensor-model-parallel-size 3", "3 or 6"],
    ),
    "tp-divides-ffn": ({_TP: 4, "model__ffn_hidden_size": 50}, 4, ["--ffn-hidden-size 50", "48 or 52", "1 or 2"]),
    "tp-divides-vocabulary": (
        {_TP: 4, "model__make_vocab_size_divisible_by": 1, "model__vocab_size": 1001},
        4,
        ["1001 rows", "--vocab-size 1001", "--make-vocab-size-divisible-by 1", "--tensor-model-parallel-size 4"],
    ),
    "pp-divides-layers": ({_PP: 3}, 3, ["--num-layers 2", "--pipeline-model-parallel-size 3", "nearest", "3", ": 2."]),
    "chunks-divide-stage": (
        {_PP: 2, _DEPTH: 4, "model__num_layers": 12},
        2,
        ["--num-layers-per-virtual-pipeline-stage 4", "6 layers of a rank", "3 or 6"],
    ),
    "chunks-need-a-pipeline": (
        {_DEPTH: 1},
        1,
        ["--num-layers-per-virtual-pipeline-stage 1", "no effect", "--pipeline-model-parallel-size 2 or more"],
    ),
    "interleaving-takes-whole-groups": (
        {_PP: 2, _DEPTH: 1, "model__num_layers": 4, "train__global_batch_size": 24},
        2,
        ["2 micro-batches at a time", "--global-batch-size 24", "gives each rank 3", "16 or 32"],
    ),
    "sequence-parallel-needs-tp": (
        {"parallel__sequence_parallel": True},
        1,
        ["--sequence-parallel has no effect", "--tensor-model-parallel-size 1 (default)", "2 or more"],
    ),
    "tp-divides-sequence": (
        {"parallel__sequence_parallel": True, _TP: 4, "data__seq_length": 1022},
        4,
        ["--seq-length 1022", "--tensor-model-parallel-size 4", "--sequence-parallel", "1020 or 1024"],
    ),
    "tokenizer-fits-vocabulary": ({"model__vocab_size": 99}, 1, ["--vocab-size 99", "100 tokens"]),
    "batch-divides": (
        {_TP: 2, "train__global_batch_size": 100},
        8,
        ["--global-batch-size 100", "32 = --micro-batch-size 8", "data-parallel size 4", "96 or 128", "5 or 25"],
    ),
    "floor-below-peak": ({"schedule__min_lr": 0.01}, 1, ["--min-lr 0.01", "--lr 0.00015"]),
    "warmup-before-decay-ends": (
        {"schedule__lr_warmup_iters": 21},
        1,
        ["--lr-warmup-iters 21", "--lr-decay-iters 20 (derived: --train-iters)"],
    ),
    "one-precision": ({"train__fp16": True, "train__bf16": True}, 1, ["--fp16 and --bf16", "--no-fp16"]),
    "half-is-not-double": (
        {"train__fp16": True, "train__params_dtype": "float64"},
        1,
        ["--fp16", "--params-dtype float64"],
    ),
    "buckets-need-overlap": ({"parallel__bucket_cap_mb": 25.0}, 2, ["--bucket-cap-mb 25", "Add --overlap-grad-reduce"]),
    "gather-needs-sharing": (
        {"parallel__overlap_param_gather": True},
        2,
        ["--overlap-param-gather", "Add --use-distributed-optimizer"],
    ),
    "wide-sums-need-half": (
        {"train__accumulate_allreduce_grads_in_fp32": True, "train__grad_reduce_dtype": "half"},
        1,
        ["--accumulate-allreduce-grads-in-fp32, --grad-reduce-dtype half", "Add --bf16 or --fp16"],
    ),
    "pure-needs-fp16": ({"train__fp16_pure": True}, 1, ["--fp16-pure", "Add --fp16"]),
    "pure-has-no-wide-sums": (
        {"train__fp16": True, "train__fp16_pure": True, "train__accumulate_allreduce_grads_in_fp32": True},
        1,
        ["--fp16-pure", "--accumulate-allreduce-grads-in-fp32", "drop one"],
    ),
    "apex-needs-cuda": (
        {"optimizer__optimizer_backend": "apex", "train__device": "cpu"},
        1,
        ["--optimizer-backend apex", "--device cpu", "--optimizer-backend torch"],
    ),
    "loss-scale-needs-fp16": ({"train__hysteresis": 3}, 1, ["--hysteresis 3", "Add --fp16"]),
    "constant-scale-is-not-dynamic": (
        {"train__fp16": True, "train__loss_scale": 8.0, "train__loss_scale_window": 5},
        1,
        ["--loss-scale-window 5", "--loss-scale 8.0"],
    ),
    "scale-starts-above-floor": (
        {"train__fp16": True, "train__initial_loss_scale": 2.0, "train__min_loss_scale": 4.0},
        1,
        ["--min-loss-scale 4.0", "--initial-loss-scale 2.0"],
    ),
    "nccl-needs-cuda": (
        {"train__device": "cpu", "parallel__distributed_backend": "nccl"},
        1,
        ["--distributed-backend nccl", "--device cpu"],
    ),
    "saving-options-need-save": (
        {"checkpoint__async_save": True, "checkpoint__keep_last": 2},
        1,
        ["--async-save, --keep-last 2 would have no effect", "--save DIRECTORY"],
    ),
    "every-needs-last": (
        {"checkpoint__save": "run", "checkpoint__keep_every": 100},
        1,
        ["--keep-every 100 would have no effect", "--keep-last N"],
    ),
    "policy-needs-load": ({"checkpoint__load_policy": "newest-intact"}, 1, ["--load-policy newest-intact", "--load"]),
    "interval-needs-save": ({"checkpoint__save_interval": 5}, 1, ["--save-interval 5", "--save DIRECTORY"]),
    "rewind-needs-checkpoints": (
        {"faults__on_nonfinite": "rewind", "checkpoint__save": "run"},
        1,
        ["--on-nonfinite rewind", "--save-interval not given"],
    ),
    "spike-options-need-a-policy": (
        {"faults__loss_spike_window": 64},
        1,
        ["--loss-spike-window 64", "--on-loss-spike"],
    ),
    "limits-need-a-policy": (
        {"faults__max_rewinds": 2, "faults__on_nonfinite": "skip"},
        1,
        ["--max-rewinds 2", "'rewind'"],
    ),
    "hang-is-told-in-time": (
        {"faults__hang_timeout_minutes": 10.0},
        1,
        ["--hang-timeout-minutes 10.0", "--distributed-timeout-minutes 10.0", "--hang-timeout-minutes 5"],
    ),
    "digests-need-save": ({"logging__log_digests": True}, 1, ["--log-digests", "--save DIRECTORY"]),
}


def _messages(config: RunConfig, world_size: int = 1, **circumstances: object) -> dict[str, str]:
    violations = broken(config, world_size, **circumstances)  # type: ignore[arg-type]
    return {violation.constraint: violation.message for violation in violations}


def test_the_example_breaks_nothing():
    for world_size in (1, 2, 4, 64):
        assert _messages(small_run(), world_size, tokenizer_vocab_size=100, final=True) == {}


@pytest.mark.parametrize("rule", CASES)
def test_each_rule_is_reported_with_its_numbers(rule):
    changes, world_size, parts = CASES[rule]
    messages = _messages(
        with_fields(small_run(), **changes), world_size, tokenizer_vocab_size=100 if "fits-" in rule else None
    )
    assert list(messages) == [rule], "this rule and no other"
    for part in parts:
        assert part in messages[rule]


def test_training_needs_data():
    assert list(_messages(small_run(), for_training=True)) == ["training-needs-data"]
    only_validation = with_fields(small_run(), data__valid_data_path=("v",))
    assert (
        "--valid-data-path v has no training data"
        in _messages(only_validation, for_training=True)["training-needs-data"]
    )
    assert _messages(with_fields(small_run(), data__data_path=("d",)), for_training=True) == {}


def test_every_rule_has_a_case_and_a_unique_name():
    names = [constraint.id for constraint in CONSTRAINTS]
    assert len(set(names)) == len(names)
    elsewhere = {
        "training-needs-data",
        "constant-has-no-decay",
        "overlap-needs-tp",
        *(constraint.id for constraint in RANGE_CONSTRAINTS),
    }
    assert set(names) == set(CASES) | elsewhere


def test_every_rule_explains_itself_and_reads_fields_that_exist():
    for constraint in CONSTRAINTS:
        assert constraint.explanation.endswith("."), constraint.id
        assert set(constraint.fields) <= set(_FLAG_OF), constraint.id


def test_a_flag_for_the_end_of_a_decay_that_does_not_happen():
    config = with_fields(small_run(), schedule__lr_decay_style="constant", schedule__lr_decay_iters=20)
    key = ("schedule", "lr_decay_iters")
    assert list(_messages(config, origins={key: ""})) == ["constant-has-no-decay"]
    assert _messages(config, origins={key: "run.yaml"}) == {}, "a saved configuration records the derived value"


def test_overlap_is_on_by_default_but_may_not_be_asked_for_where_nothing_overlaps():
    key = frozenset({("parallel", "async_tensor_model_parallel_allreduce")})
    assert _messages(small_run()) == {}
    message = _messages(small_run(), explicit=key)["overlap-needs-tp"]
    assert "--async-tensor-model-parallel-allreduce (default) has no effect" in message
    assert _messages(with_fields(small_run(), **{_TP: 2}), 2, explicit=key) == {}


def test_every_number_has_a_range():
    ranged = {constraint.fields[0] for constraint in RANGE_CONSTRAINTS}
    assert ranged == {option.name for option in options() if option.kind in ("int", "float")}


@pytest.mark.parametrize("option", [o for o in options() if o.kind in ("int", "float")], ids=lambda option: option.name)
def test_a_number_out_of_range_is_told_with_its_flag(option):
    wrong = [-1] if option.kind == "int" else [-1.0, math.nan, math.inf]
    for value in wrong:
        config = with_fields(small_run(), **{f"{option.section}__{option.name}": value})
        message = _messages(config)[f"range-of-{option.name.replace('_', '-')}"]
        assert f"{option.flag} {value} is out of range" in message


@pytest.mark.parametrize(
    ("field", "value", "valid"),
    [
        ("model__hidden_dropout", 1.0, False),
        ("model__hidden_dropout", 0.0, True),
        ("train__label_smoothing", 1.0, False),
        ("optimizer__clip_grad", 0.0, True),
        ("optimizer__adam_beta2", 1.0, False),
        ("schedule__lr", 0.0, False),
        ("schedule__min_lr", 0.0, True),
        ("schedule__lr_warmup_iters", 0, True),
        ("train__train_iters", 0, False),
        ("train__eval_interval", 0, False),
        ("train__seed", 2**32 - 1, True),
        ("train__seed", 2**32, False),
    ],
)
def test_the_ends_of_ranges(field, value, valid):
    assert (_messages(with_fields(small_run(), **{field: value})) == {}) is valid


def test_rules_that_divide_wait_for_numbers_in_range():
    """A tensor-parallel size of 0 is one mistake, not five, and no division by zero."""
    messages = _messages(with_fields(small_run(), **{_TP: 0, "model__num_attention_heads": 0}), 4)
    assert list(messages) == ["range-of-num-attention-heads", "range-of-tensor-model-parallel-size"]


def _suggestions(message: str) -> list[tuple[str, int]]:
    """Return the (field, value) pairs that a message offers after the word "nearest" or "that fit"."""
    names = {flag: name for name, flag in _FLAG_OF.items()}
    found = []
    for flag, values in re.findall(r"earest (--[a-z-]+): ([\d, or]+)", message):
        found += [(names[flag], int(value)) for value in re.findall(r"\d+", values)]
    for values in re.findall(r"--tensor-model-parallel-size that fit everything given: ([\d, or]+)", message):
        found += [("tensor_model_parallel_size", int(value)) for value in re.findall(r"\d+", values)]
    return found


def test_what_a_message_suggests_is_valid():
    """Over random wrong layouts: each suggested value mends the rule that suggested it."""
    generator = random.Random(0)
    sections = {option.name: option.section for option in options()}
    num_suggestions = 0
    for _ in range(400):
        changes = {
            "model__hidden_size": generator.randrange(8, 200),
            "model__num_attention_heads": generator.randrange(1, 17),
            "model__num_query_groups": generator.choice((None, *range(1, 9))),
            "model__position_embedding_type": generator.choice(("learned_absolute", "rope")),
            "model__ffn_hidden_size": generator.randrange(8, 400),
            "model__vocab_size": generator.randrange(50, 2000),
            "model__make_vocab_size_divisible_by": generator.randrange(1, 130),
            "train__micro_batch_size": generator.randrange(1, 9),
            "train__global_batch_size": generator.randrange(1, 200),
            _TP: generator.randrange(1, 9),
            _PP: generator.choice((1, 1, 2, 3)),
            "model__num_layers": generator.randrange(1, 13),
            _DEPTH: generator.choice((None, None, 1, 2)),
        }
        world_size = generator.randrange(1, 33)
        config = with_fields(small_run(), **changes)
        for rule, message in _messages(config, world_size).items():
            for name, value in _suggestions(message):
                mended = with_fields(config, **{f"{sections[name]}__{name}": value})
                assert rule not in _messages(mended, world_size), (message, name, value)
                num_suggestions += 1
    assert num_suggestions > 2000


def test_origins_are_told():
    origins = {("model", "hidden_size"): "preset x", ("model", "num_attention_heads"): "run.yaml"}
    message = _messages(with_fields(small_run(), model__num_attention_heads=5), origins=origins)["heads-divide-hidden"]
    assert message.startswith("--hidden-size 48 (preset x) is not divisible by --num-attention-heads 5 (run.yaml)")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer_model": "t", "vocab_file": "v", "merge_file": "m"}, "files of two tokenizers"),
        ({"merge_file": "m"}, "give --vocab-file vocab.json as well"),
        ({"tokenizer_type": "GPT2BPETokenizer"}, "needs --vocab-file vocab.json and --merge-file merges.txt"),
        ({"tokenizer_type": "GPT2BPETokenizer", "tokenizer_model": "t"}, "given: --tokenizer-model t"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "needs --tokenizer-model tokenizer.json"),
        (
            {"tokenizer_type": "HuggingFaceTokenizer", "vocab_file": "v", "merge_file": "m"},
            "given: --vocab-file v, --merge-file m",
        ),
    ],
)
def test_tokenizer_files_that_do_not_fit(fields, message):
    config = with_fields(small_run(), **{f"data__{name}": value for name, value in fields.items()})
    assert message in _messages(config)["tokenizer-files-fit"]


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_file": "v", "merge_file": "m"},
        {"vocab_file": "v", "merge_file": "m", "tokenizer_type": "GPT2BPETokenizer"},
        {"tokenizer_model": "t"},
        {"tokenizer_model": "t", "tokenizer_type": "HuggingFaceTokenizer"},
    ],
)
def test_tokenizer_files_that_fit(fields):
    config = with_fields(small_run(), **{f"data__{name}": value for name, value in fields.items()})
    assert _messages(config) == {}


def test_the_vocabulary_may_stay_open_until_the_tokenizer_is_read():
    config = with_fields(small_run(), model__vocab_size=None, data__tokenizer_model="t")
    assert _messages(config) == {}
    assert list(_messages(config, final=True)) == ["vocabulary-is-known"]
    assert _messages(config, final=True, tokenizer_vocab_size=5) == {}


def test_an_explicit_default_counts_as_a_choice():
    """--loss-scale-preset megatron without --fp16 is the default, but somebody wanted something by it."""
    assert _messages(small_run()) == {}
    assert "loss-scale-needs-fp16" in _messages(small_run(), explicit=frozenset({("train", "loss_scale_preset")}))


def test_one_error_tells_all():
    config = with_fields(small_run(), model__num_attention_heads=5, schedule__lr=-1.0, data__split="x")
    violations = broken(config, 1)
    with pytest.raises(UserError) as error:
        require_valid(violations)
    assert len(violations) == 3
    assert all(violation.message in str(error.value) for violation in violations)
    require_valid([])
