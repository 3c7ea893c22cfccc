"""What the JSON files of a checkpoint say, as typed records, and their text form. No torch.

Both `manifest.json` (the whole checkpoint) and `rank_*.json` (what one rank wrote) are one JSON object that carries the
sha256 of its own content, so that a changed byte in them is noticed as surely as one in the tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megascale.checkpoint.boxes import Box, cover_problem
from megascale.utils.errors import UserError

# Raised by one whenever a reader of the previous number would misread the files.
FORMAT_VERSION = 1

# An error message names this many problems at most; the rest is counted.
NUM_PROBLEMS_SHOWN = 8

_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True)
class SliceRecord:
    """One stored part of a tensor: tensor `key` of safetensors file `file` holds [offset, offset + shape)."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offset, self.shape)


@dataclass(frozen=True)
class TensorRecord:
    """A logical tensor: its type (`float32`, `bfloat16`, ...), its global shape and the parts that hold it."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[SliceRecord, ...]


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and sha256 (hexadecimal) of one file of the checkpoint."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    bytes: int
    sha256: str


@dataclass(frozen=True)
class RankPart:
    """What one rank wrote: its slices and the files that hold them (none when it had no slice)."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    format_version: int
    step: int
    rank: int
    world_size: int
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint: `step` finished updates, the configuration, the trainer's state, tensors and files."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    format_version: int
    step: int
    megascale_version: str
    world_size: int
    config: dict[str, Any]
    state: dict[str, Any]
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]


RecordType = TypeVar("RecordType", Manifest, RankPart)


def plain_json(value: Any, where: str) -> Any:
    """`value` as JSON can hold it and give it back unchanged: tuples become lists, anything else unknown is refused.

    NaN and infinities are kept (Python's JSON reads and writes them), so that a best loss of `inf` can be saved.

    Raises:
        ValueError: naming the entry that JSON would lose or change (a key that is no string, an array, a path, ...).
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, float):  # numpy's float64 is one
        return float(value)
    if isinstance(value, list | tuple):
        return [plain_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise ValueError(f"{where} has the key {key!r}: keys must be strings, JSON would change it into one")
        return {key: plain_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise ValueError(f"{where} is of type {type(value).__name__}, which JSON cannot hold; store tensors as slices")


def to_text(record: Manifest | RankPart) -> str:
    """The JSON text of a record: one line per tensor and per file, and the digest of the content."""
    document = asdict(record)
    document["sha256"] = _digest(_canonical(document))
    lines = []
    for key, value in document.items():
        if key in ("tensors", "files") and value:
            entries = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            lines.append(f"  {json.dumps(key)}: {{\n{entries}\n  }}")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_text(text: bytes, path: Path, record_type: type[RecordType]) -> RecordType:
    """The record that `text`, the content of the file `path`, holds.

    Raises:
        UserError: naming `path`, when it is not JSON, of another format version, damaged, or not of this structure.
    """
    try:
        document = json.loads(text.decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): the checkpoint is damaged or was cut short") from None
    if not isinstance(document, dict) or "format_version" not in document:
        raise UserError(f"{path} has no 'format_version': it was not written by megascale, or it is damaged")
    version = document["format_version"]
    if version != FORMAT_VERSION:
        writer = document.get("megascale_version", "another version")
        raise UserError(
            f"{path} has checkpoint format {version!r} (written by megascale {writer}); this megascale reads format "
            f"{FORMAT_VERSION}. Load it with the version that wrote it."
        )
    recorded = document.pop("sha256", None)
    canonical = _canonical(document)
    if recorded != _digest(canonical):
        raise UserError(
            f"{path} does not match its own sha256 (recorded {recorded}, content {_digest(canonical)}): it was changed "
            "or damaged after it was written"
        )
    try:
        # From text again: only of JSON does a strict check accept an array where the record has a tuple.
        return TypeAdapter(record_type).validate_json(json.dumps(document))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise UserError(f"{path} has not the structure of a checkpoint file: {summary(problems)}") from None


def manifest_problems(manifest: Manifest) -> list[str]:
    """Everything that is inconsistent within a manifest: file names and records, and tensors not covered exactly."""
    problems = []
    for name, file in manifest.files.items():
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            problems.append(f"{name!r} is not a plain file name")
        if file.bytes < 0 or not re.fullmatch(r"[0-9a-f]{64}", file.sha256):
            problems.append(f"the record of file {name} holds no valid size and sha256")
    num_uses = Counter((part.file, part.key) for tensor in manifest.tensors.values() for part in tensor.slices)
    problems += [f"{file} gives its tensor {key!r} {uses} times" for (file, key), uses in num_uses.items() if uses > 1]
    unlisted = sorted({file for file, _ in num_uses} - set(manifest.files))
    problems += [f"slices lie in {file}, which is not among the files" for file in unlisted]
    for name, tensor in manifest.tensors.items():
        problem = cover_problem(tensor.shape, [part.box for part in tensor.slices])
        if min(tensor.shape, default=0) < 0:
            problem = f"the shape {list(tensor.shape)} is not a shape"
        if problem is None and math.prod(tensor.shape) == 0 and not tensor.slices:
            problem = "no rank stores it"
        if problem is not None:
            problems.append(f"tensor {name} of shape {list(tensor.shape)}: {problem}")
    return problems


def summary(problems: list[str]) -> str:
    """Problems in one line, the first few in full and the others counted."""
    shown = "; ".join(problems[:NUM_PROBLEMS_SHOWN])
    more = len(problems) - NUM_PROBLEMS_SHOWN
    return f"{shown}; and {more} more" if more > 0 else shown


def _canonical(document: dict[str, Any]) -> str:
    """One text for one content, whatever the spacing and order in the file were."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
