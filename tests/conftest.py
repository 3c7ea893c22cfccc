"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import RankPool

_REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """A pool of gloo processes: `ranks(layout, function, *args)` returns the results by rank."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data (see its own README); the test is skipped where it is absent."""
    folder = Path(os.environ.get("MEGASCALE_TEST_DATA", _REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set MEGASCALE_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return _REPOSITORY
