"""What --dry-run prints holds the numbers a person would work out by hand."""

import pytest

from megascale.config.describe import describe_run
from megascale.config.presets import PRESETS
from megascale.config.serialization import from_dict
from megascale.utils.errors import UserError
from tests.config.examples import small_run, with_fields


def test_the_papers_run_on_512_gpus():
    text = describe_run(from_dict(PRESETS["megatron-8.3b"]), 512)
    for expected in (
        "72 layers, hidden size 3072, 24 heads of 128",
        "vocabulary 50,257 padded to 51,200",
        "8,317,040,640 in total (8.317 B)",
        "512 ranks = 64 data-parallel replicas of 8 tensor-parallel ranks",
        "512 samples of 1024 tokens per step = 64 replicas x 1 micro-batch of 8",
        "524,288 per step, 157,286,400,000 (157.3 B) in 300,000 steps",
        "without recomputation",
    ):
        assert expected in text
    assert "511" in text.splitlines()[-1]
    assert len(text.splitlines()) < 25
    assert max(len(line) for line in text.splitlines()) <= 160


def test_a_single_process():
    text = describe_run(small_run(), 1)
    assert "1 rank = 1 data-parallel replica of 1 tensor-parallel rank\n" in text
    assert "dp 0     0" in text


def test_a_pipeline():
    changes = {"parallel__pipeline_model_parallel_size": 4, "model__num_layers": 24, "train__global_batch_size": 64}
    text = describe_run(with_fields(small_run(), **changes), 8)
    assert "8 ranks = 2 data-parallel replicas of 4 pipeline stages of 1 tensor-parallel rank\n" in text
    assert "4 stages of 6 layers (one run of layers per rank); idle 75% of the time" in text
    assert "pp 3 dp 1     7" in text
    # Per layer 12 h^2 + 13 h; the first stage has both embeddings.
    assert f"at most {6 * (12 * 48**2 + 13 * 48) + (1024 + 1024) * 48:,} per rank" in text
    text = describe_run(
        with_fields(small_run(), **changes, parallel__num_layers_per_virtual_pipeline_stage=2), world_size=8
    )
    assert "12 stages of 2 layers (interleaved, 3 runs of layers per rank); idle 25% of the time" in text


def test_flops_say_whether_recomputation_is_counted():
    for granularity in ("selective", "full"):
        text = describe_run(with_fields(small_run(), train__recompute_granularity=granularity), 1)
        assert f"with {granularity} recomputation" in text


def test_the_architecture_is_told():
    text = describe_run(from_dict(PRESETS["tinyllama-1.1b"]), 1)
    assert "32 heads of 64 in 4 query groups, MLP 5632" in text
    assert "pre-RMSNorm, swiglu, rotary positions, no bias, output layer of its own" in text
    assert "; pre-LayerNorm, gelu\n" in describe_run(small_run(), 1)


def test_an_invalid_run_is_not_described():
    with pytest.raises(UserError, match="--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3"):
        describe_run(with_fields(small_run(), parallel__tensor_model_parallel_size=3), 3)
