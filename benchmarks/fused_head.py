"""The vocabulary product with its loss, in chunks, against the whole logits and torch's cross-entropy.

Forward and backward of 2,048 tokens, hidden size 768, a vocabulary of 51,200, float32. Memory is how far the process
grows beyond its inputs and their gradients, in a process of its own for each.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.timing import Comparison, compare, interleaved, seconds
from megascale.parallel.context import single_process
from megascale.parallel.cross_entropy import VocabularySlice, linear_cross_entropy

_NUM_TOKENS, _HIDDEN, _VOCABULARY = 2048, 768, 51_200


def measure(num_rounds: int = 5) -> list[Comparison]:
    """Return the comparisons of time and of peak memory."""
    figures = interleaved(num_rounds, {name: seconds(action) for name, action in actions().items()})
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for name in figures:
        ours, theirs = context.Pipe()
        process = context.Process(target=send_peak_memory, args=(name, theirs))
        process.start()
        peaks[name] = [ours.recv()]
        process.join()
    what = "vocabulary product and loss, fused in chunks against whole logits and F.cross_entropy"
    return [
        compare(f"{what}: time", "s", figures["whole"], figures["fused"]),
        compare(f"{what}: peak memory", "MB", peaks["whole"], peaks["fused"], scale=1e-6),
    ]


def actions() -> dict[str, Callable[[], object]]:
    """Return one forward and backward pass of each implementation, over the same tensors."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_NUM_TOKENS, _HIDDEN, generator=generator).requires_grad_()
    weight = (0.02 * torch.randn(_VOCABULARY, _HIDDEN, generator=generator)).requires_grad_()
    targets = torch.randint(_VOCABULARY, (_NUM_TOKENS,), generator=generator)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    ones = torch.ones(_NUM_TOKENS)
    vocabulary = VocabularySlice(single_process().tp, _VOCABULARY, _VOCABULARY)
    scale = 1.0 / _NUM_TOKENS
    return {
        "whole": lambda: F.cross_entropy(hidden @ weight.t(), targets).backward(),
        "fused": lambda: (
            linear_cross_entropy(hidden, weight, targets, ones, vocabulary, gradient_scale=scale) * scale
        ).backward(),
    }


def send_peak_memory(name: str, connection: Connection) -> None:
    """Send how many bytes this process grows by at most during one pass."""
    action = actions()[name]
    # Touches the libraries' own buffers first, which are the same for both.
    torch.ones(8, 8) @ torch.ones(8, 8)
    before = _memory("VmRSS")
    action()
    connection.send(_memory("VmHWM") - before)


def _memory(field: str) -> int:
    """Return a figure of this process in bytes: VmRSS now, VmHWM at its peak (getrusage may tell the parent's peak)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])
