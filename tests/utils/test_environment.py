"""Who this process is comes from four variables, which are all set or all absent."""

import socket

import pytest

from megascale.utils.environment import LaunchEnvironment
from megascale.utils.errors import UserError

_TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}


def test_a_plain_process_is_rank_0_of_1():
    environment = LaunchEnvironment.from_environ({"HOME": "/root"})
    assert environment == LaunchEnvironment(0, 0, 1, 1, socket.gethostname())


def test_torchruns_variables_are_read():
    environment = LaunchEnvironment.from_environ(_TORCHRUN)
    assert environment == LaunchEnvironment(
        rank=5, local_rank=1, world_size=8, local_world_size=4, hostname=socket.gethostname()
    )


@pytest.mark.parametrize("missing", _TORCHRUN)
def test_a_half_set_environment_is_refused_naming_what_is_missing(missing):
    half = {name: value for name, value in _TORCHRUN.items() if name != missing}
    with pytest.raises(UserError, match=f"but {missing} not set") as error:
        LaunchEnvironment.from_environ(half)
    for name, value in half.items():
        assert f"{name}={value}" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "RANK=8 must be at least 0 and less than WORLD_SIZE=8"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 must be at least 0 and less than LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "16"}, "LOCAL_WORLD_SIZE=16 must not exceed WORLD_SIZE=8"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not a whole number"),
    ],
)
def test_values_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        LaunchEnvironment.from_environ({**_TORCHRUN, **changes})


def test_contradictions_are_reported_together():
    with pytest.raises(UserError) as error:
        LaunchEnvironment.from_environ({**_TORCHRUN, "RANK": "9", "LOCAL_RANK": "7"})
    assert "RANK=9" in str(error.value)
    assert "LOCAL_RANK=7" in str(error.value)
