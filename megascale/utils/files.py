"""Files that are either wholly there or not there at all, and their hashes."""

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

__all__ = ["atomic_writer", "fsync_directory", "sha256_of"]

_CHUNK_BYTES = 1 << 20


@contextmanager
def atomic_writer(path: str | os.PathLike[str], mode: Literal["w", "wb"] = "wb") -> Iterator[IO[Any]]:
    """Yield a file open for writing (UTF-8 for "w") that becomes `path`, durably, when the block ends without error.

    The bytes go to a temporary file beside the target, which is flushed, synced to disk and then renamed over it; the
    directory is synced last, so that the new name survives a power cut too. When the block raises, the temporary file
    is removed and whatever stood at `path` before is untouched.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f'atomic_writer writes whole files: mode is "w" or "wb", not {mode!r}')
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    # Not tempfile: its files are readable by their owner only, and a rename would keep that for the finished file.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        text = mode == "w"
        with os.fdopen(descriptor, mode, encoding="utf-8" if text else None, newline="\n" if text else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(target.parent)


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in the directory `path` durable: a rename is only on disk once its directory is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits, reading it in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
