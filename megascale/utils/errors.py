"""The one kind of error a user sees as a message, and how a process ends with it, alone or as one of many."""

import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # environment.py raises UserError, so the import at run time goes the other way
    from megascale.utils.environment import LaunchEnvironment

__all__ = ["USER_ERROR_EXIT_CODE", "UserError", "exit_with"]

USER_ERROR_EXIT_CODE = 2


class UserError(ValueError):
    """A user's mistake, not the program's; the message names the flag or file, the values, the rule and the remedy."""


def exit_with(error: UserError, environment: "LaunchEnvironment", grace_seconds: float = 10.0) -> NoReturn:
    """End this process with exit code 2, so that one mistake is printed once, however many ranks found it.

    Rank 0 prints and leaves at once; the launcher then ends the others with SIGTERM, and they leave silently. A rank
    that nobody ended within `grace_seconds` is alone with its error (a file that is missing on its host only), so it
    prints too, naming itself.
    """
    if environment.rank == 0:
        _print_and_exit(str(error))
    signal.signal(signal.SIGTERM, _exit_silently)
    time.sleep(grace_seconds)
    _print_and_exit(f"rank {environment.rank} on {environment.hostname}: {error}")


def _exit_silently(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(USER_ERROR_EXIT_CODE)


def _print_and_exit(message: str) -> NoReturn:
    # One write of one string: lines of two ranks cannot interleave inside a message.
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    raise SystemExit(USER_ERROR_EXIT_CODE)
