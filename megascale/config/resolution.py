"""From what a user gave to what is run, saved and resumed."""

from dataclasses import replace

from megascale.config.constraints import broken, require_valid
from megascale.config.derive import derive
from megascale.config.schema import RunConfig

__all__ = ["resolve"]


def resolve(config: RunConfig, world_size: int, tokenizer_vocab_size: int | None = None) -> RunConfig:
    """Return `config` with everything filled in that can be derived, checked for a launch on `world_size` processes.

    The result is what a run saves. It resolves to itself, also on another number of processes: the world size of this
    launch is checked but not recorded, so that a run can go on with more or fewer data-parallel ranks, and the global
    batch size is recorded, so that it then stays what it was.

    Raises:
        UserError: a rule is broken; all broken rules in one message.
    """
    require_valid(broken(config, world_size, tokenizer_vocab_size=tokenizer_vocab_size, final=True))
    full = derive(config, world_size, tokenizer_vocab_size)
    return replace(full, parallel=replace(full.parallel, world_size=None))
