"""Bytes that one rank keeps between steps: weights, gradients, masters, moments. Split two ways against one process.

Counted are the storages of all tensors alive after a training step of GPT-2's 124M shape with a 1,024-token vocabulary
slice left whole; nothing is estimated. Perfect would be 0.5 for tensor parallelism; ZeRO-1 shares masters and moments
only.
"""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Comparison
from megascale.config.layout import ParallelLayout
from megascale.config.resolution import resolve
from megascale.config.schema import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megascale.optim.build import ModelOptimizer
from megascale.parallel.context import launch
from megascale.parallel.random import RandomStreams
from megascale.train.build import build_model


def measure() -> list[Comparison]:
    """Return the comparisons of bytes per rank, in float32 and with float32 masters of bfloat16."""
    found = []
    for precision in ("float32", "bfloat16"):
        one = bytes_of(ParallelLayout(), precision, False)
        split = bytes_of(ParallelLayout(tp=2), precision, False)
        shared = bytes_of(ParallelLayout(dp=2), precision, True)
        for what, ours in (("tensor parallel over 2", split), ("ZeRO-1 over 2 replicas", shared)):
            ratio = ours / one
            text = f"state per rank, {what} against 1 process ({precision})"
            found.append(Comparison(text, "GB", one / 1e9, ours / 1e9, ratio, ratio, ratio))
    return found


def bytes_of(layout: ParallelLayout, precision: str, shares: bool) -> int:
    """Run a step on every rank of a layout and return the largest rank's bytes."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        answers: Any = spawn.Queue()
        rendezvous = f"file://{Path(directory) / 'rendezvous'}"
        ranks = [
            spawn.Process(target=_rank, args=(layout, rank, rendezvous, precision, shares, answers))
            for rank in range(layout.world_size)
        ]
        for process in ranks:
            process.start()
        largest = max(answers.get(timeout=300) for _ in ranks)
        for process in ranks:
            process.join()
    return int(largest)


def _rank(layout: ParallelLayout, rank: int, rendezvous: str, precision: str, shares: bool, answers: Any) -> None:
    config = RunConfig(
        model=ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=50257),
        parallel=ParallelConfig(tensor_model_parallel_size=layout.tp, use_distributed_optimizer=shares),
        data=DataConfig(seq_length=32),
        train=TrainConfig(micro_batch_size=1, train_iters=1, bf16=precision == "bfloat16"),
    )
    config = resolve(config, layout.world_size)
    device = torch.device("cpu")
    with launch(layout, rank, device, "gloo", init_method=rendezvous) as context:
        streams = RandomStreams(1, context.tp, device)
        model = build_model(config, context, streams)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.02)
        optimizer = ModelOptimizer(model, config, context.tp, context.dp, context.pp)
        optimizer.zero_gradients()
        tokens = torch.zeros(1, 32, dtype=torch.int64)
        optimizer.expect_last_backward()
        model(tokens, tokens, torch.ones(1, 32)).backward()
        optimizer.step(1.0)
        optimizer.settle()
        gc.collect()
        storages = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):  # asking the object itself wakes lazy modules
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        answers.put(sum(storages.values()))
        context.world.barrier()
