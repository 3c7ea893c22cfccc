"""From flags, a file and a preset to one configuration; and what a user reads when that fails."""

import subprocess
import sys

import pytest

from megascale.config.cli import build_parser, parse_run_config
from megascale.config.presets import PRESETS
from megascale.config.resolution import resolve
from megascale.config.schema import options
from megascale.config.serialization import to_yaml
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError

_SMALL = "--num-layers 2 --hidden-size 48 --num-attention-heads 4 --train-iters 20 --vocab-size 1000 --data-path d"


def _parse(arguments: str, world_size: int = 1):
    return parse_run_config(arguments.split(), LaunchEnvironment(world_size=world_size))


def _error(arguments: str, world_size: int = 1) -> str:
    with pytest.raises(UserError) as error:
        _parse(arguments, world_size)
    return str(error.value)


def test_every_option_can_be_given_by_its_flag_and_its_aliases():
    given = {"int": "7", "float": "0.25", "str": "x", "list": "x", "bool": None}
    for option in options():
        value = option.choices[-1] if option.choices else given[option.kind]
        for flag in (option.flag, *option.aliases):
            namespace = build_parser().parse_args([flag] if value is None else [flag, value])
            expected = [value] if option.kind == "list" else True if value is None else value
            assert vars(namespace) == {option.name: expected}, "and nothing else is set"


def test_flags_become_typed_values():
    config = _parse(f"{_SMALL} --lr 3e-4 --bf16 --no-tensorboard --loss-scale NONE --min-lr=0").config
    assert (config.model.num_layers, config.schedule.lr, config.schedule.min_lr) == (2, 3e-4, 0.0)
    assert (config.train.bf16, config.logging.tensorboard, config.train.loss_scale) == (True, False, None)
    assert config.data.data_path == ("d",)


def test_megatrons_other_spellings():
    config = _parse(
        f"{_SMALL} --model-parallel-size 2 --checkpoint-activations --tokenizer HuggingFaceTokenizer "
        "--tokenizer-model t.json",
        world_size=2,
    ).config
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.train.recompute_granularity == "full"
    assert config.data.tokenizer_type == "HuggingFaceTokenizer"


def test_a_flag_beats_the_file_and_the_file_beats_the_preset(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {preset: gpt2-124m, num_layers: 6, hidden_dropout: 0.2}\nschedule: {lr: 1e-3}\n")
    parsed = _parse(f"--config {file} --num-layers 4 --data-path d")
    config = parsed.config
    assert (config.model.num_layers, config.model.hidden_dropout, config.model.hidden_size) == (4, 0.2, 768)
    assert (config.schedule.lr, config.schedule.lr_warmup_iters) == (1e-3, 3000)
    assert parsed.origins[("model", "num_layers")] == ""
    assert parsed.origins[("model", "hidden_dropout")] == str(file)
    assert parsed.origins[("model", "hidden_size")] == "preset gpt2-124m"
    assert parsed.config_file == str(file)


def test_a_flag_chooses_another_preset_than_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {preset: gpt2-124m}\n")
    assert _parse(f"--config {file} --model megatron-355m --data-path d").config.model.num_layers == 24


def test_null_in_a_file_unsets_what_the_preset_gave(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {preset: gpt2-124m}\ntrain: {global_batch_size: null}\n")
    config = _parse(f"--config {file} --data-path d").config
    assert config.train.global_batch_size is None
    assert _parse("--model gpt2-124m --global-batch-size NONE --data-path d").config.train.global_batch_size is None


def test_another_tokenizer_replaces_the_vocabulary_of_the_preset():
    assert _parse("--model gpt2-124m --data-path d").config.model.vocab_size == 50257
    parsed = _parse("--model gpt2-124m --data-path d --tokenizer-model t.json")
    assert parsed.config.model.vocab_size is None
    assert resolve(parsed.config, 1, 8000).model.vocab_size == 8000


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "extra", ["", "--fp16 --loss-scale 128", "--lr-decay-style constant --save s --save-interval 5"]
)
def test_a_saved_configuration_parses_to_itself(tmp_path, preset, extra):
    tp = dict(PRESETS[preset].get("parallel", {})).get("tensor_model_parallel_size", 1)
    parsed = _parse(
        f"--model {preset} --data-path 1 a 2 b --tokenizer-model t.json --world-size {2 * tp} {extra}", 2 * tp
    )
    saved = resolve(parsed.config, 2 * tp, 50257)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(saved))
    for world_size in (tp, 2 * tp):
        again = _parse(f"--config {file}", world_size).config
        assert again == saved
        assert resolve(again, world_size, 50257) == saved


def test_unknown_flags_and_wrong_types_are_told_together():
    message = _error("--num-layer 3 --num-heads 4 --lr fast --device gpu --model gpt2")
    for part in (
        "5 problems",
        "unknown flag --num-layer. Did you mean --num-layers?",
        "unknown flag --num-heads. Did you mean --num-attention-heads?",
        "--lr 'fast' is not a number.",
        "--device 'gpu' is not one of auto, cpu, cuda.",
        "--model 'gpt2' is not a preset. Did you mean gpt2-tiny?",
    ):
        assert part in message


