"""The named models are those of the papers, and each is valid as it stands."""

import pytest

from megascale.config.constraints import broken
from megascale.config.presets import PRESETS
from megascale.config.serialization import from_dict

# Shoeybi et al. 2019, tables 1 and 4: layers, hidden size, heads, tensor-parallel size.
PAPER = {
    "gpt2-124m": (12, 768, 12, 1),
    "megatron-355m": (24, 1024, 16, 1),
    "megatron-1.2b": (40, 1536, 16, 1),
    "megatron-2.5b": (54, 1920, 20, 2),
    "megatron-4.2b": (64, 2304, 24, 4),
    "megatron-8.3b": (72, 3072, 24, 8),
}


@pytest.mark.parametrize("name", PAPER)
def test_shape_and_recipe_of_the_paper(name):
    config = from_dict(PRESETS[name])
    model = config.model
    tp = config.parallel.tensor_model_parallel_size
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, tp) == PAPER[name]
    assert (config.data.seq_length, config.train.global_batch_size, config.train.train_iters) == (1024, 512, 300_000)
    schedule = config.schedule
    assert (schedule.lr, schedule.min_lr, schedule.lr_warmup_iters) == (1.5e-4, 1e-5, 3000)
    assert schedule.lr_decay_style == "cosine"
    assert (config.optimizer.clip_grad, config.optimizer.weight_decay) == (1.0, 0.01)
    assert (model.hidden_dropout, model.attention_dropout) == (0.1, 0.1)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_where_it_fits(name):
    config = from_dict(PRESETS[name])
    tp = config.parallel.tensor_model_parallel_size
    for replicas in (1, 2):
        vocab_size = config.model.vocab_size or 50257
        assert broken(config, tp * replicas, tokenizer_vocab_size=vocab_size, final=True) == []


def test_the_papers_models_run_on_the_papers_512_gpus():
    assert broken(from_dict(PRESETS["megatron-8.3b"]), 512, final=True) == []


def test_the_llamas_are_llamas():
    for name in ("llama-tiny", "tinyllama-1.1b", "llama-7b"):
        model = from_dict(PRESETS[name]).model
        assert (model.position_embedding_type, model.normalization, model.activation) == ("rope", "RMSNorm", "swiglu")
        assert model.disable_bias_linear
        assert model.untie_embeddings_and_output_weights
        assert (model.hidden_dropout, model.attention_dropout) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "lr", "floor", "tokens_per_step", "tokens"),
    # Touvron et al. 2023, table 2 and section 2.3; Zhang et al. 2024, section 2.2.
    [("llama-7b", 3e-4, 3e-5, 4 * 2**20, 1.0e12), ("tinyllama-1.1b", 4e-4, 4e-5, 2 * 2**20, 3.0e12)],
)
def test_the_recipe_of_the_llamas(name, lr, floor, tokens_per_step, tokens):
    config = from_dict(PRESETS[name])
    schedule, optimizer = config.schedule, config.optimizer
    assert (schedule.lr, schedule.min_lr, schedule.lr_warmup_iters) == (lr, pytest.approx(floor), 2000)
    assert schedule.lr_decay_style == "cosine-interp"
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay) == (0.9, 0.95, 0.1)
    assert config.train.global_batch_size * config.data.seq_length == tokens_per_step
    assert tokens_per_step * config.train.train_iters == pytest.approx(tokens, rel=1e-5)
