"""A checkpoint is compared with the run that would go on from it, also when it is older than some of the options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megascale.config.serialization import to_dict
from megascale.train.prepare import config_changes, require_same_model
from megascale.utils.errors import UserError
from tests.train.training import small_config

# Options of the model that came after the first checkpoints.
LATER = (
    "num_query_groups",
    "position_embedding_type",
    "rotary_base",
    "normalization",
    "norm_position",
    "activation",
    "disable_bias_linear",
    "untie_embeddings_and_output_weights",
)


def _manifest(**model: Any) -> Any:
    """What is compared of a manifest: a resolved configuration from before the options."""
    values = to_dict(small_config())
    values["model"] = {name: value for name, value in values["model"].items() if name not in LATER} | model
    return SimpleNamespace(config=values)


def test_a_checkpoint_from_before_the_options_goes_on_without_them() -> None:
    config = small_config()
    assert config.model.num_query_groups == 4, "resolved, where the checkpoint has nothing"
    require_same_model(config, _manifest(), None)
    assert config_changes(_manifest(), config) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_query_groups": 2}, "--num-query-groups 4 in the checkpoint, 2 now"),
        ({"normalization": "RMSNorm"}, "--normalization LayerNorm in the checkpoint, RMSNorm now"),
        ({"position_embedding_type": "rope"}, "--position-embedding-type learned_absolute in the checkpoint, rope now"),
    ],
)
def test_an_option_that_the_checkpoint_lacks_makes_another_model(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        require_same_model(small_config(model=changes), _manifest(), None)


def test_another_base_of_rotation_is_another_model() -> None:
    """It shapes no tensor, but nothing that was learned would hold."""
    before = _manifest(position_embedding_type="rope", rotary_base=10000.0, num_query_groups=4)
    config = small_config(model={"position_embedding_type": "rope", "rotary_base": 500000.0})
    with pytest.raises(UserError, match=r"--rotary-base 10000\.0 in the checkpoint, 500000\.0 now"):
        require_same_model(config, before, None)
