"""The documentation names what exists: the reference is current, links lead somewhere, flags and files are real."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale.config.cli import build_parser
from megascale.parallel.context import single_process
from megascale.train.metrics import METRICS_FILE, read_records
from tests.train.training import small_config, train_on_rank
from tools.write_reference import REFERENCE, main, render

_ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*_ROOT.glob("*.md"), *(_ROOT / "docs").glob("*.md"), *(_ROOT / "benchmarks").glob("*.md")])

# Flags of other programs that our commands call: torchrun and pip.
_FOREIGN_FLAGS = {"--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"} | {
    "--standalone",
    "--max-restarts",
}


def broken_links(text: str, page: Path) -> list[str]:
    """Return the relative links in a page that lead to no file or to no heading of it."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (heading and heading not in _headings(path)):
            broken.append(target)
    return broken


def _headings(page: Path) -> set[str]:
    """The anchors that a page's headings get: lower case, hyphens for blanks, no punctuation."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def flags_in(text: str) -> set[str]:
    """Return everything in a page that looks like a flag."""
    return set(re.findall(r"(?<![\w\-])--[a-z][a-z0-9\-]*[a-z0-9]", text))


def known_flags() -> set[str]:
    """Return the flags of pretrain_gpt.py and of every program under tools/ and benchmarks/."""
    flags = set(build_parser()._option_string_actions) | _FOREIGN_FLAGS
    for program in [*(_ROOT / "tools").glob("*.py"), *(_ROOT / "benchmarks").glob("*.py")]:
        flags |= set(_added_flags(ast.parse(program.read_text(encoding="utf-8"))))
    return flags


def _added_flags(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def missing_files(text: str) -> list[str]:
    """Return the source files, tests and pages that a page names and that do not exist."""
    named = re.findall(r"\b(?:megascale|tests|tools|docs|benchmarks)/[\w./\-]*\.(?:py|md)\b", text)
    return [name for name in named if not (_ROOT / name).exists()]


def test_the_reference_is_current() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == render(), "docs/reference.md is out of date: run make docs"
    main(["--check"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(_ROOT).as_posix())
def test_a_page_names_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert broken_links(text, page) == []
    assert missing_files(text) == []
    assert sorted(flags_in(text) - known_flags()) == []


def test_the_reference_lists_what_a_run_writes(tmp_path: Path) -> None:
    train_on_rank(single_process(), small_config(train={"train_iters": 4, "eval_interval": 4}), tmp_path)
    written = {record["kind"]: sorted(record.keys() - {"kind"}) for record in read_records(tmp_path / METRICS_FILE)}
    rows = re.findall(r"^\| (train|validation) +\| (.+?) *\|$", render(), re.MULTILINE)
    assert written == {kind: sorted(names.split(", ")) for kind, names in rows}


def test_the_checks_would_see_a_mistake() -> None:
    page = _ROOT / "README.md"
    assert broken_links("[a](docs/nowhere.md) [b](LICENSE) [c](https://example.org/x)", page) == ["docs/nowhere.md"]
    assert broken_links("[a](docs/reference.md#rules) [b](docs/reference.md#no-such)", page) == [
        "docs/reference.md#no-such"
    ]
    assert flags_in("give `--num-layer 3`, or --no-tensorboard; not a---b") == {"--num-layer", "--no-tensorboard"}
    assert "--num-layer" not in known_flags()
    assert {"--no-tensorboard", "--swiglu", "--output-prefix"} <= known_flags()
    assert missing_files("see tools/nothing.py and tools/run_demo.py") == ["tools/nothing.py"]
