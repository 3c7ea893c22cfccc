"""Where a rank computes and how it talks, chosen before any process group is opened."""

from __future__ import annotations

import torch

from megascale.config.schema import RunConfig
from megascale.train.host import tune_malloc
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError


def choose_device(config: RunConfig, environment: LaunchEnvironment) -> torch.device:
    """Return this rank's device and make it the current one; on a CPU, tune the allocator if configured.

    Raises:
        UserError: --device cuda without a CUDA device, or more processes on the host than it has.
    """
    wanted = config.train.device
    num_devices = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and num_devices == 0):
        if config.train.tune_malloc:
            tune_malloc()
        return torch.device("cpu")
    if num_devices == 0:
        raise UserError(f"--device cuda, but torch {torch.__version__} finds no CUDA device here: use --device cpu")
    if environment.local_rank >= num_devices:
        raise UserError(
            f"{environment.local_world_size} processes on host {environment.hostname}, which has {num_devices} CUDA "
            f"devices: start at most {num_devices} per host, or use --device cpu"
        )
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


def choose_backend(config: RunConfig, device: torch.device) -> str:
    """Return the collective backend: nccl for CUDA, gloo otherwise, or the one that was asked for.

    Raises:
        UserError: nccl was asked for on a CPU.
    """
    wanted = config.parallel.distributed_backend
    if wanted == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if wanted == "nccl" and device.type != "cuda":
        raise UserError("--distributed-backend nccl moves CUDA tensors only: use gloo with --device cpu")
    return wanted
