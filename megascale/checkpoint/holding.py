"""Reading a checkpoint while another process of the run removes old ones. No torch.

A reader holds a shared `flock` on the manifest; whoever removes needs the exclusive one and skips the checkpoint when
it does not get it. The system gives a lock back when its process ends, however it ends, so a killed reader leaves
nothing behind. On a file system without `flock` nothing is locked: a reader may then find its checkpoint gone, and says
so.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megascale.checkpoint.manifest import MANIFEST_NAME
from megascale.utils.errors import UserError
from megascale.utils.files import fsync_directory

_logger = logging.getLogger(__name__)


@contextmanager
def held(checkpoint: Path) -> Iterator[None]:
    """Keep the checkpoint from being removed while the block runs. A directory without a manifest is left to others.

    Raises:
        UserError: the checkpoint was removed just before it could be held.
    """
    file = checkpoint / MANIFEST_NAME
    try:
        opened = file.open("rb")
    except OSError:  # whoever reads the manifest next says what is wrong with it
        yield
        return
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH)
        except OSError as error:
            _logger.debug("%s cannot be locked (%s): it is read without", file, error)
        if not _still_named(opened.fileno(), file):
            raise UserError(
                f"checkpoint {checkpoint} was removed just now, by the run that made it (--keep-last): take a newer one"
            )
        yield


def take_away(checkpoint: Path, to: Path) -> bool:
    """Rename a checkpoint that nobody holds to `to`, durably; False when somebody does, and nothing was changed.

    Raises:
        OSError: it could not be renamed, or has no manifest.
    """
    # Open for writing, as an exclusive lock on NFS demands; nothing is written.
    with (checkpoint / MANIFEST_NAME).open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            _logger.debug("%s cannot be locked (%s): it is removed without", file.name, error)
        os.rename(checkpoint, to)
    # Before anything in it goes: a checkpoint must not come back with files missing after a power cut.
    fsync_directory(to.parent)
    return True


def _still_named(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one that `path` names."""
    try:
        named = path.stat()
    except OSError:
        return False
    opened = os.fstat(descriptor)
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)
