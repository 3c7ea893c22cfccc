"""Blending: shares kept to within a sample, each source read in order without gaps, nothing depends on the past."""

from fractions import Fraction

import numpy as np
import pytest

from megascale.data.blend import Blend
from megascale.utils.errors import UserError


class Numbers:
    """A source whose sample g is [name, g]."""

    def __init__(self, name, size=10**9, seq_length=1):
        self.name, self.samples_per_epoch, self.seq_length = name, size, seq_length

    def sample(self, index):
        return np.array([self.name, index])

    def origin(self, index, position):
        return f"source {self.name} sample {index}"


WEIGHTS = [[1], [0.3, 0.7], [1, 1], [1e-6, 1], [5, 3, 2], [0.1, 0.2, 0.3, 0.4], [1, 1, 1, 1, 1], [8, 4, 2, 1, 1, 7, 3]]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_shares_hold_after_every_sample_and_sources_are_read_without_gaps(weights):
    blend = Blend(weights, [Numbers(name) for name in range(len(weights))])
    exact = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    num_levels = (len(weights) - 1).bit_length()
    counts = [0] * len(weights)
    for number in range(2_000):
        assert blend.counts(number) == tuple(counts)
        for count, share in zip(counts, exact, strict=True):
            assert abs(count - number * share) <= Fraction(num_levels, 2)
        source, within = blend.locate(number)
        assert within == counts[source]
        assert blend.sample(number).tolist() == [source, within]
        counts[source] += 1


def test_random_choice_would_not_hold_the_shares():
    """The bound above means something: drawing the source at random breaks it within 2,000 samples."""
    drawn = np.cumsum(np.random.RandomState(0).rand(2_000) < 0.3)
    assert np.abs(drawn - 0.3 * np.arange(1, 2_001)).max() > 5


def test_far_numbers_cost_nothing_and_stay_exact():
    blend = Blend([0.3, 0.7], [Numbers(0), Numbers(1)])
    far = 10**15
    counts = blend.counts(far)
    assert sum(counts) == far
    source, within = blend.locate(far)
    assert within == counts[source]


def test_an_epoch_ends_before_any_source_repeats():
    sizes = (30, 100)
    blend = Blend([0.5, 0.5], [Numbers(name, size) for name, size in enumerate(sizes)])
    end = blend.samples_per_epoch
    assert all(count <= size for count, size in zip(blend.counts(end), sizes, strict=True))
    assert any(count > size for count, size in zip(blend.counts(end + 1), sizes, strict=True))


def test_weights_by_size_give_every_sample_once():
    sizes = (7, 1, 40, 13, 2)
    blend = Blend(sizes, [Numbers(name, size) for name, size in enumerate(sizes)])
    assert blend.samples_per_epoch == sum(sizes)
    seen = {tuple(blend.sample(number)) for number in range(sum(sizes))}
    assert seen == {(name, index) for name, size in enumerate(sizes) for index in range(size)}


def test_origin_is_the_sources_own():
    assert Blend([1, 1], [Numbers(0), Numbers(1)]).origin(3, 0) in ("source 0 sample 1", "source 1 sample 1")


def test_wrong_blends():
    with pytest.raises(UserError, match="above 0, not 1, 0"):
        Blend([1, 0], [Numbers(0), Numbers(1)])
    with pytest.raises(ValueError, match="2 weights for 1 sources"):
        Blend([1, 1], [Numbers(0)])
    with pytest.raises(ValueError, match="different sequence lengths"):
        Blend([1, 1], [Numbers(0), Numbers(1, seq_length=2)])
