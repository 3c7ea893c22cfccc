"""What a run would be, as text for people: --dry-run prints it."""

from megascale.config.accounting import (
    flops_per_iteration,
    num_micro_batches,
    num_parameters,
    num_parameters_per_rank,
    num_query_groups,
    padded_vocab_size,
    tokens_per_iteration,
    tokens_per_run,
)
from megascale.config.layout import ParallelLayout
from megascale.config.pipeline import bubble_fraction, num_chunks
from megascale.config.resolution import resolve
from megascale.config.schema import RunConfig

__all__ = ["describe_run"]


def describe_run(config: RunConfig, world_size: int) -> str:
    """Return the sizes of a run on `world_size` processes and who would sit where.

    Raises:
        UserError: a rule is broken, or the size of the vocabulary is not known.
    """
    config = resolve(config, world_size)
    parallel = config.parallel
    layout = ParallelLayout.of_world(
        world_size, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    )
    lines = [("model", _model(config)), ("parameters", _parameters(config, layout)), ("layout", _layout(layout))]
    lines += [("pipeline", _pipeline(config, layout))] if layout.pp > 1 else []
    lines += [("batch", _batch(config, layout)), ("tokens", _tokens(config)), ("FLOPs", _flops(config, layout))]
    text = "\n".join(f"{title:<12}{content}" for title, content in lines)
    stage = ", pp: stage of its layers" if layout.pp > 1 else ""
    return f"{text}\n\nrank map (tp: slice of each layer, dp: replica of the model{stage})\n{layout.rank_table()}"


def _model(config: RunConfig) -> str:
    model = config.model
    padded = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by)
    name = f"{model.preset}: " if model.preset else ""
    groups = num_query_groups(model)
    shared = f" in {groups} query groups" if groups < model.num_attention_heads else ""
    kinds = [f"{model.norm_position}-{model.normalization}", model.activation]
    kinds += ["rotary positions"] if model.position_embedding_type == "rope" else []
    kinds += ["no bias"] if model.disable_bias_linear else []
    kinds += ["output layer of its own"] if model.untie_embeddings_and_output_weights else []
    return (
        f"{name}{model.num_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads of "
        f"{model.hidden_size // model.num_attention_heads}{shared}, MLP {model.ffn_hidden_size}, "
        f"{model.max_position_embeddings} positions, vocabulary {model.vocab_size:,} padded to {padded:,}; "
        f"{', '.join(kinds)}"
    )


def _parameters(config: RunConfig, layout: ParallelLayout) -> str:
    total = num_parameters(config)
    if layout.pp == 1:
        per_rank = num_parameters_per_rank(config)
        return f"{total:,} in total ({_scaled(total)}), {per_rank:,} per rank ({_scaled(per_rank)}) at tp={layout.tp}"
    most = max(num_parameters_per_rank(config, pp_rank=pp_rank) for pp_rank in (0, 1, layout.pp - 1))
    return (
        f"{total:,} in total ({_scaled(total)}), at most {most:,} per rank ({_scaled(most)}) at tp={layout.tp}, "
        f"pp={layout.pp}"
    )


def _layout(layout: ParallelLayout) -> str:
    replicas, ranks = _count(layout.dp, "data-parallel replica"), _count(layout.tp, "tensor-parallel rank")
    stages = f"{_count(layout.pp, 'pipeline stage')} of " if layout.pp > 1 else ""
    return f"{_count(layout.world_size, 'rank')} = {replicas} of {stages}{ranks}"


def _pipeline(config: RunConfig, layout: ParallelLayout) -> str:
    chunks, micro_batches = num_chunks(config), num_micro_batches(config, layout.dp)
    bubble = bubble_fraction(layout.pp, chunks, micro_batches)
    interleaved = f"interleaved, {chunks} runs of layers per rank" if chunks > 1 else "one run of layers per rank"
    return (
        f"{layout.pp * chunks} stages of {_count(config.model.num_layers // (layout.pp * chunks), 'layer')} "
        f"({interleaved}); idle {100 * bubble:.3g}% of the time that a step computes"
    )


def _batch(config: RunConfig, layout: ParallelLayout) -> str:
    train = config.train
    replicas = _count(layout.dp, "replica")
    micro_batches = _count(num_micro_batches(config, layout.dp), "micro-batch", "micro-batches")
    return (
        f"{_count(train.global_batch_size, 'sample')} of {config.data.seq_length} tokens per step = {replicas} x "
        f"{micro_batches} of {train.micro_batch_size}"
    )


def _tokens(config: RunConfig) -> str:
    total, per_step = tokens_per_run(config), tokens_per_iteration(config)
    return f"{per_step:,} per step, {total:,} ({_scaled(total)}) in {_count(config.train.train_iters, 'step')}"


def _flops(config: RunConfig, layout: ParallelLayout) -> str:
    per_step = flops_per_iteration(config)
    granularity = config.train.recompute_granularity
    recompute = "without" if granularity == "none" else f"with {granularity}"
    return (
        f"{per_step:.4g} per step {recompute} recomputation, {per_step / layout.world_size:.4g} of them per rank; "
        f"{per_step * config.train.train_iters:.4g} in the run"
    )


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _scaled(count: int) -> str:
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return str(count)
