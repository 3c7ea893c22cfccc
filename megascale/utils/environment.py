"""Which process of how many this is, as the launcher says."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from megascale.utils.errors import UserError

__all__ = ["LaunchEnvironment"]

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process among all processes of the run (`rank` of `world_size`) and among those of its host (`local_*`).

    restart_count: how often torchrun has started the ranks again (--max-restarts) after one of them failed.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    hostname: str = "localhost"
    restart_count: int = 0

    @classmethod
    def from_environ(cls, env: Mapping[str, str] | None = None) -> "LaunchEnvironment":
        """Read the variables that torchrun sets; a process started plainly is rank 0 of 1.

        env: the environment to read, None for that of this process.

        Raises:
            UserError: some of the variables are set and others are not, or a value makes no sense.
        """
        environment = os.environ if env is None else env
        hostname = socket.gethostname()
        present = [name for name in _VARIABLES if name in environment]
        if not present:
            return cls(hostname=hostname)
        missing = [name for name in _VARIABLES if name not in environment]
        if missing:
            found = ", ".join(f"{name}={environment[name]}" for name in present)
            raise UserError(
                f"the launch environment is half set: {found}, but {', '.join(missing)} not set. torchrun sets all of "
                f"{', '.join(_VARIABLES)}; set the missing ones too, or unset the others to run as a single process."
            )
        rank, local_rank, world_size, local_world_size = (_whole_number(name, environment[name]) for name in _VARIABLES)
        problems = [
            f"{name}={low} must be at least 0 and less than {bound_name}={bound}"
            for name, low, bound_name, bound in (
                ("RANK", rank, "WORLD_SIZE", world_size),
                ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size),
            )
            if not 0 <= low < bound
        ]
        if local_world_size > world_size:
            problems.append(f"LOCAL_WORLD_SIZE={local_world_size} must not exceed WORLD_SIZE={world_size}")
        if problems:
            raise UserError("the launch environment contradicts itself: " + "; ".join(problems) + ".")
        restart_count = _whole_number(_RESTARTS, environment[_RESTARTS]) if _RESTARTS in environment else 0
        return cls(rank, local_rank, world_size, local_world_size, hostname, restart_count)


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"environment variable {name}={text!r} is not a whole number.") from None
