"""Fingerprints of every step, written on demand, so that two runs can be compared bit by bit later.

Each rank writes `<run>/digests/rank_00000.jsonl`: first a line that says where the rank stands, then one per step.

| field     | what                                                                                            |
|-----------|-------------------------------------------------------------------------------------------------|
| step      | the step                                                                                        |
| samples   | first sample number of the global batch, and that of the one after it                           |
| tokens    | sum modulo 2^64 of the hashes of this rank's (sample number, tokens, loss weights)              |
| loss      | bits of the global batch's loss, float64, the same on every rank                                |
| grad_norm | bits of the global gradient norm, float64                                                       |
| gradients | fingerprint of each parameter's gradient as the update left it, this rank's slice               |
| weights   | fingerprint of each parameter after the update, this rank's slice                               |

Fingerprints and bits are hexadecimal. `tools/compare_runs.py` reads these files. The cost is one read of gradients and
weights per step.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from torch import nn

from megascale.config.schema import RunConfig
from megascale.data.loader import Batch
from megascale.optim.build import ModelOptimizer
from megascale.parallel.context import ParallelContext
from megascale.parallel.sharding import declared_parameters
from megascale.train.compare import DIGESTS_DIRECTORY, Digest, RankHeader, digest_file, keep_digests
from megascale.train.fingerprint import as_text, fingerprints
from megascale.train.observers import Observer, TrainingStep
from megascale.train.state import TrainState


class DigestLog(Observer):
    """Writes this rank's digests.

    Args:
        first_step: The step the run starts (or resumes) after; digests of later steps are removed.
    """

    def __init__(
        self,
        run_directory: Path,
        config: RunConfig,
        context: ParallelContext,
        model: nn.Module,
        optimizer: ModelOptimizer,
        first_step: int,
    ) -> None:
        self._optimizer, self._global_batch_size = optimizer, config.train.global_batch_size
        self._declared = declared_parameters(model)
        (run_directory / DIGESTS_DIRECTORY).mkdir(parents=True, exist_ok=True)
        self._path = digest_file(run_directory, context.rank)
        self._header = RankHeader(
            context.rank,
            context.world.size,
            context.tp.size,
            context.dp.size,
            context.pp.size,
            config.parallel.sequence_parallel,
            config.parallel.use_distributed_optimizer,
            reads_data=context.tp.rank == 0 and context.pp.rank == 0,
            dtype=config.train.params_dtype,
        )
        keep_digests(self._path, self._header, first_step)

    def after_step(self, state: TrainState, batch: Batch, step: TrainingStep) -> None:
        self._optimizer.settle()  # weights that are still being gathered are nobody's yet
        buffer = self._optimizer.gradients
        names = [d.name for d in buffer.declared] + [d.name for d in self._declared]
        values = fingerprints([*buffer.views, *(d.parameter for d in self._declared)]).tolist()
        texts = [(name, as_text(value)) for name, value in zip(names, values, strict=True)]
        digest = Digest(
            step=state.step,
            samples=[batch.first_sample, batch.first_sample + self._global_batch_size],
            tokens=as_text(hash_of_samples(batch)),
            loss=bits_of(step.loss),
            grad_norm=bits_of(step.update.grad_norm),
            gradients=dict(texts[: len(buffer.declared)]),
            weights=dict(texts[len(buffer.declared) :]),
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(digest.as_dict()) + "\n")

    def rewound(self, state: TrainState) -> None:
        keep_digests(self._path, self._header, state.step)


def hash_of_samples(batch: Batch) -> int:
    """Return the sum of the hashes of a rank's samples; over the ranks that share a batch it adds up to the batch's."""
    total = 0
    for micro_batch in batch.micro_batches:
        size = len(micro_batch.tokens)
        for row in range(size):
            number = batch.first_sample + micro_batch.index * size + row
            content = hashlib.blake2b(struct.pack("<q", number), digest_size=8)
            for array in (micro_batch.tokens, micro_batch.targets, micro_batch.loss_weights):
                content.update(array[row].tobytes())
            total += int.from_bytes(content.digest(), "little")
    return total


def bits_of(value: float) -> str:
    """Return the 64 bits of a float as hexadecimal digits."""
    return struct.pack(">d", value).hex()
