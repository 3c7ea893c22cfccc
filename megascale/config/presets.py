"""Models by name: their shape and the recipe they were trained with. A file or a flag overrides any of it.

A preset says nothing about precision, recomputation or the micro-batch: these suit a machine, not a model.
"""

from collections.abc import Mapping
from typing import Any

__all__ = ["PRESETS"]

Preset = Mapping[str, Mapping[str, Any]]

_GPT2_VOCABULARY = 50257

# Shoeybi et al. 2019 (arXiv:1909.08053), section 4.2: batch 512, sequences of 1024 tokens, 300k iterations, learning
# rate 1.5e-4 with 3,000 iterations of warm-up, cosine decay to 1e-5, clipping at 1.0, weight decay 0.01, dropout 0.1.
_RECIPE_OPTIMIZER = {"weight_decay": 0.01, "clip_grad": 1.0}
_RECIPE_SCHEDULE = {"lr": 1.5e-4, "min_lr": 1e-5, "lr_decay_style": "cosine", "lr_warmup_iters": 3000}
_RECIPE_TRAIN = {"global_batch_size": 512, "train_iters": 300_000, "eval_interval": 1000, "eval_iters": 100}


def _gpt2(num_layers: int, hidden_size: int, num_attention_heads: int, tp: int = 1) -> Preset:
    return {
        "model": {
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "num_attention_heads": num_attention_heads,
            "max_position_embeddings": 1024,
            "vocab_size": _GPT2_VOCABULARY,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
        },
        "parallel": {"tensor_model_parallel_size": tp},
        "optimizer": _RECIPE_OPTIMIZER,
        "schedule": _RECIPE_SCHEDULE,
        "data": {"seq_length": 1024},
        "train": _RECIPE_TRAIN,
    }


# What makes a decoder a Llama; Touvron et al. 2023 (arXiv:2302.13971), section 2.2.
_LLAMA_MODEL = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def _llama(model: Mapping[str, Any], lr: float, global_batch_size: int, train_iters: int) -> Preset:
    """Return a Llama of 2,048 positions with the recipe that the published ones share, floor at lr / 10."""
    return {
        # 32,000 is a multiple of 128, so that nothing is padded and sizes are the published ones.
        "model": {
            "num_layers": model["num_layers"],
            "hidden_size": model["hidden_size"],
            "num_attention_heads": 32,
            "num_query_groups": model["num_query_groups"],
            "ffn_hidden_size": model["ffn_hidden_size"],
            "max_position_embeddings": 2048,
            "vocab_size": 32000,
            "make_vocab_size_divisible_by": 128,
            **_LLAMA_MODEL,
            "layernorm_epsilon": model["layernorm_epsilon"],
        },
        "optimizer": {"weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad": 1.0},
        "schedule": {"lr": lr, "min_lr": lr / 10, "lr_decay_style": "cosine-interp", "lr_warmup_iters": 2000},
        "data": {"seq_length": 2048},
        "train": {"global_batch_size": global_batch_size, "train_iters": train_iters},
    }


PRESETS: Mapping[str, Preset] = {
    # Minutes on a laptop; its own choice of everything, and whatever vocabulary the tokenizer has.
    "gpt2-tiny": {
        "model": {
            "num_layers": 4,
            "hidden_size": 128,
            "num_attention_heads": 4,
            # A pass or two over a small corpus does not overfit.
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "schedule": {"lr": 1.5e-3, "min_lr": 1e-4, "lr_warmup_iters": 20},
        "data": {"seq_length": 128},
        "train": {
            "micro_batch_size": 8,
            "train_iters": 1000,
            "eval_interval": 100,
            "eval_iters": 20,
        },
    },
    # Radford et al. 2019, the smallest GPT-2, with the recipe of the others.
    "gpt2-124m": _gpt2(12, 768, 12),
    # Shoeybi et al. 2019, table 4 (355M, 2.5B, 8.3B as trained) and table 1 (1.2B, 4.2B and the tensor-parallel sizes).
    "megatron-355m": _gpt2(24, 1024, 16),
    "megatron-1.2b": _gpt2(40, 1536, 16, tp=1),
    "megatron-2.5b": _gpt2(54, 1920, 20, tp=2),
    "megatron-4.2b": _gpt2(64, 2304, 24, tp=4),
    # 24 heads as trained (table 4); the scaling study of table 1 ran the same model with 32.
    "megatron-8.3b": _gpt2(72, 3072, 24, tp=8),
    # Minutes on a laptop, as gpt2-tiny, with everything that makes a Llama.
    "llama-tiny": {
        "model": {
            "num_layers": 4,
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 384,
            **_LLAMA_MODEL,
        },
        "schedule": {"lr": 1.5e-3, "min_lr": 1e-4, "lr_decay_style": "cosine-interp", "lr_warmup_iters": 20},
        "data": {"seq_length": 128},
        "train": {
            "micro_batch_size": 4,
            "global_batch_size": 8,
            "train_iters": 1000,
            "eval_interval": 100,
            "eval_iters": 20,
        },
    },
    # Touvron et al. 2023, table 2: 4M tokens per step, 1T tokens.
    "llama-7b": _llama(
        {
            "num_layers": 32,
            "hidden_size": 4096,
            "num_query_groups": 32,
            "ffn_hidden_size": 11008,
            "layernorm_epsilon": 1e-6,
        },
        lr=3e-4,
        global_batch_size=2048,
        train_iters=238_419,
    ),
    # Zhang et al. 2024 (arXiv:2401.02385), table 2 and section 2.2: 2M tokens per step, 3T tokens.
    "tinyllama-1.1b": _llama(
        {
            "num_layers": 22,
            "hidden_size": 2048,
            "num_query_groups": 4,
            "ffn_hidden_size": 5632,
            "layernorm_epsilon": 1e-5,
        },
        lr=4e-4,
        global_batch_size=1024,
        train_iters=1_430_512,
    ),
    # The "big" transformer (Vaswani et al. 2017, table 3; Ott et al. 2018) as a language model: a decoder with ReLU and
    # norms after the residual sums, of as many layers as encoder and decoder have together. The vocabulary is the
    # tokenizer's, the length of training one's own.
    "transformer-big": {
        "model": {
            "num_layers": 12,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "ffn_hidden_size": 4096,
            "activation": "relu",
            "norm_position": "post",
        },
        # Learning rate and betas of Ott et al. 2018, section 4.1, with the 4,000 steps of warm-up that post-norm needs.
        "optimizer": {"adam_beta1": 0.9, "adam_beta2": 0.98, "weight_decay": 0.0},
        "schedule": {"lr": 5e-4, "lr_decay_style": "cosine", "lr_warmup_iters": 4000},
        "train": {"global_batch_size": 512, "train_iters": 100_000, "label_smoothing": 0.1},
    },
}
