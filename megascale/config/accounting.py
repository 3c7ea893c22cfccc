"""How much a run is: parameters, tokens and floating-point operations, exactly, as functions of the configuration.

Letters: L layers, h hidden size, f width inside the MLP, s sequence length, V padded vocabulary, B global batch size.
All functions take a resolved configuration.
"""

from megascale.config.schema import RunConfig

__all__ = [
    "flops_per_iteration",
    "num_micro_batches",
    "num_parameters",
    "num_parameters_per_rank",
    "padded_vocab_size",
    "tokens_per_iteration",
    "tokens_per_run",
]


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Return the rows of the embedding: the vocabulary rounded up to a multiple, whatever the parallel layout."""
    return -(-vocab_size // multiple) * multiple


def num_parameters(config: RunConfig) -> int:
    """Return the parameters of the model, the padding of the vocabulary included.

    For f = 4h this is 12 L h^2 + 13 L h + (V + positions + 2) h: per layer 3h^2 + 3h for query, key and value, h^2 + h
    for the attention output, 2hf + f + h for the MLP and 4h for two layer norms; then the embeddings (the output layer
    shares the first) and the last layer norm.
    """
    return num_parameters_per_rank(config, tp=1)


def num_parameters_per_rank(config: RunConfig, tp: int | None = None) -> int:
    """Return the parameters that one rank holds when `tp` ranks (None: as configured) share the model.

    Split over the ranks are the matrices of attention and MLP, the biases of the column-parallel ones, and the word
    embedding; every rank has all of the layer norms, the other biases and the position embedding.
    """
    model = config.model
    tp = config.parallel.tensor_model_parallel_size if tp is None else tp
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    vocabulary = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by)
    split_per_layer = 4 * hidden * hidden + 3 * hidden + 2 * hidden * ffn + ffn
    replicated_per_layer = 2 * hidden + 4 * hidden
    split = model.num_layers * split_per_layer + vocabulary * hidden
    assert split % tp == 0, f"{split} split parameters over {tp} ranks: the constraints should have refused this"
    replicated = model.num_layers * replicated_per_layer + (model.max_position_embeddings + 2) * hidden
    return split // tp + replicated


def num_micro_batches(config: RunConfig, dp: int) -> int:
    """Return the forward passes of each of `dp` data-parallel ranks per step."""
    return config.train.global_batch_size // (config.train.micro_batch_size * dp)


def tokens_per_iteration(config: RunConfig) -> int:
    """Return the tokens of one step, all ranks together."""
    return config.train.global_batch_size * config.data.seq_length


def tokens_per_run(config: RunConfig) -> int:
    """Return the tokens of all steps of the run."""
    return tokens_per_iteration(config) * config.train.train_iters


def flops_per_iteration(config: RunConfig, recompute_granularity: str | None = None) -> int:
    """Return the floating-point operations of one step, all ranks together; a multiplication and an addition are two.

    Counted are the matrix products: per token and layer 8h^2 + 4hf for the linear layers and 4sh for attention (not
    halved for causality), and 2hV for the logits. The backward pass costs twice the forward pass. Recomputation (None:
    as configured) costs one more forward pass, if full of the layers, if selective of the 4sh of attention. With f = 4h
    and full recomputation this equals
    96 B s L h^2 (1 + s/(6h) + V/(16 L h)) of Narayanan et al. 2021 (arXiv:2104.04473).
    """
    model, seq_length = config.model, config.data.seq_length
    granularity = config.train.recompute_granularity if recompute_granularity is None else recompute_granularity
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    vocabulary = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by)
    attention_core = 4 * seq_length * hidden
    forward_per_layer = 8 * hidden * hidden + 4 * hidden * ffn + attention_core
    recomputed_per_layer = {"none": 0, "selective": attention_core, "full": forward_per_layer}[granularity]
    per_token = model.num_layers * (3 * forward_per_layer + recomputed_per_layer) + 3 * 2 * hidden * vocabulary
    return tokens_per_iteration(config) * per_token
