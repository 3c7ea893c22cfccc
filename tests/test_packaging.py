"""What an installation gets: every package, the typing marker and the program, and nothing of the checkout beside."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megascale import __version__

_ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel, built from a copy of the sources by the setuptools that is there, without the network."""
    pytest.importorskip("setuptools", minversion="77", reason="building a wheel needs setuptools 77 (make install)")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "pretrain_gpt.py"):
        shutil.copy(_ROOT / name, source)
    for name in ("megascale", "tests", "tools"):
        shutil.copytree(_ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    built = subprocess.run([sys.executable, "-c", command], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (path,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_it_holds_every_module_and_nothing_else(wheel) -> None:
    modules = [*(_ROOT / "megascale").rglob("*.py"), _ROOT / "megascale" / "py.typed", _ROOT / "pretrain_gpt.py"]
    expected = {path.relative_to(_ROOT).as_posix() for path in modules}
    metadata = f"megascale-{__version__}.dist-info/"
    assert {name for name in wheel.namelist() if not name.startswith(metadata)} == expected
    assert metadata + "licenses/LICENSE" in wheel.namelist()


def test_it_names_its_version_its_program_and_its_readme(wheel) -> None:
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "megascale-pretrain = pretrain_gpt:main" in wheel.read(entry_points).decode()
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = wheel.read(name).decode()
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nRequires-Dist: torch>=" in metadata
    assert "# megascale" in metadata
    assert "apex" not in metadata, "the package of that name is not NVIDIA's"
