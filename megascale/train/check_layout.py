"""Is it a bug or rounding? One configuration trained for a few steps at several layouts, and a verdict.

Each layout is a run of the real program under torchrun; what is compared are its losses, its gradient norms and the
weights of its last checkpoint, put together from the ranks' slices. By default everything is computed in float64 and
without dropout (attention masks depend on the tensor-parallel size by design), so that rounding stays near 1e-16 per
sum: a difference that survives is the program's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megascale.checkpoint.load import load_tensors
from megascale.checkpoint.manifest import find_latest, read_manifest
from megascale.checkpoint.tensors import TensorSlice
from megascale.train.metrics import METRICS_FILE, read_records
from megascale.utils.errors import UserError

# What two orders of summation may differ by after a few steps, relative for losses and norms, and as
# |difference| / (1 + |weight|) for weights. About 1e6 roundings of the type: far above what a few steps accumulate
# (docs/equivalence.md measures it), far below what any missing or doubled term does.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}

_SIZES = {"tp": "--tensor-model-parallel-size", "pp": "--pipeline-model-parallel-size"}


@dataclass(frozen=True)
class LayoutRun:
    """One layout to try: a name, the sizes of its axes and further flags."""

    name: str
    sizes: dict[str, int]
    flags: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return self.sizes["tp"] * self.sizes["dp"] * self.sizes["pp"]

    def arguments(self) -> list[str]:
        """The flags that make the layout; the data-parallel size is what is left of the world."""
        return [word for axis, flag in _SIZES.items() for word in (flag, str(self.sizes[axis]))] + list(self.flags)


@dataclass(frozen=True)
class Trace:
    """What a run left: losses and gradient norms by step, its last weights, and what it computed in."""

    losses: list[float | None]
    norms: list[float | None]
    weights: dict[str, torch.Tensor]
    precision: str = "float64"


def parse_layout(text: str) -> LayoutRun:
    """Read "tp=2,dp=2 --sequence-parallel": sizes by axis (1 where absent), then flags.

    Raises:
        UserError: an axis or a size that is none.
    """
    first, *flags = text.split()
    sizes = {"tp": 1, "dp": 1, "pp": 1}
    for item in first.split(","):
        axis, _, size = item.partition("=")
        if axis not in sizes or not size.isdecimal() or int(size) < 1:
            raise UserError(f"--layout {text!r}: {item!r} is not one of tp=N, dp=N and pp=N")
        sizes[axis] = int(size)
    return LayoutRun(text, sizes, tuple(flags))


def fitted(arguments: Sequence[str], steps: int, keep_precision: bool) -> list[str]:
    """Return the flags of a run with those replaced that a check decides: length, saving, dropout, precision."""
    own = {
        **{"--train-iters": str(steps), "--log-interval": "1", "--eval-iters": "1", "--eval-interval": "1000000"},
        **{"--hidden-dropout": "0", "--attention-dropout": "0", "--lr-warmup-iters": "0"},
    }
    dropped = {*own, "--save", "--load", "--save-interval", "--lr-decay-iters", "--exit-interval"}
    switches = ["--no-tensorboard", "--no-progress-bar"]
    if not keep_precision:
        own["--params-dtype"] = "float64"
        switches += ["--no-fp16", "--no-bf16"]
        dropped |= {"--params-dtype", "--fp16", "--bf16"}
    dropped |= {*switches, "--tensorboard", "--progress-bar"}
    kept: list[str] = []
    keeps = True
    for word in arguments:
        if word.startswith("--"):
            keeps = word.split("=")[0] not in dropped
        if keeps:
            kept.append(word)
    return [*kept, *(word for pair in own.items() for word in pair), *switches]


def run_layout(
    layout: LayoutRun, arguments: Sequence[str], steps: int, keep_precision: bool, directory: Path, program: Path
) -> Trace:
    """Train at one layout, in a directory of its own, and return what it left.

    Raises:
        UserError: the run failed; with the end of what it printed.
    """
    save = directory / "".join(c if c.isalnum() else "_" for c in layout.name)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(layout.world_size), str(program)),
        *fitted(arguments, steps, keep_precision),
        *("--save", str(save)),
        *layout.arguments(),
    ]
    root = str(Path(program).resolve().parent)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    if finished.returncode:
        message = [line for line in finished.stderr.splitlines() if line.startswith("error:")]
        tail = "\n".join(message or finished.stderr.splitlines()[-25:])
        raise UserError(f"the run at layout {layout.name!r} failed:\n{tail}")
    return _read_trace(save)


def _read_trace(run: Path) -> Trace:
    records = [r for r in read_records(run / METRICS_FILE) if r["kind"] == "train"]
    latest = find_latest(run)
    assert latest is not None, "a run that ended well has saved a checkpoint"
    manifest = read_manifest(latest)
    names = [name for name in manifest.tensors if name.startswith("model.")]
    records_of = manifest.tensors
    weights = {n: torch.empty(records_of[n].shape, dtype=getattr(torch, records_of[n].dtype)) for n in names}
    slices = [TensorSlice(n, tuple(w.shape), tuple(0 for _ in w.shape), w) for n, w in weights.items()]
    load_tensors(latest, slices)
    train = manifest.config["train"]
    precision = "fp16" if train["fp16"] else "bf16" if train["bf16"] else str(train["params_dtype"])
    return Trace([r["loss"] for r in records], [r["grad_norm"] for r in records], weights, precision)


def compare(reference: Trace, other: Trace, tolerance: float, weights_count: bool) -> list[str]:
    """Return what differs by more than the tolerance, the first step of each series and the worst of the weights.

    weights_count: off in half and single precision, where Adam turns the rounding of a gradient that is zero in exact
        arithmetic (that of attention's key biases) into whole steps.
    """
    found = []
    for title, ours, theirs in (
        ("loss", reference.losses, other.losses),
        ("gradient norm", reference.norms, other.norms),
    ):
        if len(ours) != len(theirs):
            found.append(f"{len(ours)} and {len(theirs)} steps were logged")
        for step, (x, y) in enumerate(zip(ours, theirs, strict=False), start=1):
            if x is None or y is None:
                difference = 0.0 if x is y else float("inf")
            else:
                difference = abs(x - y) / max(abs(x), abs(y), 1e-300)
            if difference > tolerance:
                found.append(f"{title} of step {step}: {x!r} and {y!r}, {difference:.2g} apart")
                break
    if reference.weights.keys() != other.weights.keys():
        found.append(f"parameters differ: {sorted(reference.weights.keys() ^ other.weights.keys())}")
    elif weights_count:
        worst = _worst_weight(reference, other)
        if worst[0] > tolerance:
            found.append(f"weights of {worst[1].removeprefix('model.')}: {worst[0]:.2g} apart")
    return found


def largest_difference(reference: Trace, other: Trace) -> float:
    """Return the largest relative difference of the losses, for the report of runs that agree."""
    pairs = zip(reference.losses, other.losses, strict=False)
    return max((abs(x - y) / max(abs(x), 1e-300) for x, y in pairs if x is not None and y is not None), default=0.0)


def _worst_weight(reference: Trace, other: Trace) -> tuple[float, str]:
    def difference(name: str) -> float:
        x, y = reference.weights[name].double(), other.weights[name].double()
        value = float(((x - y).abs() / (1.0 + x.abs())).max())
        return value if value == value else float("inf")

    return max((difference(name), name) for name in reference.weights)


def explain(tolerance: float, precision: str) -> str:
    """Return why the tolerance is what it is."""
    if precision == "float64":
        why = "sums in another order differ by about 1e-16 each; a missing or doubled term by far more"
    else:
        why = (
            f"sums in another order differ by the rounding of {precision}, and training spreads it; only losses and "
            "norms are compared. For a sharp answer leave --keep-precision away: then it computes in float64"
        )
    return f"accepted: relative differences up to {tolerance:g} ({why})"