def test_the_file_and_the_flags_are_judged_together(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train: {sed: 1, micro_batch_size: many}\n")
    message = _error(f"--config {file} --lr fast")
    assert f"{file}: unknown name `train.sed`. Did you mean seed?" in message
    assert f"{file}: train.micro_batch_size 'many' is not a whole number." in message
    assert "--lr 'fast'" in message


def test_all_broken_rules_are_told_together_with_their_origins():
    message = _error("--model megatron-8.3b --hidden-size 101 --train-iters 100 --data-path d", world_size=6)
    for part in (
        "4 problems",
        "--hidden-size 101 is not divisible by --num-attention-heads 24 (preset megatron-8.3b)",
        "world size 6 (as launched) is not divisible by --tensor-model-parallel-size 8 (preset megatron-8.3b)",
        "--ffn-hidden-size 404 (derived: 4 x --hidden-size, 8/3 x with swiglu) is not divisible by",
        "--lr-warmup-iters 3000 (preset megatron-8.3b) exceeds --lr-decay-iters 100 (derived: --train-iters)",
    ):
        assert part in message


def test_a_preset_that_is_no_name(tmp_path):
    (tmp_path / "run.yaml").write_text("model: {preset: [gpt2-tiny]}\n")
    assert "model.preset ['gpt2-tiny'] is not a preset" in _error(f"--config {tmp_path}/run.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"{_SMALL} --lr", "--lr: expected one argument"),
        (f"{_SMALL} --lr 1 --lr 2", "--lr is given twice, as 1 and as 2"),
        (f"{_SMALL} --model-parallel-size 1 --tensor-model-parallel-size 2", "is given twice, as 1 and as 2"),
        (f"{_SMALL} --fp16 --no-fp16", "--fp16 is given both on and off"),
        (f"{_SMALL} --lr 1 stray", "unexpected argument 'stray'"),
        (f"{_SMALL} --lr -1e-4", "--lr -0.0001 is out of range: it must be greater than 0."),
        (f"{_SMALL} --seed NONE", "--seed 'NONE' is not a whole number"),
        (f"{_SMALL} --num-lay 3", "unknown flag --num-lay"),
        (f"{_SMALL} --hysteresis 2", "--hysteresis 2 would have no effect"),
        (f"{_SMALL} --config missing.yaml", "--config missing.yaml cannot be read: No such file or directory"),
        (f"{_SMALL} --world-size 4", "--world-size 4 contradicts the launch, which has 1 process"),
        (_SMALL.replace("--data-path d", ""), "--data-path is not given"),
        ("--data-path d", "--num-layers, --hidden-size, --num-attention-heads, --train-iters not given"),
    ],
)
def test_what_a_user_reads(arguments, message):
    assert message in _error(arguments)


def test_the_same_value_twice_is_no_contradiction():
    assert _parse(f"{_SMALL} --lr 1 --lr 1").config.schedule.lr == 1.0


def test_a_dry_run_plans_for_another_world_and_needs_no_data():
    parsed = _parse("--model megatron-8.3b --dry-run --world-size 512")
    assert (parsed.dry_run, parsed.world_size, parsed.print_config) == (True, 512, False)
    assert "world size 12 (--world-size) is not divisible" in _error("--model megatron-8.3b --dry-run --world-size 12")


def test_print_config_needs_no_data():
    assert _parse("--model gpt2-124m --print-config").print_config


def test_explicit_is_what_somebody_chose(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train: {seed: 1234, eval_iters: 7}\n")
    parsed = _parse(f"{_SMALL} --config {file} --log-interval 10")
    assert ("train", "eval_iters") in parsed.explicit
    assert ("logging", "log_interval") in parsed.explicit, "by flag, even though it is the default"
    assert ("train", "seed") not in parsed.explicit, "in a file, the default is no choice: saved files hold all of them"


def test_help_shows_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_run_config(["--num-layers", "x", "--help"], LaunchEnvironment())
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for option in options():
        assert option.flag in text
    for part in (
        "schedule (The learning rate",
        "[0.00015]",
        "[4 x --hidden-size, 8/3 x with swiglu]",
        "[required, or by a preset]",
        *PRESETS,
    ):
        assert part in text


def test_help_is_printed_by_one_rank(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_run_config(["--help"], LaunchEnvironment(rank=1, local_rank=1, world_size=2, local_world_size=2))
    assert exit_.value.code == 0
    assert capsys.readouterr().out == ""


def test_a_wrong_flag_is_found_without_torch():
    program = (
        "import sys\n"
        "from megascale.config.cli import parse_run_config\n"
        "import megascale.config.describe, megascale.utils.files, megascale.utils.progress\n"
        "from megascale.utils.environment import LaunchEnvironment\n"
        "from megascale.utils.errors import UserError\n"
        "try:\n"
        "    parse_run_config(['--num-layer', '3'], LaunchEnvironment())\n"
        "except UserError:\n"
        "    sys.exit(3 if {'torch', 'numpy'} & set(sys.modules) else 0)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
