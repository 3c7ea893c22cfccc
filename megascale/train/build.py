"""The model and the loaders of a run, as its configuration says, on the rank that stands at `context`."""

from __future__ import annotations

import torch

from megascale.config.pipeline import stages_of_run
from megascale.config.schema import RunConfig
from megascale.data.loader import BatchLoader
from megascale.data.samples import SampleSource
from megascale.model.gpt import GPT
from megascale.parallel.boundary import build_boundary
from megascale.parallel.context import ParallelContext
from megascale.parallel.random import RandomStreams


def build_model(config: RunConfig, context: ParallelContext, streams: RandomStreams) -> GPT:
    """Return this rank's part of the model, its parameters uninitialised."""
    return GPT(
        config.model,
        context.tp,
        streams,
        getattr(torch, config.train.params_dtype),
        context.device,
        recompute_granularity=config.train.recompute_granularity,
        label_smoothing=config.train.label_smoothing,
        boundary=build_boundary(context.tp, streams, config.parallel),
        stages=stages_of_run(config, context.pp.rank),
        pp_ends=context.pp_ends,
    )


def build_loader(source: SampleSource, config: RunConfig, context: ParallelContext, eod_id: int | None) -> BatchLoader:
    """Return the loader of this rank's part of each global batch."""
    return BatchLoader(
        source,
        config.train.micro_batch_size,
        config.train.global_batch_size,
        context.dp.rank,
        context.dp.size,
        config.model.vocab_size,
        eod_id,
        config.data.eod_mask_loss,
    )
