"""--audit-data STEP: which documents fed a step. No torch, and nothing that the run would have had to record.

Sample k is a pure function of the configuration. Which samples a step read follows from the batch size, unless the run
changed it on the way or went back and on past bad samples; so the run's metrics are asked, where there are any.
"""

from __future__ import annotations

from pathlib import Path

from megascale.config.cli import ParsedRun
from megascale.data.audit import origins
from megascale.data.build import build_sources
from megascale.train.metrics import METRICS_FILE, read_records
from megascale.train.prepare import open_tokenizer, resolve_run
from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError


def print_audit(parsed: ParsedRun, step: int, environment: LaunchEnvironment) -> None:
    """Print, on rank 0, where each sample of a step comes from.

    Raises:
        UserError: the configuration or its data is not valid, or the step's samples are not known.
    """
    tokenizer = open_tokenizer(parsed.config)
    config = resolve_run(parsed, tokenizer)
    sources = build_sources(config, tokenizer)
    directory = config.checkpoint.load or config.checkpoint.save
    numbers = samples_of_step(Path(directory) if directory else None, step, config.train.global_batch_size)
    if environment.rank == 0:
        print(f"step {step} reads samples {numbers.start} to {numbers.stop - 1}")
        for origin in origins(sources.train, numbers):
            print(origin)


def samples_of_step(run_directory: Path | None, step: int, global_batch_size: int) -> range:
    """Return the numbers of the samples that a step read (or, past the end of the records, will read).

    Raises:
        UserError: the step is not one, or the records around it do not fit the batch size.
    """
    if step < 1:
        raise UserError(f"--audit-data {step}: steps count from 1")
    records = read_records(run_directory / METRICS_FILE) if run_directory is not None else []
    known = {r["step"]: r["samples"] for r in records if r["kind"] == "train"}
    before = max((s for s in known if s <= step), default=0)
    after = min((s for s in known if s >= step), default=None)
    samples_before = known.get(before, 0)
    if after is not None and known[after] - samples_before != (after - before) * global_batch_size:
        raise UserError(
            f"--audit-data {step}: from step {before} to {after} the run in {run_directory} read "
            f"{known[after] - samples_before} samples, not {after - before} x --global-batch-size {global_batch_size}: "
            "give the batch size of that part of the run, or see its incidents.jsonl for samples that were passed over"
        )
    stop = samples_before + (step - before) * global_batch_size
    return range(stop - global_batch_size, stop)
