"""A small training run that tests can put on any layout: real trainer, optimizer and checkpoints, generated samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megascale.config.resolution import resolve
from megascale.config.schema import (
    CheckpointConfig,
    DataConfig,
    FaultConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from megascale.data.samples import SampleSource
from megascale.optim.build import ModelOptimizer
from megascale.parallel.context import ParallelContext
from megascale.parallel.random import RandomStreams
from megascale.parallel.sharding import initialise
from megascale.train.build import build_loader, build_model
from megascale.train.metrics import METRICS_FILE, RunMetrics, read_records
from megascale.train.rewind import restore_newest
from megascale.train.saving import build_saving
from megascale.train.snapshot import load_snapshot
from megascale.train.state import TrainState
from megascale.train.trainer import Trainer

VOCAB_SIZE, EOD = 97, 96

# A rank's boxes of the state: (name, global shape, offset, values) of each.
Pieces = list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]


class GeneratedSamples:
    """A learnable stream: each token follows from the one before, with noise and end-of-document tokens strewn in."""

    seq_length = 16
    samples_per_epoch = 1 << 20

    def sample(self, index: int) -> np.ndarray:
        random = np.random.RandomState([7, index])
        tokens = np.empty(self.seq_length + 1, dtype=np.int64)
        tokens[0] = random.randint(EOD)
        for i in range(1, len(tokens)):
            tokens[i] = (3 * tokens[i - 1] + 1) % EOD if random.rand() < 0.8 else random.randint(EOD)
        tokens[random.rand(len(tokens)) < 0.15] = EOD
        return tokens

    def origin(self, index: int, position: int) -> str:
        return f"generated sample {index}, token {position}"


def small_config(**changes: dict[str, Any]) -> RunConfig:
    """Return a resolved tiny run of 20 steps in float64 without dropout; `changes` are by section."""
    sections = {
        "model": ModelConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            vocab_size=VOCAB_SIZE,
            make_vocab_size_divisible_by=64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        "parallel": ParallelConfig(),
        "schedule": ScheduleConfig(lr=1e-3, min_lr=1e-4, lr_warmup_iters=3),
        "data": DataConfig(seq_length=GeneratedSamples.seq_length, eod_mask_loss=True, data_path=("generated",)),
        "train": TrainConfig(
            micro_batch_size=8,
            global_batch_size=8,
            train_iters=20,
            params_dtype="float64",
            eval_interval=10,
            eval_iters=1,
        ),
        "checkpoint": CheckpointConfig(),
        "faults": FaultConfig(),
        "logging": LoggingConfig(log_interval=1, tensorboard=False, progress_bar=False),
    }
    for name, values in changes.items():
        sections[name] = replace(sections[name], **values)
    config = RunConfig(**sections)
    parallel = config.parallel
    return resolve(config, parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)


def with_layout(config: RunConfig, context: ParallelContext) -> RunConfig:
    sizes = {"tensor_model_parallel_size": context.tp.size, "pipeline_model_parallel_size": context.pp.size}
    return replace(config, parallel=replace(config.parallel, **sizes))


def build_trainer(
    context: ParallelContext,
    config: RunConfig,
    run: Path,
    load: Path | None = None,
    source: SampleSource | None = None,
) -> Trainer:
    """Build what pretrain_gpt.py builds, on generated samples unless a source is given."""
    config = with_layout(config, context)
    streams = RandomStreams(config.train.seed, context.tp, context.device)
    model = build_model(config, context, streams)
    initialise(model, config.train.seed)
    optimizer = ModelOptimizer(model, config, context.tp, context.dp, context.pp)
    state = load_snapshot(load, optimizer) if load else TrainState()
    if context.speaks:
        run.mkdir(parents=True, exist_ok=True)
    context.world.barrier()
    source = source or GeneratedSamples()
    train_loader, valid_loader = (build_loader(source, config, context, EOD) for _ in range(2))
    metrics = RunMetrics(run, state.step, config.train.train_iters, context.speaks, config.logging)
    saving = build_saving(run, optimizer, config, context)
    return Trainer(
        config,
        context,
        model,
        optimizer,
        streams,
        train_loader,
        valid_loader,
        state,
        metrics,
        save=saving,
        finish_saving=saving.finish,
        restore=lambda: restore_newest(run, optimizer, context),
    )


def train_on_rank(context: ParallelContext, config: RunConfig, run: Path, load: Path | None = None) -> Pieces:
    """Train on one rank of any layout; return its pieces of the weights and moments."""
    trainer = build_trainer(context, config, run, load)
    with trainer.metrics:
        trainer.fit()
    return pieces(trainer.optimizer)


def pieces(optimizer: ModelOptimizer) -> Pieces:
    return [
        (name, shape, offset, (data if data.dtype == torch.float64 else data.float()).numpy().copy())
        for name, shape, offset, data, _ in optimizer.slices()
    ]


def assemble(ranks: list[Pieces]) -> dict[str, np.ndarray]:
    """Put the ranks' pieces together; a piece that several ranks hold must be bit-identical on all of them."""
    whole: dict[str, np.ndarray] = {}
    written: dict[str, np.ndarray] = {}
    for rank in ranks:
        for name, shape, offset, values in rank:
            target = whole.setdefault(name, np.zeros(shape, values.dtype))
            done = written.setdefault(name, np.zeros(shape, bool))
            where = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            assert np.array_equal(target[where][done[where]], values[done[where]]), f"{name} differs between ranks"
            target[where], done[where] = values, True
    assert all(done.all() for done in written.values())
    return whole


def losses(run: Path) -> list[float]:
    """The training losses of a run, then its validation losses."""
    records = read_records(run / METRICS_FILE)
    return [r["loss"] for r in records if r["kind"] == "train"] + [r["loss"] for r in records if r["kind"] != "train"]


def exact_records(run: Path) -> list[dict[str, Any]]:
    """The records of a run without what the clock decides."""
    return [
        {key: value for key, value in record.items() if key not in ("seconds", "tokens_per_second")}
        for record in read_records(run / METRICS_FILE)
    ]
