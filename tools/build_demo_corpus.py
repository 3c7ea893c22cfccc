"""Write a small English corpus out of what every Python installation carries.

One document per module of the standard library (its docstrings, in source order, read from the sources without
importing them) and one per topic of the language reference that `pydoc` shows: about 2.3 MB, no download.

    python tools/build_demo_corpus.py --output corpus.jsonl
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from megascale.utils.files import atomic_writer
from megascale.utils.progress import progress

# Tests hold code rather than English; site-packages is not the standard library.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3"}
_MIN_CHARACTERS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    arguments = parser.parse_args()
    num_documents = num_characters = 0
    with atomic_writer(arguments.output, "w") as file:
        for name, text in documents():
            file.write(json.dumps({"id": name, "text": text}, ensure_ascii=False) + "\n")
            num_documents += 1
            num_characters += len(text)
    print(f"{arguments.output}: {num_documents:,} documents, {num_characters / 1e6:.2f} M characters")


def documents() -> Iterator[tuple[str, str]]:
    """Yield (id, text) of every document, always in the same order; those under 200 characters are left out."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted(
        path for path in library.rglob("*.py") if not _SKIPPED_FOLDERS & set(path.relative_to(library).parts)
    )
    with progress(len(sources) + len(topics), "document", "reading the standard library") as bar:
        for path in sources:
            text = "\n\n".join(docstrings(path))
            bar.update(1)
            if len(text) >= _MIN_CHARACTERS:
                yield f"stdlib/{path.relative_to(library).as_posix()}", text
        for topic, text in sorted(topics.items()):
            bar.update(1)
            if len(text) >= _MIN_CHARACTERS:
                yield f"reference/{topic}", text


def docstrings(path: Path) -> list[str]:
    """Return the docstrings of a source file, those of functions and classes headed by their name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in somebody else's strings
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a few files of the library are broken on purpose
        return []
    found = []
    for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                heading = "" if isinstance(node, ast.Module) else f"{node.name}: "
                found.append(heading + inspect.cleandoc(text))
    return found


if __name__ == "__main__":
    main()
