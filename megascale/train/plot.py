"""The picture of a run: loss against tokens."""

from __future__ import annotations

from pathlib import Path

from megascale.train.metrics import METRICS_FILE, read_records

LOSS_PICTURE = "loss.png"


def plot_loss(run_directory: Path, title: str) -> Path | None:
    """Draw the run's training and validation losses into `loss.png`; return its path, or None if nothing was logged."""
    records = read_records(run_directory / METRICS_FILE)
    train = [(r["tokens"], r["loss"]) for r in records if r["kind"] == "train" and r["loss"] is not None]
    validation = [(r["tokens"], r["loss"]) for r in records if r["kind"] == "validation" and r["loss"] is not None]
    if not train and not validation:
        return None
    import matplotlib.figure  # takes a second to import

    figure = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if train:
        axes.plot(*zip(*train, strict=True), label="training", linewidth=1.2)
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", label="validation", markersize=4)
    axes.set(xlabel="tokens", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path = run_directory / LOSS_PICTURE
    figure.savefig(path, dpi=120)
    return path
