"""From nothing to a trained GPT on this machine: corpus, tokenizer, data set, 2-way tensor-parallel training, resume.

Runs the same commands a user would type, and shows each before it runs. No download, no GPU.

    python tools/run_demo.py --output demo
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from megascale.train.metrics import METRICS_FILE, read_records
from megascale.train.plot import LOSS_PICTURE

_TOOLS = Path(__file__).resolve().parent
_MARK = ".megascale-demo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("demo"), help="folder to fill; a former demo there is removed"
    )
    parser.add_argument(
        "--train-iters", type=int, default=1000, help="training steps; the run is stopped and resumed half-way"
    )
    arguments = parser.parse_args()
    output: Path = arguments.output
    clear(output)
    started = time.perf_counter()

    corpus, tokenizer, run = output / "corpus.jsonl", output / "tokenizer.json", output / "run"
    show("1. A corpus: the docstrings of Python's standard library and the language reference of pydoc")
    tool("build_demo_corpus.py", "--output", corpus)
    show("2. A byte-level BPE tokenizer of our own")
    tool("train_tokenizer.py", "--input", corpus, "--vocab-size", 4096, "--output", tokenizer)
    show("3. A data set: token ids in Megatron's .bin/.idx layout")
    tool(
        *("preprocess_data.py", "--input", corpus, "--tokenizer-model", tokenizer),
        *("--output-prefix", output / "demo", "--append-eod", "--workers", 2),
    )

    half = max(1, arguments.train_iters // 2)
    training = [
        *("--model", "gpt2-tiny", "--data-path", output / "demo_text_document", "--tokenizer-model", tokenizer),
        *("--tensor-model-parallel-size", 2, "--train-iters", arguments.train_iters),
        *("--save", run, "--log-interval", 20),
    ]
    show("4. Training: one model split over two processes, stopped half-way")
    torchrun(*training, "--exit-interval", half)
    show("5. The same command resumes from the checkpoint and finishes")
    torchrun(*training, "--load", run)
    print(summary(run, time.perf_counter() - started))


def clear(output: Path) -> None:
    """Make an empty folder for the demo; what stands there is removed only if an earlier demo wrote it."""
    if output.exists() and any(output.iterdir()):
        if not (output / _MARK).exists():
            sys.exit(f"error: --output {output} exists and is not an earlier demo's: give another folder")
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / _MARK).touch()


def show(title: str) -> None:
    print(f"\n== {title}", flush=True)


def tool(name: str, *arguments: object) -> None:
    """Run one of the project's tools."""
    execute([sys.executable, str(_TOOLS / name), *map(str, arguments)])


def torchrun(*arguments: object) -> None:
    """Run pretrain_gpt.py as two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    execute([*launcher, str(_TOOLS.parent / "pretrain_gpt.py"), *map(str, arguments)])


def execute(command: list[str]) -> None:
    """Show a command and run it; if it fails, so does the demo."""
    here = Path.cwd()
    shown = [Path(word).relative_to(here).as_posix() if word.startswith(f"{here}/") else word for word in command]
    print(f"$ {shlex.join(['python', *shown[1:]])}", flush=True)
    # One thread per process; torchrun would choose the same, with a warning.
    code = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode
    if code:
        sys.exit(f"error: the demo stopped, since the command above ended with exit code {code}")


def summary(run: Path, seconds: float) -> str:
    """Return what the finished run reached."""
    records = read_records(run / METRICS_FILE)
    train = [record for record in records if record["kind"] == "train"]
    validation = [record for record in records if record["kind"] == "validation"]
    return (
        f"\n== Done in {seconds / 60:.1f} minutes: {train[-1]['tokens']:,} tokens\n"
        f"training loss   {train[0]['loss']:.3f} -> {train[-1]['loss']:.3f}\n"
        f"validation loss {validation[0]['loss']:.3f} (first) -> {validation[-1]['loss']:.3f}\n"
        f"picture of both {run / LOSS_PICTURE}"
    )


if __name__ == "__main__":
    main()
