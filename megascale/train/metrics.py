"""What a run tells: a line or a bar for people, `metrics.jsonl` and TensorBoard for machines. One process speaks.

`metrics.jsonl` holds one JSON object per line:

| kind       | fields                                                                                     |
|------------|--------------------------------------------------------------------------------------------|
| train      | step, samples, tokens, loss, lr, grad_norm, loss_scale, skipped, seconds, tokens_per_second|
| validation | step, samples, tokens, loss, perplexity, num_scored_tokens, seconds                        |

`samples` and `tokens` count from the start of the run. `loss` is in nats per scored token; that of a train record is
the step's own, over the global batch, so that a resumed run writes what the uninterrupted one writes. `seconds` is per
step, the mean since the record before, without validation and saving. A number that is not finite is null.

`incidents.jsonl` holds what went wrong: `step`, `kind`, `action` taken and what was found; see `train.guard` and
`train.drift`. It keeps the records of all attempts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tqdm import tqdm

from megascale.config.schema import LoggingConfig
from megascale.utils.files import atomic_writer
from megascale.utils.progress import progress

METRICS_FILE = "metrics.jsonl"
INCIDENTS_FILE = "incidents.jsonl"


class RunMetrics:
    """Writes the records of one run.

    Args:
        run_directory: Where; None writes no files.
        first_step: The step the run starts (or resumes) after. Records of later steps, which a killed run left behind
            its last checkpoint, are removed: they will be written again.
        num_steps: Steps of the whole run, for the bar.
        speaks: Whether this process prints and writes; all methods do nothing otherwise.
        logging: Whether to write TensorBoard events, and whether to show a bar rather than a line per record.
    """

    def __init__(
        self,
        run_directory: Path | None,
        first_step: int,
        num_steps: int,
        speaks: bool,
        logging: LoggingConfig,
    ) -> None:
        self._speaks = speaks
        self._num_steps = num_steps
        self._file: IO[str] | None = None
        self._events: Any = None
        self._bar = progress(num_steps, "step", "training", enabled=logging.progress_bar if speaks else False)
        self._bar.update(first_step)
        self._directory = run_directory if speaks else None
        self._writes_events = logging.tensorboard
        self._open(first_step)

    def _open(self, first_step: int) -> None:
        if self._directory is None:
            return
        path = self._directory / METRICS_FILE
        keep_records(path, up_to_step=first_step)
        self._file = path.open("a", encoding="utf-8")
        if self._writes_events:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(self._directory / "tensorboard"), purge_step=first_step + 1)

    def __enter__(self) -> RunMetrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._close()

    def _close(self) -> None:
        for file in (self._file, self._events):
            if file is not None:
                file.close()

    def rewind(self, step: int) -> None:
        """Go back: remove the records of the steps after `step`, which will be done again."""
        self._close()
        self._open(step)
        self._bar.reset()
        self._bar.update(step)

    def incident(self, record: dict[str, Any], text: str) -> None:
        """Add a record to `incidents.jsonl`, which keeps those of all attempts, and print its text."""
        self.say(text)
        if self._directory is not None:
            with (self._directory / INCIDENTS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(_finite(record)) + "\n")

    def advance(self) -> None:
        """Move the bar by one step."""
        self._bar.update(1)

    def train(self, record: dict[str, Any]) -> None:
        """Write a record of one training step."""
        self._write("train", record)
        summary = (
            f"loss {record['loss']:.4f} | lr {record['lr']:.2e} | grad norm {record['grad_norm']:.3f} | "
            f"{record['tokens_per_second']:,.0f} tokens/s"
        )
        if record["skipped"]:
            summary += f" | skipped, loss scale now {record['loss_scale']:g}"
        if self._bar.disable:
            left = (self._num_steps - record["step"]) * record["seconds"]
            self.say(
                f"step {record['step']:>{len(str(self._num_steps))}}/{self._num_steps} | {summary} | "
                f"{record['seconds']:.3f} s/step | {tqdm.format_interval(left)} left"
            )
        else:
            self._bar.set_postfix_str(summary)

    def validation(self, record: dict[str, Any]) -> None:
        """Write a record of one validation."""
        self._write("validation", record)
        self.say(
            f"validation after step {record['step']} | loss {record['loss']:.4f} | "
            f"perplexity {record['perplexity']:.2f} | {record['num_scored_tokens']:,} tokens"
        )

    def say(self, text: str) -> None:
        """Print a line, without breaking the bar."""
        if self._speaks:
            tqdm.write(text)

    def _write(self, kind: str, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **_finite(record)}) + "\n")
            self._file.flush()
        if self._events is not None:
            for name, value in record.items():
                if name not in ("step", "skipped") and _is_finite(value):
                    self._events.add_scalar(f"{kind}/{name}", value, record["step"])


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file, without a last line that a killed run left unfinished."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    # Every finished line ends with a newline, so the last piece is empty or unfinished.
    return [json.loads(line) for line in lines[:-1]]


def keep_records(path: Path, up_to_step: int) -> None:
    """Remove the records of steps after `up_to_step` from a metrics file, if there is one."""
    if path.exists():
        with atomic_writer(path, "w") as file:
            for record in read_records(path):
                if record["step"] <= up_to_step:
                    file.write(json.dumps(record) + "\n")


def _finite(value: Any) -> Any:
    """Return what JSON can hold: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return value if _is_finite(value) else None


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
