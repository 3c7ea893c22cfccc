"""How much a run is: parameters, tokens and floating-point operations, exactly, as functions of the configuration.

Letters: L layers, h hidden size, a attention heads, g query groups, k = h g / a width of all keys (as of all values),
f width inside the MLP, m matrices of the MLP (3 with SwiGLU, otherwise 2), s sequence length, V padded vocabulary,
B global batch size.
All functions take a resolved configuration.
"""

from megascale.config.schema import ModelConfig, RunConfig

__all__ = [
    "flops_per_iteration",
    "num_micro_batches",
    "num_parameters",
    "num_parameters_per_rank",
    "num_query_groups",
    "num_query_key_value_features",
    "padded_vocab_size",
    "tokens_per_iteration",
    "tokens_per_run",
]


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Return the rows of the embedding: the vocabulary rounded up to a multiple, whatever the parallel layout."""
    return -(-vocab_size // multiple) * multiple


def num_query_groups(model: ModelConfig) -> int:
    """Return g; unless given, every head is a group of its own."""
    return model.num_query_groups or model.num_attention_heads


def num_query_key_value_features(model: ModelConfig) -> int:
    """Return h + 2k, the outputs of the fused projection of attention."""
    return model.hidden_size + 2 * (model.hidden_size // model.num_attention_heads) * num_query_groups(model)


def _num_mlp_matrices(model: ModelConfig) -> int:
    return 3 if model.activation == "swiglu" else 2


def num_parameters(config: RunConfig) -> int:
    """Return the parameters of the model, the padding of the vocabulary included.

    Of GPT-2 with f = 4h this is 12 L h^2 + 13 L h + (V + positions + 2) h. In general, per layer, h (h + 2k) for query,
    key and value, h^2 for the attention output, m h f for the MLP, two norms, and a bias for each output of these
    matrices; then the word embedding, the output layer if it has its own, learned positions, and the norm after the
    last pre-norm layer. A LayerNorm is 2h, an RMSNorm h.
    """
    return num_parameters_per_rank(config, tp=1)


def num_parameters_per_rank(config: RunConfig, tp: int | None = None, pp_rank: int | None = None) -> int:
    """Return the parameters that one rank holds when `tp` ranks (None: as configured) share each layer.

    Split over the ranks are the matrices of attention and MLP, the biases of the column-parallel ones, the word
    embedding and the output layer; every rank has all of the norms, the other biases and the position embedding.

    pp_rank: the pipeline rank whose layers are counted, None for all layers. The first holds the embeddings, the last
    the final norm and the output layer, which is a copy of the word embedding if it has no weight of its own.
    """
    model = config.model
    pp = 1 if pp_rank is None else config.parallel.pipeline_model_parallel_size
    is_first, is_last = pp_rank in (None, 0), pp_rank in (None, pp - 1)
    num_layers = model.num_layers // pp
    tp = config.parallel.tensor_model_parallel_size if tp is None else tp
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    has_bias = not model.disable_bias_linear
    vocabulary = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by)
    column_parallel_features = num_query_key_value_features(model) + (_num_mlp_matrices(model) - 1) * ffn
    has_own_head = model.untie_embeddings_and_output_weights
    tables = is_first + (is_last and (has_own_head or not is_first))
    split_per_layer = hidden * column_parallel_features + (hidden + ffn) * hidden + has_bias * column_parallel_features
    split = num_layers * split_per_layer + tables * vocabulary * hidden
    assert split % tp == 0, f"{split} split parameters over {tp} ranks: the constraints should have refused this"
    norm = hidden if model.normalization == "RMSNorm" else 2 * hidden
    replicated = num_layers * (2 * norm + has_bias * 2 * hidden)
    if is_first and model.position_embedding_type == "learned_absolute":
        replicated += model.max_position_embeddings * hidden
    if is_last and model.norm_position == "pre":
        replicated += norm
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

    Counted are the matrix products: per token and layer 2h (h + 2k) + 2h^2 + 2mhf for the linear layers (8h^2 + 4hf
    for GPT-2's) and 4sh for attention (not halved for causality), and 2hV for the logits. The backward pass costs twice
    the forward pass. Recomputation (None: as configured) costs one more forward pass, if full of the layers, if
    selective of the 4sh of attention. For GPT-2 with f = 4h and full recomputation this equals
    96 B s L h^2 (1 + s/(6h) + V/(16 L h)) of Narayanan et al. 2021 (arXiv:2104.04473).
    """
    model, seq_length = config.model, config.data.seq_length
    granularity = config.train.recompute_granularity if recompute_granularity is None else recompute_granularity
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    vocabulary = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by)
    attention_core = 4 * seq_length * hidden
    weights_per_layer = hidden * (num_query_key_value_features(model) + hidden + _num_mlp_matrices(model) * ffn)
    forward_per_layer = 2 * weights_per_layer + attention_core
    recomputed_per_layer = {"none": 0, "selective": attention_core, "full": forward_per_layer}[granularity]
    per_token = model.num_layers * (3 * forward_per_layer + recomputed_per_layer) + 3 * 2 * hidden * vocabulary
    return tokens_per_iteration(config) * per_token
