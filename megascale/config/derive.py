"""The values that follow from others when they are not given.

`derive` fills in what it can and judges nothing; `resolve`, in resolution.py, checks the result as well.
"""

from dataclasses import replace
from typing import Any

from megascale.config.loss_scale import fill_loss_scale
from megascale.config.schema import RunConfig, TrainConfig

__all__ = ["derive"]


def derive(config: RunConfig, world_size: int, tokenizer_vocab_size: int | None = None) -> RunConfig:
    """Return `config` with every None filled in that follows from other values; the rest stays None.

    What is derived from the launch is either a property of the training (the global batch size, which must stay what
    it was if the run goes on with another number of processes) or is left out: `world_size` is never filled in.
    """
    model, data, train, schedule = config.model, config.data, config.train, config.schedule
    if model.hidden_size is not None:
        model = _fill(model, "ffn_hidden_size", _ffn_hidden_size(model.hidden_size, model.activation))
    model = _fill(model, "num_query_groups", model.num_attention_heads)
    model = _fill(model, "max_position_embeddings", data.seq_length)
    model = _fill(model, "vocab_size", tokenizer_vocab_size)
    data = _fill(data, "tokenizer_type", _tokenizer_type_of_files(config))
    ranks_per_model = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    if ranks_per_model > 0 and world_size % ranks_per_model == 0:
        train = _fill(train, "global_batch_size", train.micro_batch_size * (world_size // ranks_per_model))
    train = _fill_precision(train)
    schedule = _fill(schedule, "lr_decay_iters", train.train_iters)
    return replace(config, model=model, data=data, train=train, schedule=schedule)


def _fill(section: Any, name: str, value: object) -> Any:
    return section if getattr(section, name) is not None else replace(section, **{name: value})


def _fill_precision(train: TrainConfig) -> TrainConfig:
    train = _fill(train, "accumulate_allreduce_grads_in_fp32", train.bf16)
    if train.fp16 or train.bf16:
        wide = train.accumulate_allreduce_grads_in_fp32
        train = _fill(train, "grad_reduce_dtype", "float32" if wide else "half")
    return fill_loss_scale(train)


def _ffn_hidden_size(hidden_size: int, activation: str) -> int:
    """Return 4h, or for the three matrices of SwiGLU as many parameters (Shazeer 2020, arXiv:2002.05202, section 2).

    8h/3 is rounded up to a multiple of 64, so that any usual tensor-parallel size divides it.
    """
    return 4 * hidden_size if activation != "swiglu" else -(-8 * hidden_size // (3 * 64)) * 64


def _tokenizer_type_of_files(config: RunConfig) -> str | None:
    """Return the tokenizer whose files are given, None when none are or when they belong to two kinds."""
    byte_pair_files = bool(config.data.vocab_file or config.data.merge_file)
    if byte_pair_files == bool(config.data.tokenizer_model):
        return None
    return "GPT2BPETokenizer" if byte_pair_files else "HuggingFaceTokenizer"
