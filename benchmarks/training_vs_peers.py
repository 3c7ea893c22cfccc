"""Training step against other frameworks, interleaved in one run: seconds, ratio and peak memory.

    python benchmarks/training_vs_peers.py --peers-python ../peers/bin/python [--nanogpt ../nanoGPT/model.py]

The peers (transformers, litgpt and, given its file, nanoGPT) live in a virtual environment of their own. Each
implementation is a process that waits while another computes; rounds alternate, and the ratio is the median over rounds
of (peer / megascale).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("step_worker.py")
ROOT = Path(__file__).resolve().parent.parent


class Worker:
    """A running step_worker.py."""

    def __init__(self, python: str, implementation: str, arguments: list[str]) -> None:
        self.name = implementation
        self._process = subprocess.Popen(
            [python, str(WORKER), implementation, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        )

    def round(self) -> dict[str, float]:
        """Run one round and return what it measured."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return dict(json.loads(line.removeprefix("RESULT ")))
        raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", required=True, help="python of the peers' environment")
    parser.add_argument("--peers", nargs="+", default=["transformers", "litgpt"])
    parser.add_argument("--nanogpt", help="path of nanoGPT's model.py; adds it to the peers")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    peers = [*arguments.peers, *(["nanogpt"] if arguments.nanogpt else [])]
    for precision in arguments.precision:
        options = ["--precision", precision, "--threads", str(arguments.threads)]
        options += ["--nanogpt", arguments.nanogpt] if arguments.nanogpt else []
        workers = [Worker(sys.executable, "megascale", options)]
        workers += [Worker(arguments.peers_python, peer, options) for peer in peers]
        for worker in workers:
            worker.round()  # warm-up
        results: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
        for _ in range(arguments.rounds):
            for worker in workers:
                results[worker.name].append(worker.round())
        for worker in workers:
            worker.close()
        print(f"\n{precision}, {arguments.threads} threads, {arguments.rounds} interleaved rounds")
        print("| implementation | s/step (median) | time vs megascale | peak memory, GB |\n|---|---|---|---|")
        ours = [result["seconds"] for result in results["megascale"]]
        for name, rounds in results.items():
            ratio = statistics.median(r["seconds"] / o for r, o in zip(rounds, ours, strict=True))
            seconds = statistics.median(r["seconds"] for r in rounds)
            print(f"| {name} | {seconds:.2f} | {ratio:.2f} | {rounds[-1]['peak_gb']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
