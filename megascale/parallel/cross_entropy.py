"""Cross-entropy over a vocabulary split over the tensor axis, with or without the vocabulary GEMM fused in.

Legend: n tokens, h hidden, v padded vocabulary, V true vocabulary, t tensor-parallel ranks.

With logits z [n, v/t] on each rank the ranks exchange, per token, its largest logit, its target's logit and its sum of
exponentials: 3 scalars where gathering the logits would move v of them (Shoeybi et al. 2019, section 3). Label
smoothing (epsilon > 0) adds a fourth, the sum of the logits. Columns V .. v-1 are padding and take no part.

    nll = log(sum exp(z - max)) + max - z[target]
    loss = (1 - epsilon) nll + epsilon (log(sum exp(z - max)) + max - sum(z) / V)
    dloss/dz_j = softmax(z)_j - (1 - epsilon) [j = target] - epsilon / V
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megascale.parallel.context import Axis

# The fused head works on as many token rows at a time as keep one chunk of float32 logits under this size. 128 MiB on a
# CPU, as benchmarks/fused_head.py measures it; 1 GiB on a GPU is a guess that nobody has measured yet.
_CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}


@dataclass(frozen=True)
class VocabularySlice:
    """The rows of the vocabulary that one rank of `axis` holds.

    Attributes:
        axis: The tensor axis.
        size: The true vocabulary size V; ids >= V are padding.
        num_rows: v/t, the rows per rank.
    """

    axis: Axis
    size: int
    num_rows: int

    @property
    def first_row(self) -> int:
        return self.axis.rank * self.num_rows

    @property
    def num_valid_rows(self) -> int:
        """How many of this rank's rows are true vocabulary; the rest, at the end, is padding."""
        return max(0, min(self.num_rows, self.size - self.first_row))


@dataclass(frozen=True)
class _Terms:
    """What the loss and its gradient need of one block of logits; all [n] but the last."""

    loss: torch.Tensor
    sum_exp: torch.Tensor
    local_target: torch.Tensor  # the target's column on this rank; 0 where it is not here
    target_is_here: torch.Tensor
    exponentials: torch.Tensor  # exp(z - max), [n, v/t]; the storage of the logits


def _loss_terms(z: torch.Tensor, targets: torch.Tensor, vocabulary: VocabularySlice, label_smoothing: float) -> _Terms:
    """Compute the losses [n] of logits z [n, v/t], overwriting z; 3 scalars per token (4 with smoothing) are sent."""
    axis = vocabulary.axis
    z[:, vocabulary.num_valid_rows :] = float("-inf")
    largest = z.amax(dim=-1)
    axis.all_reduce_(largest, dist.ReduceOp.MAX)
    z -= largest.unsqueeze(-1)
    local_target = targets - vocabulary.first_row
    target_is_here = (local_target >= 0) & (local_target < vocabulary.num_rows)
    local_target = local_target.masked_fill(~target_is_here, 0)
    target_logit = z.gather(-1, local_target.unsqueeze(-1)).squeeze(-1).masked_fill(~target_is_here, 0.0)
    sums = [target_logit]
    if label_smoothing:
        sums.append(z[:, : vocabulary.num_valid_rows].sum(dim=-1))
    z.exp_()
    # No rank has the target's logit, which would pass for 0: make loss and gradient nan instead.
    is_foreign = (targets < 0) | (targets >= vocabulary.size)
    sums.append(z.sum(dim=-1).masked_fill(is_foreign, float("nan")))
    # One all-reduce for all the sums: the same scalars per token, fewer messages.
    stacked = torch.stack(sums)
    axis.all_reduce_(stacked)
    log_sum_exp = stacked[-1].log()
    loss = log_sum_exp - stacked[0]
    if label_smoothing:
        uniform = log_sum_exp - stacked[1] / vocabulary.size
        loss = (1.0 - label_smoothing) * loss + label_smoothing * uniform
    return _Terms(loss, stacked[-1], local_target, target_is_here, z)


