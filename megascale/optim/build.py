"""The optimizer of a run: flat gradients, precision, clipping and AdamW behind one `step`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from megascale.config.schema import RunConfig
from megascale.optim.adam import build_adam
from megascale.optim.distributed import OverlappedGathering, ParameterGathering, own_stretches
from megascale.optim.flat import FlatLayout, Shard
from megascale.optim.gradients import GradientNorm, build_gradients, sum_partial_gradients, sum_shared_gradients
from megascale.optim.precision import LossScaler, NumericTypes
from megascale.optim.reduction import BucketSum, GradientReducer, OverlappedReducer
from megascale.optim.schedule import learning_rate
from megascale.optim.weights import build_weights
from megascale.parallel.context import Axis
from megascale.parallel.sharding import DeclaredParameter, declared_parameters

# Keeps the clipping coefficient finite at a zero gradient (Megatron-LM's constant).
_CLIP_EPSILON = 1e-6


class NonFiniteGradients(RuntimeError):
    """The gradients hold an inf or a nan that no loss scale explains."""


@dataclass(frozen=True)
class StepResult:
    """What one update did.

    Attributes:
        grad_norm: Norm of the whole model's gradient before clipping; inf or nan when the step was skipped.
        lr: The learning rate it ran at (would have run at, when skipped).
        skipped: Whether float16 overflowed, so that nothing changed but the loss scale.
    """

    grad_norm: float
    lr: float
    skipped: bool


class StateSlice(NamedTuple):
    """A box of one logical tensor of the state, on this rank.

    Attributes:
        name: Of the logical tensor.
        global_shape: Its whole shape, whatever the layout.
        offset: Where the box starts in it.
        data: The box; writing into it changes the state (then call `loaded`).
        counts: Whether this rank's is the one to save, of several ranks that hold the same box.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: torch.Tensor
    counts: bool


