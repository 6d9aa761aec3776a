"""A mixture keeps its proportions at every moment, and needs no memory of what came before."""
import random

import numpy as np
import pytest

from jobs.data.mixture import Mixture
from jobs.spec.sources import LONGEST_PERIOD, whole_shares

WEIGHTS = {
    "one": (3.0,),
    "two": (1.0, 1.0),
    "uneven": (0.7, 0.3),
    "written as decimals": (0.1, 0.2, 0.7),  # not of binary fractions
    "LLaMA's": (67.0, 15.0, 4.5, 4.5, 4.5, 2.5, 2.0),
    "one large, many small": (0.81,) + (0.01,) * 19,
    "a large and small ones": (1000.0, 1.0, 1.0),
    "token counts": (123_456_789_012.0, 98_765_432_109.0, 7_000_000_001.0),
}
SHARES = {  # weights → samples of a period
    (2.0, 1.0): (2, 1),
    (0.1, 0.2, 0.7): (1, 2, 7),
    (50.0, 50.0): (1, 1),
    (67.0, 33.0): (67, 33),
    (1e-4, 1.0): (1, 10000),
}


def random_weights(seed: int) -> tuple[float, ...]:
    rng = random.Random(seed)
    return tuple(round(10 ** rng.uniform(-2, 0), 3) for _ in range(rng.randint(2, 9)))


@pytest.mark.parametrize("weights", [*WEIGHTS.values(), *map(random_weights, range(20))], ids=str)
def test_proportions_are_exact_to_one_sample_over_every_prefix(weights):
    mixture = Mixture(weights)
    shares = np.array(whole_shares(weights))
    sources, _ = mixture.locate(np.arange(2 * mixture.period + 1))
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    ideal = np.arange(1, len(sources) + 1)[:, None] * (shares / shares.sum())
    assert np.abs(counts - ideal).max() < 1
    # and the shares are the weights: exactly, or where they had to be rounded to a long period
    exact = np.array(weights) / sum(weights)
    assert np.abs(shares / shares.sum() - exact).max() < (1e-12 if shares.sum() < LONGEST_PERIOD else 1e-4)


@pytest.mark.parametrize("weights", SHARES)
def test_weights_are_taken_as_they_are_written(weights):
    assert whole_shares(weights) == SHARES[weights]


def test_a_source_that_would_get_nothing_is_named():
    with pytest.raises(ValueError) as refusal:
        whole_shares((1.0, 1e-7, 1.0))
    assert refusal.value.args == (1,)


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_each_source_is_counted_without_gaps(weights):
    mixture = Mixture(weights)
    sources, ordinals = mixture.locate(np.arange(3 * mixture.period))
    for source in range(len(weights)):
        here = ordinals[sources == source]
        assert (here == np.arange(len(here))).all()


def test_any_sample_is_found_without_those_before_it():
    mixture = Mixture((0.7, 0.2, 0.1))
    sources, ordinals = mixture.locate(np.arange(100))
    for n in (0, 7, 99, 31):
        assert [int(found[0]) for found in mixture.locate(np.array([n]))] == [sources[n], ordinals[n]]
    far = 10**15
    source, ordinal = mixture.locate(np.array([far]))
    assert source[0] == sources[0] and ordinal[0] == far // 10 * (7, 2, 1)[source[0]] + ordinals[0]
