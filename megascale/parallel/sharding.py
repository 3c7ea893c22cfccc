"""What a layer declares of each of its parameters, once: shape, split dim, initial values, decay, partial gradient.

Initialisation, gradient sums and norm, weight-decay groups, checkpoint slices and parameter counts all read that
declaration; nothing is inferred from a name.

Initial values are a pure function of (seed, parameter name, global index): element e of the parameter, counted with its
split dim outermost, comes from word e of a Philox-4x64 counter stream keyed by (seed, name). Every rank computes only
its own slice, and every layout starts from the same weights.
"""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from megascale.parallel.context import Axis

# Elements drawn at a time: a block's float64 scratch stays in the processor's cache.
_BLOCK_ELEMENTS = 1 << 16
_INITIALISATION_THREADS = 4


@dataclass(frozen=True)
class Normal:
    """Initial values from N(0, std^2)."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Initial values all equal."""

    value: float


@dataclass(frozen=True)
class ParameterSpec:
    """The declaration of one parameter.

    Attributes:
        shape: Its global shape, whatever the layout.
        split_dim: The dim that is split over the tensor axis in equal contiguous slices; None: replicated.
        init: How its initial values are drawn.
        decay: Whether weight decay applies (not to biases and norms; Shoeybi et al. 2019, section 4.1).
        gradient_is_partial: Whether the backward pass leaves only this rank's part of a replicated parameter's
            gradient, to be summed over the tensor axis once per update (see `parallel.boundary`).
    """

    shape: tuple[int, ...]
    split_dim: int | None
    init: Normal | Constant
    decay: bool
    gradient_is_partial: bool = False

    def __post_init__(self) -> None:
        assert not (self.gradient_is_partial and self.split_dim is not None), "a split parameter has its whole gradient"

    def local_shape(self, axis: Axis) -> tuple[int, ...]:
        """The shape of one rank's slice."""
        if self.split_dim is None:
            return self.shape
        return tuple(n // axis.size if dim == self.split_dim else n for dim, n in enumerate(self.shape))

    def offset(self, axis: Axis) -> tuple[int, ...]:
        """Where this rank's slice starts in the global tensor."""
        local = self.local_shape(axis)
        return tuple(axis.rank * n if dim == self.split_dim else 0 for dim, n in enumerate(local))


@dataclass(frozen=True)
class DeclaredParameter:
    """A parameter with its declaration, the axis it is split over, and the one over which pipeline stages share it."""

    name: str
    parameter: nn.Parameter
    spec: ParameterSpec
    axis: Axis
    copies: Axis | None = None

    @property
    def is_split(self) -> bool:
        return self.spec.split_dim is not None

    @property
    def is_first_copy(self) -> bool:
        """Whether this is the stage on which a parameter counts that several pipeline stages hold (always, of others).

        Their gradients are summed over `copies`, and as initial values follow from the name, copies stay equal.
        """
        return self.copies is None or self.copies.rank == 0


class ParallelModule(nn.Module):
    """A module that declares its parameters. Subclasses call `declare` instead of assigning an `nn.Parameter`.

    Attributes:
        copies: The axis over which other pipeline stages hold the same parameters; None: none do.
    """

    copies: Axis | None = None

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.parameter_specs: dict[str, ParameterSpec] = {}

    def declare(self, name: str, spec: ParameterSpec, dtype: torch.dtype, device: torch.device) -> None:
        """Create this rank's slice of a parameter, uninitialised, and remember its declaration.

        Raises:
            ValueError: The split dim does not divide by the axis.
        """
        if spec.split_dim is not None and spec.shape[spec.split_dim] % self.axis.size:
            raise ValueError(
                f"parameter {name}: dim {spec.split_dim} of {list(spec.shape)} does not divide over "
                f"the {self.axis.size} ranks of axis {self.axis.name}"
            )
        local = torch.empty(spec.local_shape(self.axis), dtype=dtype, device=device)
        self.register_parameter(name, nn.Parameter(local))
        self.parameter_specs[name] = spec


def declared_parameters(model: nn.Module) -> list[DeclaredParameter]:
    """Return the model's parameters with their declarations, each once, in registration order.

    Raises:
        AssertionError: A parameter was added without a declaration.
    """
    found: list[DeclaredParameter] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full_name = f"{path}.{name}" if path else name
            assert isinstance(module, ParallelModule), f"parameter {full_name} has no declared layout"
            found.append(
                DeclaredParameter(full_name, parameter, module.parameter_specs[name], module.axis, module.copies)
            )
    return found


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of the model from its declaration; the full weights are the same at every layout."""
    for declared in declared_parameters(model):
        if isinstance(declared.spec.init, Constant):
            declared.parameter.fill_(declared.spec.init.value)
        else:
            _fill_normal(declared, seed, declared.spec.init.std)


def _fill_normal(declared: DeclaredParameter, seed: int, std: float) -> None:
    """Write this rank's slice of N(0, std^2) values, block by block."""
    spec, axis = declared.spec, declared.axis
    # With the split dim outermost, a rank's slice is one contiguous run of the stream.
    target = declared.parameter.data
    if spec.split_dim is not None:
        target = target.movedim(spec.split_dim, 0)
    inner = math.prod(target.shape[1:])
    first_row = axis.rank * target.shape[0] if spec.split_dim is not None else 0
    rows_per_block = max(1, _BLOCK_ELEMENTS // max(1, inner))

    def fill(row: int) -> None:
        block = target[row : row + rows_per_block]
        values = standard_normal(seed, declared.name, (first_row + row) * inner, block.numel())
        block.copy_(torch.from_numpy(values * std).view(block.shape))

    # Each value depends on its index only, so the blocks may be filled in any order; numpy works outside of the lock.
    with ThreadPoolExecutor(_INITIALISATION_THREADS) as threads:
        list(threads.map(fill, range(0, target.shape[0], rows_per_block)))


def standard_normal(seed: int, name: str, start: int, count: int) -> np.ndarray:
    """Return elements start .. start+count of the N(0, 1) stream of (seed, name), float64.

    Word e of the Philox stream is cut into two 32-bit uniforms and turned into element e by the Box-Muller transform.
    """
    key = np.frombuffer(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], dtype=np.uint64)
    # One step of the counter gives four words.
    stream = np.random.Philox(key=key, counter=start // 4)
    words = stream.random_raw(start % 4 + count)[start % 4 :]
    # Half-way points of the 2^32 cells, so that the logarithm never sees zero.
    radius = ((words >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    angle = ((words & np.uint64(0xFFFFFFFF)).astype(np.float64) + 0.5) * 2.0**-32
    return np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)