def _logit_gradient(
    terms: _Terms, token_gradients: torch.Tensor, vocabulary: VocabularySlice, label_smoothing: float
) -> torch.Tensor:
    """Return dloss/dz [n, v/t] times the tokens' gradients [n], in place of the exponentials."""
    gradient = terms.exponentials.mul_((token_gradients / terms.sum_exp).unsqueeze(-1))
    at_target = (token_gradients * terms.target_is_here).unsqueeze(-1)
    gradient.scatter_add_(-1, terms.local_target.unsqueeze(-1), at_target * -(1.0 - label_smoothing))
    if label_smoothing:
        everywhere = token_gradients * (label_smoothing / vocabulary.size)
        gradient[:, : vocabulary.num_valid_rows] -= everywhere.unsqueeze(-1)
    return gradient


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, vocabulary: VocabularySlice, label_smoothing: float
    ) -> torch.Tensor:
        z = _float32_or_wider(logits.reshape(-1, logits.shape[-1]), copy=True)
        terms = _loss_terms(z, targets.reshape(-1), vocabulary, label_smoothing)
        ctx.terms, ctx.vocabulary, ctx.label_smoothing = terms, vocabulary, label_smoothing
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return terms.loss.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        assert ctx.terms is not None, "the loss can be differentiated once: its backward reuses the logits' storage"
        terms, ctx.terms = ctx.terms, None
        gradient = _logit_gradient(terms, gradients[0].reshape(-1), ctx.vocabulary, ctx.label_smoothing)
        return gradient.view(ctx.shape).to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, vocabulary: VocabularySlice, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return each token's loss in nats, float32 or wider.

    logits [.., v/t] split on the last dim, targets [..] replicated -> losses [..] replicated

    Computed in float32 for half-precision logits. The result can be differentiated once. The loss and gradient of a
    target outside the true vocabulary are nan.
    """
    return _VocabParallelCrossEntropy.apply(logits, targets, vocabulary, label_smoothing)


class _LinearCrossEntropy(torch.autograd.Function):
    """The vocabulary GEMM and the loss in chunks of token rows, with both gradients computed in the same pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        token_weights: torch.Tensor,
        vocabulary: VocabularySlice,
        label_smoothing: float,
        gradient_scale: float,
        wants_gradient: bool,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if wants_gradient else None
        # Sums over chunks are kept in float32 for half-precision weights.
        weight_gradient = _float32_or_wider(torch.zeros_like(weight)) if wants_gradient else None
        rows = max(1, _CHUNK_BYTES[hidden.device.type] // (4 * weight.shape[0]))
        for start in range(0, hidden.shape[0], rows):
            x = hidden[start : start + rows]
            w = token_weights[start : start + rows]
            z = _float32_or_wider(x @ weight.t())
            terms = _loss_terms(z, targets[start : start + rows], vocabulary, label_smoothing)
            total += (terms.loss * w).sum(dtype=torch.float64)
            if hidden_gradient is not None and weight_gradient is not None:
                dz = _logit_gradient(terms, w.to(terms.loss.dtype) * gradient_scale, vocabulary, label_smoothing)
                dz = dz.to(weight.dtype)
                torch.mm(dz, weight, out=hidden_gradient[start : start + rows])
                if weight.dtype == weight_gradient.dtype:
                    weight_gradient.addmm_(dz.t(), x)
                else:
                    weight_gradient += dz.t() @ x
        if hidden_gradient is not None and weight_gradient is not None:
            ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight.dtype))
            ctx.gradient_scale = gradient_scale
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        factor = (gradients[0] / ctx.gradient_scale).to(hidden_gradient.dtype)
        return hidden_gradient * factor, weight_gradient * factor, None, None, None, None, None, None


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    token_weights: torch.Tensor,
    vocabulary: VocabularySlice,
    label_smoothing: float = 0.0,
    gradient_scale: float = 1.0,
) -> torch.Tensor:
    """Return the weighted sum of the tokens' losses under logits = hidden weight^T, which never exist as a whole.

    hidden [n, h] replicated, weight [v/t, h] split on dim 0, targets, token_weights [n] -> scalar float64, replicated

    A target outside the true vocabulary makes the result and the gradients nan, even if its weight is 0.

    The gradient of `hidden` is this rank's part only: the caller enters through f (`copy_to_ranks`), whose backward
    pass sums the parts.

    Args:
        token_weights: What each token's loss counts: 0 leaves a token out.
        gradient_scale: The factor by which the caller will multiply the result before calling backward (loss scale over
            token count). Gradients are computed with it in float32 before they are rounded to the weight's dtype, so
            that small ones survive in float16. Any other factor still gives the right gradient, as far as its ratio to
            this one fits the weight's dtype.
    """
    # Asked here: inside an autograd function gradients are always off.
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(
        hidden, weight, targets, token_weights, vocabulary, label_smoothing, gradient_scale, wants_gradient
    )


def _float32_or_wider(x: torch.Tensor, copy: bool = False) -> torch.Tensor:
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32, copy=copy)