class ModelOptimizer:
    """Updates a model from the gradients that its backward passes accumulate.

    Args:
        model: The rank's model, initialised. In half precision its parameters are replaced here by rounded ones.
        config: A resolved configuration.
        tp, dp: The axes to take the norm and reduce the gradients over.
        pp: The pipeline of stages that the norm is taken over as well; None: the model is one stage.

    Attributes:
        num_updates: Updates made so far; the learning rate follows it. Skipped steps do not count.
        scaler: Its `scale` multiplies the loss before the backward pass.
        gradients: The flat gradients.
        weights: What AdamW updates: parameters or masters, whole or the runs that are this rank's.
    """

    def __init__(self, model: nn.Module, config: RunConfig, tp: Axis, dp: Axis, pp: Axis | None = None) -> None:
        self._config = config
        self._tp, self._dp = tp, dp
        parallel = config.parallel
        declared = declared_parameters(model)
        types = NumericTypes.of(config.train, declared[0].parameter.dtype)
        self._is_sharded = parallel.use_distributed_optimizer and dp.size > 1
        layout = FlatLayout(declared, dp.size if self._is_sharded else 1)
        in_buckets = parallel.overlap_grad_reduce or parallel.overlap_param_gather
        bucket_bytes = int(parallel.bucket_cap_mb * 2**20)
        buckets = layout.cut(bucket_bytes // types.reduction.itemsize if in_buckets else layout.size)
        # Without sharding the rank updates everything, however it is sent.
        stretches = own_stretches(buckets, dp) if self._is_sharded else [slice(0, layout.size)]
        self._shard = Shard(layout, stretches)
        self._updated, parameters = build_weights(self._shard, types.parameters, types.has_masters, self._is_sharded)
        self._updated.write_back()
        self.gradients = build_gradients(layout, types.gradients)
        self._updated.attach(self.gradients)
        self.weights = self._updated.tensors
        reducer = OverlappedReducer if parallel.overlap_grad_reduce else GradientReducer
        self._reducer = reducer(self.gradients, buckets, BucketSum(dp, self._is_sharded, types.reduction))
        if parallel.overlap_param_gather and self._is_sharded:
            assert parameters is not None
            self._gathering: ParameterGathering = OverlappedGathering(parameters, buckets, dp, layout, model)
        else:
            self._gathering = ParameterGathering(parameters, buckets if self._is_sharded else [], dp)
        axes = [axis for axis in (tp, dp if self._is_sharded else None, pp) if axis is not None]
        self._norm = GradientNorm(self._shard, self._counts, axes)
        decays = [piece.declared.spec.decay for piece in self._shard.pieces]
        self._adam = build_adam(self.weights, decays, config.optimizer)
        self.scaler = LossScaler(config.train)
        self.num_updates = 0

    def describe(self) -> str:
        """Return what updates the weights, in which precision and by whom, as a line of text."""
        types = NumericTypes.of(self._config.train, self.weights[0].dtype)
        shared = f", shared by {self._dp.size} ranks" if self._is_sharded else ""
        return (
            f"{self._adam.name} on {_name(self.weights[0].dtype)} weights{shared}; gradients added up in "
            f"{_name(self.gradients.flat.dtype)}, sent in {_name(types.reduction)}"
        )

    def zero_gradients(self) -> None:
        self._reducer.settle()
        self.gradients.zero_()

    def expect_last_backward(self) -> None:
        """Take note that the next backward pass is the update's last: gradients are final as it leaves them."""
        self._reducer.expect_last_backward()

    def step(self, normaliser: float) -> StepResult:
        """Make the gradients whole over all ranks that hold a part of them, clip them and update the weights.

        Args:
            normaliser: What the summed gradients are multiplied with, the loss scale apart: see `train.trainer`.

        Raises:
            NonFiniteGradients: Not float16 with a dynamic scale, or that scale is at its minimum.
        """
        sum_partial_gradients(self.gradients, self._tp)
        self._reducer.finish()
        sum_shared_gradients(self.gradients, self._shard)
        factor = normaliser / self.scaler.scale
        norm = self._norm(self.gradients.flat) * factor
        lr = learning_rate(self._config.schedule, self.num_updates + 1)
        if not math.isfinite(norm):
            if not self.scaler.dynamic or self.scaler.exhausted:
                raise NonFiniteGradients(
                    f"the gradient norm is {norm} at update {self.num_updates + 1} "
                    f"(loss scale {self.scaler.scale:g}): the run diverged; lower --lr, or resume from a checkpoint"
                )
            self.scaler.update(overflow=True)
            return StepResult(norm, lr, skipped=True)
        clip_grad = self._config.optimizer.clip_grad
        if clip_grad > 0:
            factor *= min(1.0, clip_grad / (norm + _CLIP_EPSILON))
        self._gathering.finish()
        self._updated.take_gradients(factor)
        self._adam.step(lr)
        self._updated.write_back()
        self._gathering.gather()
        self.scaler.update(overflow=False)
        self.num_updates += 1
        return StepResult(norm, lr, skipped=False)

    def settle(self) -> None:
        """Wait until no communication of this optimizer is under way: all parameters are whole and may be read."""
        self._reducer.settle()
        self._gathering.finish()

    def tensors(self) -> list[tuple[str, torch.Tensor, DeclaredParameter]]:
        """Return the weights and both Adam moments by logical name, as this rank holds them.

        In half precision the weights are the float32 masters. Shared among data-parallel ranks, a tensor may be a run
        of the parameter's elements, in one dim; `slices` says which.
        """
        self.settle()
        found = []
        for piece, weight in zip(self._shard.pieces, self.weights, strict=True):
            d = piece.declared
            found.append((f"model.{d.name}", weight.detach(), d))
            found += [(f"optimizer.{key}.{d.name}", t, d) for key, t in self._adam.moments(weight).items()]
        return found

    def slices(self) -> list[StateSlice]:
        """Return what a checkpoint holds: `tensors` as boxes of logical tensors that belong to no layout.

        After writing into them, call `loaded`.
        """
        tensors = self.tensors()
        pieces = [piece for piece in self._shard.pieces for _ in range(len(tensors) // len(self._shard.pieces))]
        found = []
        for piece, (name, tensor, d) in zip(pieces, tensors, strict=True):
            counts = self._counts(d) and (self._is_sharded or self._dp.rank == 0)
            start, elements = 0, tensor.view(-1)
            for offset, shape in piece.boxes():
                stop = start + math.prod(shape)
                place = tuple(a + b for a, b in zip(d.spec.offset(d.axis), offset, strict=True))
                found.append(StateSlice(name, d.spec.shape, place, elements[start:stop].view(shape), counts))
                start = stop
        return found

    def state(self) -> dict[str, object]:
        """Return the rest of the state, as plain numbers."""
        return {"num_updates": self.num_updates, "scaler": self.scaler.state()}

    def loaded(self, state: dict[str, object]) -> None:
        """Take over a state after its tensors were written into `tensors()`; all data-parallel ranks call this."""
        self.num_updates = int(state["num_updates"])  # type: ignore[call-overload]
        self.scaler.load_state(state["scaler"])  # type: ignore[arg-type]
        self._adam.set_num_updates(self.num_updates)
        self._updated.write_back()
        self._gathering.gather()

    def _counts(self, d: DeclaredParameter) -> bool:
        """Whether, of the tensor-parallel ranks and pipeline stages that hold a parameter, this is the one."""
        return (d.is_split or self._tp.rank == 0) and d.is_first_copy


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
