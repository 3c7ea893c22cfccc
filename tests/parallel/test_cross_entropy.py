"""The vocabulary-parallel loss against torch's own, in float64: values, gradients, and what crosses the wire.

The vocabulary has 37 tokens padded to 64, so that over four ranks the third holds 5 tokens and 11 rows of padding, and
the fourth nothing but padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megascale.config.layout import ParallelLayout
from megascale.parallel import cross_entropy
from megascale.parallel.collectives import copy_to_ranks
from megascale.parallel.context import Axis, ParallelContext, single_process
from megascale.parallel.cross_entropy import VocabularySlice, linear_cross_entropy, vocab_parallel_cross_entropy
from tests.full import difference, gradient_of

EXACT = 1e-12
VOCAB, PADDED, HIDDEN, TOKENS = 37, 64, 6, 11


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _targets() -> torch.Tensor:
    """Tokens of every rank's part, the first and the last token included."""
    return torch.tensor([0, 36, 15, 16, 31, 32, 7, 36, 20, 0, 33])


def _vocabulary(context: ParallelContext) -> VocabularySlice:
    return VocabularySlice(context.tp, VOCAB, PADDED // context.tp.size)


def _compare_loss(
    context: ParallelContext, smoothing: float, scale: float, vocabulary: VocabularySlice | None = None
) -> tuple[float, float, float]:
    """Return the differences of the losses and of the logits' gradient, and the gradient's size in the padding."""
    logits = _random(TOKENS, PADDED, seed=1) * scale
    # Were padding to count, this would be the likeliest token.
    logits[:, VOCAB:] = 10 * scale
    targets, cotangent = _targets(), _random(TOKENS, seed=2)
    expected_logits = logits.clone().requires_grad_()
    expected = F.cross_entropy(expected_logits[:, :VOCAB], targets, reduction="none", label_smoothing=smoothing)
    expected.backward(cotangent)
    mine = context.tp.shard(logits, -1).clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(mine, targets, vocabulary or _vocabulary(context), smoothing)
    losses.backward(cotangent)
    gradient = context.tp.all_gather(gradient_of(mine), -1)
    return (
        difference(losses.detach(), expected.detach()),
        difference(gradient, expected_logits.grad),
        gradient[:, VOCAB:].abs().max().item(),
    )


def _losses_at_all_settings(context: ParallelContext) -> list[tuple[float, float, float]]:
    return [_compare_loss(context, smoothing, scale) for smoothing in (0.0, 0.1) for scale in (1.0, 1000.0)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_loss_equals_torchs_with_huge_logits_smoothing_and_padding(ranks, tp: int) -> None:
    for settings in ranks(ParallelLayout(tp=tp), _losses_at_all_settings):
        for loss, gradient, padding in settings:
            assert loss < EXACT
            assert gradient < EXACT
            assert padding == 0.0


def _no_largest(logits: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.zeros(logits.shape[0], dtype=logits.dtype)


def _without_max(all_reduce: Callable) -> Callable:
    def all_reduce_sums(self: object, x: torch.Tensor, *op: object) -> None:
        if not op:
            all_reduce(self, x)

    return all_reduce_sums


def _compare_loss_with(context: ParallelContext, bug: str) -> tuple[float, float]:
    axis, vocabulary = context.tp, _vocabulary(context)
    patch: Any
    if bug == "largest logit not subtracted":
        patch = mock.patch.object(torch.Tensor, "amax", _no_largest)
    elif bug == "largest logit of this rank only":
        patch = mock.patch.object(Axis, "all_reduce_", _without_max(Axis.all_reduce_))
    else:
        # The size is the padded one: everywhere, or in the share that smoothing gives each token.
        valid_rows: Any = vocabulary.num_rows if bug == "padding counts" else vocabulary.num_valid_rows
        patch = mock.patch.object(VocabularySlice, "num_valid_rows", valid_rows)
        vocabulary = VocabularySlice(axis, PADDED, vocabulary.num_rows)
    with patch:
        return _compare_loss(context, 0.1, 1000.0, vocabulary)[:2]


@pytest.mark.parametrize(
    "bug",
    [
        "padding counts",
        "largest logit not subtracted",
        "largest logit of this rank only",
        "smoothed over the padded vocabulary",
    ],
)
def test_the_comparison_notices(ranks, bug: str) -> None:
    for loss, gradient in ranks(ParallelLayout(tp=4), _compare_loss_with, bug):
        assert not loss < 1e-6, "neither a small difference nor a nan is one"
        assert not gradient < 1e-6


def _compare_head(
    context: ParallelContext, smoothing: float, rows: int, gradient_scale: float, final_scale: float
) -> dict[str, float]:
    """Compare the fused head with logits that exist, for `rows` token rows per chunk."""
    axis = context.tp
    hidden, weight, targets = _random(TOKENS, HIDDEN, seed=3), _random(PADDED, HIDDEN, seed=4), _targets()
    token_weights = torch.tensor([1.0, 0, 1, 0.5, 1, 1, 0, 1, 1, 2, 1])
    expected_hidden, expected_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    losses = F.cross_entropy(
        (expected_hidden @ expected_weight.t())[:, :VOCAB], targets, reduction="none", label_smoothing=smoothing
    )
    expected = (losses * token_weights.double()).sum()
    (expected * final_scale).backward()
    given, mine = hidden.clone().requires_grad_(), axis.shard(weight, 0).clone().requires_grad_()
    chunk_bytes = rows * 4 * mine.shape[0]
    with mock.patch.dict(cross_entropy._CHUNK_BYTES, {"cpu": chunk_bytes}), context.recording() as records:
        total = linear_cross_entropy(
            copy_to_ranks(given, axis), mine, targets, token_weights, _vocabulary(context), smoothing, gradient_scale
        )
        (total * final_scale).backward()
    num_chunks = -(-TOKENS // rows)
    assert axis.size == 1 or len(records) == 2 * num_chunks + 1, "two messages per chunk and f"
    return {
        "loss": difference(total.detach(), expected.detach()),
        "hidden": difference(given.grad, expected_hidden.grad),
        "weight": difference(axis.all_gather(gradient_of(mine), 0), expected_weight.grad),
        "unweighted token": gradient_of(given)[1].abs().max().item(),
    }


def _head_at_all_settings(context: ParallelContext) -> list[dict[str, float]]:
    return [
        _compare_head(context, smoothing, rows, *scales)
        for smoothing in (0.0, 0.1)
        for rows in (1, 4, TOKENS, 100)
        for scales in ((1.0, 1.0), (8.0, 8.0), (0.3, 7.0))
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_fused_head_equals_logits_that_exist(ranks, tp: int) -> None:
    for settings in ranks(ParallelLayout(tp=tp), _head_at_all_settings):
        for differences in settings:
            assert max(differences.values()) < EXACT, differences


def _check_head_numerically(context: ParallelContext, bug: bool) -> bool:
    """gradcheck of the hidden states, which all ranks perturb together."""
    axis = context.tp
    weight = axis.shard(_random(PADDED, HIDDEN, seed=4), 0)
    token_weights = torch.tensor([1.0, 0.0, 0.5])

    def head(hidden: torch.Tensor) -> torch.Tensor:
        entered = hidden if bug else copy_to_ranks(hidden, axis)
        return linear_cross_entropy(entered, weight, _targets()[:3], token_weights, _vocabulary(context), 0.1)

    return torch.autograd.gradcheck(head, (_random(3, HIDDEN, seed=3).requires_grad_(),), raise_exception=False)


def test_finite_differences_agree_with_the_fused_head(ranks) -> None:
    assert ranks(ParallelLayout(tp=2), _check_head_numerically, False) == [True, True]
    assert ranks(ParallelLayout(tp=2), _check_head_numerically, True) == [False, False], "without f"


def _check_loss_numerically(context: ParallelContext) -> float:
    """A directional derivative of the unfused loss; gradcheck would differentiate one graph several times."""
    axis = context.tp
    logits, direction = (axis.shard(_random(TOKENS, PADDED, seed=seed), -1).clone() for seed in (1, 8))

    def loss(step: float) -> torch.Tensor:
        return vocab_parallel_cross_entropy(logits + step * direction, _targets(), _vocabulary(context), 0.1).sum()

    numeric = (loss(1e-5) - loss(-1e-5)).item() / 2e-5
    logits.requires_grad_()
    loss(0.0).backward()
    analytic = axis.sum_floats([(gradient_of(logits) * direction).sum().item()])[0]
    return abs(analytic - numeric) / abs(numeric)


def test_finite_differences_agree_with_the_loss(ranks) -> None:
    assert max(ranks(ParallelLayout(tp=4), _check_loss_numerically)) < 1e-8


def test_the_loss_cannot_be_differentiated_twice_by_mistake() -> None:
    context = single_process()
    logits = _random(TOKENS, PADDED, seed=1).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, _targets(), _vocabulary(context)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="differentiated once"):
        loss.backward()


def _foreign_targets(context: ParallelContext) -> tuple[list[bool], list[bool], bool]:
    """Which tokens' losses and gradients are nan when every second target is outside the vocabulary."""
    foreign = torch.tensor([0, -1, 36, 37, 5, -100, 6, 63, 7, 64, 8])
    mine = context.tp.shard(_random(TOKENS, PADDED, seed=1), -1).clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(mine, foreign, _vocabulary(context), 0.1)
    losses.sum().backward()
    hidden, weight = _random(TOKENS, HIDDEN, seed=3), context.tp.shard(_random(PADDED, HIDDEN, seed=4), 0)
    no_weights = torch.zeros(TOKENS)
    total = linear_cross_entropy(hidden, weight, foreign, no_weights, _vocabulary(context))
    return losses.isnan().tolist(), gradient_of(mine).isnan().any(-1).tolist(), bool(total.isnan())


@pytest.mark.parametrize("tp", [1, 4])
def test_a_target_outside_the_vocabulary_is_not_passed_over(ranks, tp: int) -> None:
    odd = [index % 2 == 1 for index in range(TOKENS)]
    for losses, gradients, total in ranks(ParallelLayout(tp=tp), _foreign_targets):
        assert losses == gradients == odd
        assert total


def _half_gradients(context: ParallelContext, dtype: torch.dtype, factor: float) -> tuple[float, float]:
    """Compare the gradient of the loss times `factor` with float64 from the same half-precision inputs."""
    axis = context.tp
    hidden, weight = (_random(n, HIDDEN, seed=seed).to(dtype) for n, seed in ((TOKENS, 3), (PADDED, 4)))
    expected_hidden, expected_weight = (x.double().requires_grad_() for x in (hidden, weight))
    losses = F.cross_entropy((expected_hidden @ expected_weight.t())[:, :VOCAB], _targets(), reduction="sum")
    losses.backward()
    given, mine = hidden.clone().requires_grad_(), axis.shard(weight, 0).clone().requires_grad_()
    total = linear_cross_entropy(
        copy_to_ranks(given, axis), mine, _targets(), torch.ones(TOKENS), _vocabulary(context), 0.0, factor
    )
    (total * factor).backward()
    assert gradient_of(given).dtype == gradient_of(mine).dtype == dtype
    assert total.dtype == torch.float64
    return (
        difference(gradient_of(given).double() / factor, expected_hidden.grad),
        difference(axis.all_gather(gradient_of(mine), 0).double() / factor, expected_weight.grad),
    )


def test_half_precision_gradients_are_scaled_before_they_are_rounded(ranks) -> None:
    # A mean over 10^8 tokens; with the loss scale, and without.
    layout, scaled, unscaled = ParallelLayout(tp=2), 2.0**20 * 1e-8, 1e-8
    for hidden, weight in ranks(layout, _half_gradients, torch.float16, scaled):
        assert hidden < 5e-3
        assert weight < 5e-3
    for hidden, weight in ranks(layout, _half_gradients, torch.bfloat16, unscaled):
        assert hidden < 3e-2
        assert weight < 3e-2
    # All are below float16's smallest subnormal, 6e-8.
    assert ranks(layout, _half_gradients, torch.float16, unscaled) == [(1.0, 1.0)] * 2


def test_many_chunks_of_bfloat16_add_up() -> None:
    """600 equal terms, one per chunk: a sum kept in bfloat16 would stall at 256 of them."""
    context, tokens = single_process(), 600
    hidden = _random(1, HIDDEN, seed=3).bfloat16().expand(tokens, -1)
    weight = _random(PADDED, HIDDEN, seed=4).bfloat16().requires_grad_()
    expected_weight = weight.detach().double().requires_grad_()
    targets = torch.full((tokens,), 7)
    F.cross_entropy((hidden.double() @ expected_weight.t())[:, :VOCAB], targets, reduction="sum").backward()
    with mock.patch.dict(cross_entropy._CHUNK_BYTES, {"cpu": 4 * PADDED}):
        linear_cross_entropy(hidden, weight, targets, torch.ones(tokens), _vocabulary(context)).backward()
    assert difference(gradient_of(weight).double(), expected_weight.grad) < 1e-2


def _bytes_moved(context: ParallelContext, smoothing: float) -> tuple[int, int]:
    logits = context.tp.shard(_random(TOKENS, PADDED, seed=1).float(), -1).clone().requires_grad_()
    with context.recording() as records:
        vocab_parallel_cross_entropy(logits, _targets(), _vocabulary(context), smoothing).sum().backward()
    with context.recording() as gathering:
        context.tp.all_gather(logits.detach(), -1)
    return sum(r.num_bytes for r in records), context.tp.size * sum(r.num_bytes for r in gathering)


def test_three_scalars_per_token_cross_the_wire(ranks) -> None:
    layout = ParallelLayout(tp=2)
    assert ranks(layout, _bytes_moved, 0.0) == [(3 * TOKENS * 4, PADDED * TOKENS * 4)] * 2
    assert ranks(layout, _bytes_moved, 0.1) == [(4 * TOKENS * 4, PADDED * TOKENS * 4)] * 2
    assert ranks(ParallelLayout(tp=1), _bytes_moved, 0.1) == [(0, 0)]


@pytest.mark.parametrize("grad", [True, False])
def test_evaluation_does_one_gemm_and_training_three(grad: bool) -> None:
    context = single_process()
    hidden, weight = _random(TOKENS, HIDDEN, seed=3).requires_grad_(), _random(PADDED, HIDDEN, seed=4).requires_grad_()
    token_weights = torch.ones(TOKENS)
    with torch.set_grad_enabled(grad), torch.profiler.profile() as profile:
        total = linear_cross_entropy(hidden, weight, _targets(), token_weights, _vocabulary(context))
    gemms = sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm_"))
    assert gemms == (3 if grad else 1)
    assert total.requires_grad == grad


def test_the_slices_of_the_vocabulary_cover_it_once(ranks) -> None:
    slices = ranks(ParallelLayout(tp=4), _rows)
    assert slices == [(0, 16), (16, 16), (32, 5), (48, 0)]


def _rows(context: ParallelContext) -> tuple[int, int]:
    vocabulary = _vocabulary(context)
    return vocabulary.first_row, vocabulary.num_valid_rows
