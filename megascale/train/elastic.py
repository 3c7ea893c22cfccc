"""Going on after torchrun has restarted the ranks of a run (--max-restarts)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megascale.checkpoint.manifest import list_checkpoints
from megascale.config.cli import ParsedRun
from megascale.utils.environment import LaunchEnvironment


def resumed_after_restart(parsed: ParsedRun, environment: LaunchEnvironment) -> ParsedRun:
    """Return what a restarted attempt of a run does: go on from the checkpoints it has saved, if there are any.

    Without this, the same command line would start over from --load (or, finding its own checkpoints in --save, refuse
    to start).
    """
    checkpoint = parsed.config.checkpoint
    if environment.restart_count == 0 or checkpoint.save is None or not list_checkpoints(Path(checkpoint.save)):
        return parsed
    return replace(parsed, config=replace(parsed.config, checkpoint=replace(checkpoint, load=checkpoint.save)))
