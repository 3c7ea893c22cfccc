"""Blends and splits, as numbers and names."""

import pytest

from megascale.config.data_flags import parse_data_path, parse_split
from megascale.utils.errors import UserError


def test_prefixes_alone_have_no_weights():
    assert parse_data_path(["a", "b/c"]) == [(None, "a"), (None, "b/c")]
    assert parse_data_path([]) == []


def test_weights_come_before_their_prefixes():
    assert parse_data_path(["0.3", "a", "7", "b"]) == [(0.3, "a"), (7.0, "b")]
    assert parse_data_path(["1e-2", "./5"]) == [(0.01, "./5")]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["1"], "odd number"),
        (["1", "a", "2"], "odd number"),
        (["a", "1", "b", "2"], "starts with a prefix, but 1 is a number"),
        (["1", "a", "b", "2"], "found 'b' '2'"),
        (["1", "2"], "found '1' '2'"),
        (["0", "a"], "the weight 0 of a must be greater than 0"),
        (["-1", "a"], "the weight -1 of a must be greater than 0"),
        (["inf", "a"], "must be greater than 0 and finite"),
    ],
)
def test_what_is_no_blend(items, message):
    with pytest.raises(UserError, match="--valid-data-path") as error:
        parse_data_path(items, "--valid-data-path")
    assert message in str(error.value)


def test_splits():
    assert parse_split("29,1") == (29.0, 1.0)
    assert parse_split(" 969, 30,1") == (969.0, 30.0, 1.0)
    assert parse_split("1,0") == (1.0, 0.0)


@pytest.mark.parametrize("split", ["29", "29:1", "1,2,3,4", "a,b", "", "nan,1", "inf,1", "-1,2", "0,1", "1,,2"])
def test_what_is_no_split(split):
    with pytest.raises(UserError, match="--split"):
        parse_split(split)
