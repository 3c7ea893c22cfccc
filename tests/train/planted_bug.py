"""pretrain_gpt.py with a bug: the gradients of tensor-parallel ranks other than the first are 1% too large."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import pretrain_gpt
from megascale.optim.build import ModelOptimizer

_step = ModelOptimizer.step


def _wrong_step(self, normaliser):
    if self._tp.rank > 0:
        self.gradients.flat.mul_(1.01)
    return _step(self, normaliser)


if __name__ == "__main__":
    ModelOptimizer.step = _wrong_step
    pretrain_gpt.main()
