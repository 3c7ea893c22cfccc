"""Two tensor-parallel processes against one, a thread each: whole training steps of pretrain_gpt.py.

The shape keeps matrix products large against the all-reduces (4 layers of hidden size 1536, 64 tokens a step), which is
where tensor parallelism is used. Perfect would be a ratio of 0.5.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.timing import Comparison, compare, interleaved
from megascale.data.indexed import IndexedWriter

_PROGRAM = str(Path(__file__).resolve().parent.parent / "pretrain_gpt.py")
_VOCABULARY = 8192
_NUM_STEPS = 8
_MODEL = "--num-layers 4 --hidden-size 1536 --num-attention-heads 12 --seq-length 64 --hidden-dropout 0"
_RUN = f"--attention-dropout 0 --micro-batch-size 1 --train-iters {_NUM_STEPS} --log-interval 1 --no-progress-bar"


def measure(num_rounds: int = 3) -> list[Comparison]:
    """Return the comparison of seconds per step."""
    with tempfile.TemporaryDirectory() as directory:
        prefix = str(Path(directory) / "random")
        random = np.random.RandomState(0)
        with IndexedWriter(prefix, np.uint16) as writer:
            for _ in range(100):
                writer.add_document(random.randint(0, _VOCABULARY, 1000))
        figures = interleaved(
            num_rounds,
            {"one": lambda: seconds_per_step(prefix, 1), "two": lambda: seconds_per_step(prefix, 2)},
        )
    what = "training step, 2 processes with tensor parallelism against 1 process (1 thread each, gloo)"
    return [compare(what, "s", figures["one"], figures["two"])]


def seconds_per_step(prefix: str, tp: int) -> float:
    """Run a few steps on `tp` processes of one thread each; return the median, the first two left out."""
    launcher = [] if tp == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)]
    flags = f"{_MODEL} {_RUN} --device cpu --vocab-size {_VOCABULARY} --tensor-model-parallel-size {tp}"
    command = [sys.executable, *launcher, _PROGRAM, *flags.split(), "--data-path", prefix, "--split", "1,0"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    steps = [float(text) for text in re.findall(r"([\d.]+) s/step", done.stdout)]
    assert len(steps) == _NUM_STEPS, done.stdout
    return statistics.median(steps[2:])
