"""What a person reads at the start and at the end of a run."""

from __future__ import annotations

from pathlib import Path

import torch

from megascale.config.describe import describe_run
from megascale.config.serialization import to_yaml
from megascale.parallel.context import ParallelContext
from megascale.train.plot import plot_loss
from megascale.train.prepare import PreparedRun
from megascale.train.state import TrainState
from megascale.train.trainer import TrainResult
from megascale.utils.files import atomic_writer

CONFIG_FILE = "config.yaml"


def open_run_directory(run: PreparedRun, context: ParallelContext) -> Path | None:
    """Create the run directory and write the resolved configuration into it; None when nothing is kept."""
    if run.config.checkpoint.save is None:
        return None
    directory = Path(run.config.checkpoint.save)
    if context.speaks:
        directory.mkdir(parents=True, exist_ok=True)
        with atomic_writer(directory / CONFIG_FILE, "w") as file:
            file.write(to_yaml(run.config))
    context.world.barrier()
    return directory


def announce(run: PreparedRun, context: ParallelContext, state: TrainState) -> str:
    """Return the text that opens a run: the plan, the data, the machine, and where it starts."""
    lines = [
        describe_run(run.config, context.world.size),
        run.sources.describe(),
        f"torch {torch.__version__} on {_device_name(context.device)}, {torch.get_num_threads()} threads per rank",
    ]
    lines += [f"not taken: {problem}" for problem in run.passed_over]
    if run.start is not None:
        lines.append(f"resuming after step {state.step} ({state.samples:,} samples) from {run.start}")
        lines += [f"  changed: {change}" for change in run.changes]
    return "\n".join(lines)


def conclude(run: PreparedRun, result: TrainResult, directory: Path | None) -> str:
    """Draw the loss picture and return the text that closes a run."""
    state, iterations = result.state, run.config.train.train_iters
    ending = f"stopped by {result.stopped_by}" if result.stopped_by else "done"
    lines = [f"{ending} after step {state.step}/{iterations}: {state.samples:,} samples, {state.tokens:,} tokens"]
    if result.validation is not None:
        lines.append(f"validation loss {result.validation.loss:.4f}")
    if directory is not None:
        if result.stopped_by:
            lines.append(f"to go on: the same command with --load {directory}")
        picture = plot_loss(directory, title=f"{run.config.model.preset or directory.name}: loss")
        lines.append(f"run directory {directory}" + (f", loss picture {picture}" if picture else ""))
    return "\n".join(lines)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
