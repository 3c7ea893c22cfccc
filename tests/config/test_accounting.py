"""The sizes of a model, against the papers' tables and against lists of every tensor and every matrix product."""

import math
from dataclasses import replace

import pytest

from megascale.config.accounting import (
    flops_per_iteration,
    num_micro_batches,
    num_parameters,
    num_parameters_per_rank,
    padded_vocab_size,
    tokens_per_iteration,
    tokens_per_run,
)
from megascale.config.presets import PRESETS
from megascale.config.resolution import resolve
from megascale.config.schema import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megascale.config.serialization import from_dict


def _preset(name):
    config = from_dict(PRESETS[name])
    return resolve(config, world_size=config.parallel.tensor_model_parallel_size, tokenizer_vocab_size=None)


def _odd_model(tp=1):
    """Nothing here is a multiple of anything else, where it need not be."""
    return RunConfig(
        model=ModelConfig(
            num_layers=3,
            hidden_size=24,
            num_attention_heads=4,
            ffn_hidden_size=52,
            max_position_embeddings=19,
            vocab_size=101,
            make_vocab_size_divisible_by=12,
        ),
        parallel=ParallelConfig(tensor_model_parallel_size=tp),
        train=TrainConfig(global_batch_size=40, train_iters=7),
        data=replace(RunConfig().data, seq_length=17),
    )


def _tensors(config):
    """Yield (shape, whether tensor parallelism splits it) of every tensor of a GPT-2."""
    model = config.model
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    yield (padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by), hidden), True
    yield (model.max_position_embeddings, hidden), False
    for _ in range(model.num_layers):
        yield from [((hidden,), False)] * 4  # two layer norms
        yield from [((hidden, 3 * hidden), True), ((3 * hidden,), True), ((hidden, hidden), True), ((hidden,), False)]
        yield from [((hidden, ffn), True), ((ffn,), True), ((ffn, hidden), True), ((hidden,), False)]
    yield from [((hidden,), False)] * 2


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("megatron-355m", 0.3558),
        ("megatron-1.2b", 1.2135),
        ("megatron-2.5b", 2.4904),
        ("megatron-4.2b", 4.1991),
        ("megatron-8.3b", 8.3170),
    ],
)
def test_the_papers_models_have_the_papers_size(preset, billions):
    assert num_parameters(_preset(preset)) / 1e9 == pytest.approx(billions, abs=5e-5)


def test_the_closed_form_of_the_papers():
    config = _preset("megatron-8.3b")
    layers, hidden = config.model.num_layers, config.model.hidden_size
    assert num_parameters(config) == 12 * layers * hidden**2 + 13 * layers * hidden + (51200 + 1024 + 2) * hidden


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_parameters_are_those_of_the_list_of_tensors(tp):
    config = _odd_model(tp)
    assert num_parameters(config) == sum(math.prod(shape) for shape, _ in _tensors(config))
    expected = sum(math.prod(shape) // (tp if split else 1) for shape, split in _tensors(config))
    assert num_parameters_per_rank(config) == expected


def test_the_split_parameters_of_all_ranks_make_the_whole():
    config = _odd_model(tp=4)
    replicated = sum(math.prod(shape) for shape, split in _tensors(config) if not split)
    assert 4 * (num_parameters_per_rank(config) - replicated) + replicated == num_parameters(config)


def test_gpt2_vocabulary_is_padded_to_the_papers_51200():
    assert padded_vocab_size(50257, 1024) == 51200
    assert padded_vocab_size(51200, 1024) == 51200
    assert padded_vocab_size(1, 1024) == 1024


@pytest.mark.parametrize(
    ("preset", "flops"),
    [
        ("megatron-355m", 1.643e15),
        ("megatron-1.2b", 5.525e15),
        ("megatron-2.5b", 1.122e16),
        ("megatron-8.3b", 3.659e16),
    ],
)
def test_flops_of_a_step_of_512_with_recomputation(preset, flops):
    """F = 96 B s L h^2 (1 + s/6h + V/16Lh), evaluated for the paper's models."""
    config = _preset(preset)
    layers, hidden = config.model.num_layers, config.model.hidden_size
    formula = 96 * 512 * 1024 * layers * hidden**2 * (1 + 1024 / (6 * hidden) + 51200 / (16 * layers * hidden))
    assert flops_per_iteration(config, recompute_granularity="full") == pytest.approx(formula, rel=1e-12)
    assert formula == pytest.approx(flops, rel=5e-4)


def test_flops_are_those_of_the_list_of_matrix_products():
    config = _odd_model()
    model, seq_length, batch = config.model, config.data.seq_length, config.train.global_batch_size
    tokens, hidden, ffn = batch * seq_length, model.hidden_size, model.ffn_hidden_size
    head = hidden // model.num_attention_heads
    heads = batch * model.num_attention_heads
    layer = [(1, tokens, hidden, 3 * hidden), (1, tokens, hidden, hidden), (1, tokens, hidden, ffn)]
    layer += [(1, tokens, ffn, hidden), (heads, seq_length, head, seq_length), (heads, seq_length, seq_length, head)]
    logits = [(1, tokens, hidden, 108)]  # 101 padded to a multiple of 12

    def flops(products):
        return sum(2 * copies * rows * inner * columns for copies, rows, inner, columns in products)

    forward_and_backward = 3 * (model.num_layers * flops(layer) + flops(logits))
    assert flops_per_iteration(config, recompute_granularity="none") == forward_and_backward
    again = {"selective": model.num_layers * flops(layer[-2:]), "full": model.num_layers * flops(layer)}
    for granularity, repeated in again.items():
        assert flops_per_iteration(config, recompute_granularity=granularity) == forward_and_backward + repeated


def test_recomputation_is_read_from_the_configuration():
    config = _odd_model()
    assert flops_per_iteration(config) == flops_per_iteration(config, recompute_granularity="none")
    for granularity in ("selective", "full"):
        recomputing = replace(config, train=replace(config.train, recompute_granularity=granularity))
        assert flops_per_iteration(recomputing) == flops_per_iteration(config, recompute_granularity=granularity)


def test_tokens_and_micro_batches():
    config = _preset("megatron-8.3b")
    assert tokens_per_iteration(config) == 512 * 1024
    assert tokens_per_run(config) == 157_286_400_000  # 157.3 B, 4.38 epochs of the paper's corpus
    assert num_micro_batches(config, dp=64) == 1
    assert num_micro_batches(config, dp=1) == 64
