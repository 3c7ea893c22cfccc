"""The `.json` beside a `.bin`/`.idx` pair: which tokenizer made it, of what, and what the files must hash to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from megascale.data.indexed import IndexedDataset, WrittenFile
from megascale.utils.errors import UserError
from megascale.utils.files import atomic_writer

FORMAT_VERSION: Final = 1


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer as far as a data set needs to know it; `fingerprint` is that of `Tokenizer`."""

    tokenizer_type: str
    fingerprint: str
    vocab_size: int
    eod_id: int


@dataclass(frozen=True)
class SourceFile:
    """An input file as it was named, with its bytes on disk."""

    path: str
    bytes: int


@dataclass(frozen=True)
class Sidecar:
    """How a data set was made.

    num_empty: documents left out because they had no text. skipped: other records left out, by reason.
    append_eod: whether each document ends in the tokenizer's end-of-document token.
    """

    format_version: int
    megascale_version: str
    tokenizer: TokenizerRecord
    append_eod: bool
    json_key: str
    num_documents: int
    num_tokens: int
    num_empty: int
    skipped: dict[str, int]
    bin: WrittenFile
    idx: WrittenFile
    sources: list[SourceFile]


def sidecar_path(prefix: str | Path) -> Path:
    """Where the sidecar of a data set lies."""
    return Path(f"{prefix}.json")


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    """Writes the sidecar, at once or not at all."""
    with atomic_writer(sidecar_path(prefix), "w") as file:
        file.write(json.dumps(asdict(sidecar), indent=2) + "\n")


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """The sidecar of a data set, None where there is none (data sets made by Megatron).

    Raises:
        UserError: the file is not a sidecar, or of a version this program does not know.
    """
    path = sidecar_path(prefix)
    if not path.is_file():
        return None
    try:
        sidecar = TypeAdapter(Sidecar).validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(
            f"{path} is not the record of a data set ({where}: {first['msg']}); prepare the data again, or remove the "
            "file to use the data unchecked"
        ) from None
    if sidecar.format_version != FORMAT_VERSION:
        raise UserError(f"{path} has format version {sidecar.format_version}; only version {FORMAT_VERSION} is known")
    return sidecar


def require_belongs(sidecar: Sidecar, dataset: IndexedDataset) -> None:
    """Refuses a pair whose sizes are not those that the sidecar tells; hashes are for `verify_dataset`.

    Raises:
        UserError: naming the file and both numbers.
    """
    for path, written in ((dataset.bin_path, sidecar.bin), (dataset.idx_path, sidecar.idx)):
        size = path.stat().st_size
        if size != written.bytes:
            raise UserError(
                f"{path} is {size} bytes long, but {sidecar_path(dataset.prefix)} describes a file of {written.bytes}: "
                "they are of different data sets"
            )
