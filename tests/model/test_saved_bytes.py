"""What a layer keeps for its backward pass: measured, and compared with what the concept page says.

In units of one activation, s b h elements of float64. A layer of the tiny GPT (4 heads of 4, inner features 4h) with t
ranks keeps, per rank:

    outside   2 inputs of norms, 2 outputs of them (inputs of the entering products)    4     (/t with a split sequence)
              mean and deviation of each token, twice                                   1/4   (likewise)
              2 masks of hidden dropout, if any                                         2     (likewise)
    inside    query, key and value 3, attention's output 1, the MLP's inner features
              before and after the activation 8                                         12/t
    core      a fused kernel's log-sum-exp per head and token                           (1/4)/t
              a plain one (attention dropout): probabilities, mask and product, each s^2
              per head, 9, scaled query and key 2                                       11/t
"""

from __future__ import annotations

import pytest

from megascale.config.layout import ParallelLayout
from megascale.parallel.context import ParallelContext
from tests.model.saved import saved_bytes
from tests.model.tiny import TINY, tiny_batch, tiny_gpt

SAMPLES, SEQUENCE = 3, 12
UNIT = SAMPLES * SEQUENCE * TINY["hidden_size"] * 8


def _units_per_layer(context: ParallelContext, granularity: str, dropout: float, sequence_parallel: bool) -> float:
    def measure(num_layers: int) -> int:
        model = tiny_gpt(
            context,
            num_layers=num_layers,
            recompute_granularity=granularity,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            sequence_parallel=sequence_parallel,
            overlap=True,
        )
        batch = tiny_batch(SAMPLES, SEQUENCE)
        return saved_bytes(model, lambda: model(*batch))

    return (measure(6) - measure(2)) / 4 / UNIT


def _expected(granularity: str, dropout: float, sequence_parallel: bool, tp: int) -> float:
    share = tp if sequence_parallel else 1
    if granularity == "full":
        return 1 / share
    core = 0.0 if granularity == "selective" else 11 / tp if dropout else 0.25 / tp
    return (4.25 + (2 if dropout else 0)) / share + 12 / tp + core


@pytest.mark.parametrize("granularity", ["none", "selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_a_layer_keeps_what_is_documented(ranks, granularity, dropout, tp, sequence_parallel) -> None:
    measured = ranks(ParallelLayout(tp=tp), _units_per_layer, granularity, dropout, sequence_parallel)
    assert measured == pytest.approx([_expected(granularity, dropout, sequence_parallel, tp)] * tp, rel=1e-9)


def test_with_the_sequence_split_every_byte_is_divided(ranks) -> None:
    """And without it, what lies outside is not."""
    arguments = ("none", 0.1)
    alone = ranks(ParallelLayout(tp=1), _units_per_layer, *arguments, False)[0]
    assert ranks(ParallelLayout(tp=4), _units_per_layer, *arguments, True)[0] == pytest.approx(alone / 4)
    assert ranks(ParallelLayout(tp=4), _units_per_layer, *arguments, False)[0] > alone / 4 + 4
