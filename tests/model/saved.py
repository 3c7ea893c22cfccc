"""What autograd keeps between the forward and the backward pass, in bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def saved_bytes(model: nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """Run `forward` and its backward pass; return the bytes it kept, parameters left out, shared storage once."""
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward()
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    loss.backward()
    return sum(storages.values())
