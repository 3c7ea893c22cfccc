"""Full tensors out of a rank's slices, put together from the parameters' declarations."""

from __future__ import annotations

import torch
from torch import nn

from megascale.parallel.sharding import DeclaredParameter, declared_parameters


def full(declared: DeclaredParameter, piece: torch.Tensor) -> torch.Tensor:
    """Return the global tensor of which `piece` is this rank's part. Every rank of the axis must call it."""
    if declared.spec.split_dim is None:
        return piece.detach().clone()
    return declared.axis.all_gather(piece.detach(), declared.spec.split_dim).clone()


def slice_of(declared: DeclaredParameter, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a global tensor."""
    if declared.spec.split_dim is None:
        return tensor
    return declared.axis.shard(tensor, declared.spec.split_dim)


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {d.name: full(d, d.parameter) for d in declared_parameters(model)}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {}
    for d in declared_parameters(model):
        gradient = gradient_of(d.parameter)
        gradients[d.name] = full(d, d.axis.all_reduce(gradient) if d.spec.gradient_is_partial else gradient)
    return gradients


def load_full(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Write this rank's part of each global weight into the model."""
    with torch.no_grad():
        for d in declared_parameters(model):
            d.parameter.copy_(slice_of(d, weights[d.name]))


def gradient_of(x: torch.Tensor) -> torch.Tensor:
    """Return the gradient that a backward pass must have left."""
    assert x.grad is not None, "there is no gradient"
    return x.grad


def difference(ours: torch.Tensor | None, reference: torch.Tensor | None) -> float:
    """Return the largest absolute difference, relative to the reference's largest element."""
    assert ours is not None, "there is no such gradient"
    assert reference is not None, "there is no such gradient in the reference"
    assert ours.shape == reference.shape, f"{tuple(ours.shape)} against {tuple(reference.shape)}"
    return ((ours - reference).abs().max() / reference.abs().max().clamp_min(1e-300)).item()
