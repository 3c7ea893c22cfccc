"""The house rules that a machine can hold: imports point down, nothing is ambient, importing does nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent

# Rooms on one level never import each other; a room imports lower levels only. See docs/architecture.md.
LEVELS = {
    "utils": 0,
    "config": 1,
    "data": 2,
    "plan": 2,
    "parallel": 3,
    "corpus": 3,
    "model": 4,
    "optim": 4,
    "checkpoint": 5,
    "train": 6,
    "evaluate": 6,
    "generate": 6,
}
TORCH_FREE = {"utils", "config", "data", "plan", "corpus"}
# What runs before torch is worth its seconds: reading the command line and looking at every file it names.
TORCH_FREE_MODULES = ("megascale", "megascale.train.prepare", "megascale.checkpoint.manifest", "pretrain_gpt")

SOURCES = sorted((_ROOT / "megascale").rglob("*.py"))
ALL_SOURCES = [*SOURCES, *sorted((_ROOT / "tools").glob("*.py")), *sorted(_ROOT.glob("*.py"))]


def _room(path: Path) -> str | None:
    parts = path.relative_to(_ROOT / "megascale").parts
    return parts[0] if len(parts) > 1 else None


def _imported_modules(tree: ast.AST) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            found.append((node.lineno, node.module or ""))
    return found


def import_violations(source: str, room: str) -> list[str]:
    """Return what is wrong with the imports of a file of `room`."""
    wrong = []
    for line, module in _imported_modules(ast.parse(source)):
        parts = module.split(".")
        if parts[0] == "torch" and room in TORCH_FREE:
            wrong.append(f"line {line}: {room} imports torch")
        if parts[0] == "megascale" and len(parts) > 1 and parts[1] != room:
            assert parts[1] in LEVELS, f"line {line}: {parts[1]} is not a room of the plan"
            if LEVELS[parts[1]] >= LEVELS[room]:
                wrong.append(
                    f"line {line}: {room} (level {LEVELS[room]}) imports {parts[1]} (level {LEVELS[parts[1]]})"
                )
    return wrong


def ambient_state(source: str) -> list[str]:
    """Return a file's `global` statements, its module variables that can change, and what it does when imported."""
    tree = ast.parse(source)
    wrong = [f"line {n.lineno}: global {', '.join(n.names)}" for n in ast.walk(tree) if isinstance(n, ast.Global)]
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
            node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [t.id for t in targets if isinstance(t, ast.Name)]
            if any(not _is_constant_name(name) for name in names):
                wrong.append(f"line {node.lineno}: module-level mutable {', '.join(names)}")
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        acts = isinstance(node, ast.Expr | ast.For | ast.While | ast.With | ast.AugAssign | ast.Delete)
        if acts and not is_docstring:
            wrong.append(f"line {node.lineno}: acts when imported")
    return wrong


def _is_constant_name(name: str) -> bool:
    return name.lstrip("_").isupper() or name == "__all__"


@pytest.mark.parametrize("path", [p for p in SOURCES if _room(p)], ids=lambda p: str(p.relative_to(_ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = _room(path)
    assert room in LEVELS, f"{room} is not a room of the plan: give it a level here and in docs/architecture.md"
    assert import_violations(path.read_text(), room) == []


@pytest.mark.parametrize("path", ALL_SOURCES, ids=lambda p: str(p.relative_to(_ROOT)))
def test_nothing_is_ambient(path: Path) -> None:
    if path.name != "setup.py":
        assert ambient_state(path.read_text()) == []


def test_the_rules_would_catch_an_offender() -> None:
    assert import_violations("import torch", "data") == ["line 1: data imports torch"]
    assert import_violations("from megascale.train.trainer import Trainer", "model") != []
    assert import_violations("from megascale.optim.adam import build_adamw", "model") != [], "same level"
    assert import_violations("from megascale.config.schema import RunConfig", "model") == []
    assert ambient_state("def f():\n    global x\n    x = 1") != []
    assert ambient_state("cache = {}") != []
    assert ambient_state("print('hello')") != []
    assert ambient_state('"""Docstring."""\nSIZES = (1, 2)') == []


@pytest.mark.parametrize("module", TORCH_FREE_MODULES)
def test_importing_loads_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=_ROOT).returncode == 0


def test_process_groups_are_opened_in_one_file_only() -> None:
    """Every collective goes through `Axis`: torch.distributed is used in parallel/context.py (ReduceOp names aside)."""
    for path in SOURCES:
        if path.relative_to(_ROOT / "megascale").as_posix() == "parallel/context.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist":
                assert node.attr == "ReduceOp", f"{path}:{node.lineno}: dist.{node.attr}"


def test_files_and_functions_stay_small() -> None:
    crowded = []
    for path in ALL_SOURCES:
        source = path.read_text()
        if source.count("\n") > 400:
            crowded.append(f"{path.name}: {source.count(chr(10))} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 80:
                crowded.append(f"{path.name}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines")
    assert crowded == []
