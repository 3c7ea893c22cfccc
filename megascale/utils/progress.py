"""One look for every progress bar."""

import sys
from typing import NoReturn

from tqdm import tqdm

__all__ = ["progress"]


def progress(total: int | None, unit: str, description: str, enabled: bool | None = None) -> "tqdm[NoReturn]":
    """Return a bar on stderr, to be moved with `.update(count)` and closed (or used in a `with`).

    total: how many `unit`s there will be, None when that is unknown.
    enabled: None shows the bar only when stderr is a terminal, so that logs of batch jobs stay readable.
    """
    return tqdm(
        total=total,
        unit=unit,
        desc=description,
        unit_scale=True,
        dynamic_ncols=True,
        file=sys.stderr,
        disable=None if enabled is None else not enabled,
    )
