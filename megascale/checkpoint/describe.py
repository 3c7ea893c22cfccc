"""A run's checkpoints, or one of them, as text. No torch."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from megascale.checkpoint.manifest import CheckpointEntry, Manifest, read_manifest
from megascale.checkpoint.retention import validation_loss

_LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "use_distributed_optimizer")


def describe_run_checkpoints(entries: list[CheckpointEntry]) -> str:
    """Return a line for each checkpoint of a run, newest first."""
    lines = [f"{'step':>10}  {'size':>10}  {'validation loss':>15}  path"]
    for entry in entries:
        if entry.problem is not None:
            lines.append(f"{entry.step:>10}  {'damaged':>10}  {'':>15}  {entry.path}: {entry.problem}")
            continue
        manifest = read_manifest(entry.path)
        loss = validation_loss(manifest.state)
        told = "" if loss is None else f"{loss:.4f}"
        lines.append(f"{entry.step:>10}  {_size(manifest):>10}  {told:>15}  {entry.path}")
    return "\n".join(lines)


def describe_checkpoint(path: Path, manifest: Manifest, with_tensors: bool = False) -> str:
    """Return what one checkpoint holds; `with_tensors` lists every tensor with the files that it lies in."""
    parallel: dict[str, Any] = manifest.config.get("parallel", {})
    layout = ", ".join(f"{name} {parallel[name]}" for name in _LAYOUT if name in parallel)
    lines = [
        f"{path}",
        f"step        {manifest.step}",
        f"written by  megascale {manifest.megascale_version}, format {manifest.format_version}, in the parts of "
        f"{manifest.world_size} ranks" + (f" (run with {layout})" if layout else ""),
        f"size        {_size(manifest)} in {len(manifest.files)} files",
    ]
    groups: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, tensor in manifest.tensors.items():
        kind = ".".join(name.split(".")[: 2 if name.startswith("optimizer.") else 1])
        groups[f"{kind} ({tensor.dtype})"][0] += 1
        groups[f"{kind} ({tensor.dtype})"][1] += math.prod(tensor.shape)
    lines += [f"tensors     {kind}: {count} of {elements:,} elements" for kind, (count, elements) in groups.items()]
    loss = validation_loss(manifest.state)
    lines += [f"validation  loss {loss:.4f}"] if loss is not None else []
    lines += [f"state       {name}: {value}" for name, value in manifest.state.items()]
    if with_tensors:
        for name, tensor in manifest.tensors.items():
            parts = "; ".join(f"{part.file} {part.box}" for part in tensor.slices)
            lines.append(f"{name}  {tensor.dtype} {list(tensor.shape)}  {parts}")
    return "\n".join(lines)


def _size(manifest: Manifest) -> str:
    size = float(sum(file.bytes for file in manifest.files.values()))
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
