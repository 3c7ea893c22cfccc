"""How long a checkpoint holds training up: written in the background (--async-save) against written at once.

A GPT of 4 layers and hidden size 512 with its AdamW moments, 252 MB on one process; the seconds from the call that
saves to its return. In the background that is the copy to host memory; the write is waited for outside of the figure,
so it does not stand in the way of the next copy. A CPU run shares its cores with the writing thread meanwhile.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.timing import Comparison, compare, interleaved
from megascale.config.resolution import resolve
from megascale.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from megascale.model.gpt import GPT
from megascale.optim.build import ModelOptimizer
from megascale.parallel.context import single_process
from megascale.parallel.random import RandomStreams
from megascale.parallel.sharding import initialise
from megascale.train.saving import build_saving
from megascale.train.state import TrainState

_MODEL = ModelConfig(num_layers=4, hidden_size=512, num_attention_heads=8, vocab_size=16384)


def measure(num_rounds: int = 5) -> list[Comparison]:
    """Return the comparison of seconds that one save holds training up."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads of one copy wait for each other on a busy machine
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as directory:
        direct, background = (_Saver(Path(directory) / str(flag), flag, device) for flag in (False, True))
        figures = interleaved(num_rounds, {"direct": direct.held_up, "background": background.held_up})
    torch.set_num_threads(num_threads)
    what = f"seconds that saving {direct.megabytes:.0f} MB holds a step up, in the background against at once"
    return [compare(what, "s", figures["direct"], figures["background"])]


class _Saver:
    """A run that has something to save, again and again."""

    def __init__(self, run_directory: Path, async_save: bool, device: torch.device) -> None:
        config = resolve(
            RunConfig(
                model=_MODEL,
                data=DataConfig(seq_length=256, data_path=("none",)),
                train=TrainConfig(train_iters=1),
                checkpoint=CheckpointConfig(save=str(run_directory), async_save=async_save),
            ),
            1,
        )
        context = single_process(device)
        model = GPT(config.model, context.tp, RandomStreams(0, context.tp, device), device=device)
        initialise(model, seed=0)
        optimizer = ModelOptimizer(model, config, context.tp, context.dp)
        self.megabytes = sum(s.data.numel() * s.data.element_size() for s in optimizer.slices()) / 1e6
        self._directory = run_directory
        self._state = TrainState()
        self._saving = build_saving(run_directory, optimizer, config, context)

    def held_up(self) -> float:
        """Save once; return the seconds until training could go on. The disk is clear before and after."""
        self._state = replace(self._state, step=self._state.step + 1)
        started = time.perf_counter()
        self._saving(self._state)
        seconds = time.perf_counter() - started
        self._saving.finish()
        shutil.rmtree(self._directory / "checkpoints")
        return seconds
