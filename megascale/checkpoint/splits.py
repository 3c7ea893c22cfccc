"""How the tensors of a checkpoint are split over tensor-parallel ranks: asked of the model that it is of."""

from __future__ import annotations

import torch

from megascale.checkpoint.manifest import Manifest
from megascale.config.derive import derive
from megascale.config.serialization import from_dict
from megascale.model.gpt import GPT
from megascale.parallel.context import single_process
from megascale.parallel.random import RandomStreams
from megascale.parallel.sharding import declared_parameters
from megascale.utils.errors import UserError


def split_dims(manifest: Manifest) -> dict[str, int | None]:
    """Return by tensor the dim that the model's layers split over tensor-parallel ranks; None: none.

    Weights are called `model.NAME`, what the optimizer keeps for a parameter `optimizer.KIND.NAME`. Of other tensors it
    is not known and they stay whole. No weights are made: the model is built on the meta device.

    Raises:
        UserError: the checkpoint is not of the model that its configuration describes.
    """
    config = derive(from_dict(manifest.config, "the checkpoint's configuration"), 1, None)
    axis = single_process().tp
    model = GPT(config.model, axis, RandomStreams(0, axis, torch.device("cpu")), device=torch.device("meta"))
    specs = {declared.name: declared.spec for declared in declared_parameters(model)}
    missing = sorted(name for name in specs if f"model.{name}" not in manifest.tensors)
    if missing:
        raise UserError(f"the checkpoint lacks {len(missing)} weights of its model, among them {missing[0]}")
    found: dict[str, int | None] = {}
    for name, tensor in manifest.tensors.items():
        kind, _, rest = name.partition(".")
        spec = specs.get(rest if kind == "model" else rest.partition(".")[2])
        found[name] = spec.split_dim if spec is not None and spec.shape == tensor.shape else None
    return found
