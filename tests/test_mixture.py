"""The schedule of a mixture: never a whole sample off, and the same however it is read."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from lit_llm.data.mixture import MAX_PERIOD, Mixture
from lit_llm.errors import UserError

RANDOM = random.Random(0)
CASES: list[list[float | str | Fraction]] = [
    [1.0],
    [0.7],
    [1, 1],
    [1, 1, 1, 1, 1, 1, 1],
    [0.3, 0.7],
    [0.5, 0.3, 0.2],
    [0.001, 0.999],
    [0.001, 0.001, 0.001, 0.997],
    [1, 2, 4, 8, 16, 32, 64],
    ["1/3", "1/7", Fraction(2, 21)],
    [1e-3, 2, 3e1],
    [12_345, 1, 1, 99],
]
for sources in (2, 3, 4, 5, 6, 7, 7):
    CASES.append([round(RANDOM.random() + 1e-3, 3) for _ in range(sources)])
    CASES.append([RANDOM.randint(1, 30) for _ in range(sources)])


@pytest.mark.parametrize("weights", CASES, ids=str)
def test_every_prefix_is_within_one_sample(weights: list[float | str | Fraction]) -> None:
    mixture = Mixture(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    n = 2 * mixture.period + 3
    sources, within = mixture.source_of(np.arange(n))
    # |count - n w / W| < 1 in whole numbers: |count W - n w| < W.
    scale = np.lcm.reduce([weight.denominator for weight in exact])
    whole = np.array([int(weight * int(scale)) for weight in exact], dtype=np.int64)
    counts = np.zeros(len(weights), dtype=np.int64)
    prefixes = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    off = np.abs(prefixes * whole.sum() - np.arange(1, n + 1)[:, None] * whole)
    assert (off < whole.sum()).all()
    for place in range(min(n, 2000)):  # one by one
        assert within[place] == counts[sources[place]]
        assert mixture.counts(place).tolist() == counts.tolist()
        counts[sources[place]] += 1
    assert mixture.counts(n).tolist() == prefixes[-1].tolist()


def test_random_access_equals_the_sequence() -> None:
    mixture = Mixture([0.5, 0.3, 0.15, 0.05])
    sources, within = mixture.source_of(np.arange(5000))
    places = np.random.default_rng(0).integers(0, 5000, 1000)
    some = mixture.source_of(places)
    assert np.array_equal(some[0], sources[places])
    assert np.array_equal(some[1], within[places])
    assert some[0].dtype == some[1].dtype == np.int64
    assert [len(x) for x in mixture.source_of(np.array([], dtype=np.int64))] == [0, 0]


def test_each_source_is_read_in_order_without_gaps() -> None:
    mixture = Mixture([3, 5, 1])
    sources, within = mixture.source_of(np.arange(1000))
    for source in range(3):
        assert within[sources == source].tolist() == list(range(mixture.counts(1000)[source]))


def test_far_places_are_exact() -> None:
    mixture = Mixture([0.7, 0.2, 0.1])
    for n in (10**12 + 7, 2**62 - 1, 2**62):
        counts = mixture.counts(n)
        assert sum(counts.tolist()) == n
        assert all(abs(Fraction(int(c)) - n * w) < 1 for c, w in zip(counts, mixture.shares / 10, strict=True))
        source, within = mixture.source_of(np.array([n - 1]))
        assert mixture.counts(n)[source[0]] == within[0] + 1
        assert mixture.counts(n - 1)[source[0]] == within[0]


def test_the_schedule_is_stable_over_releases() -> None:
    # A change here would silently change the data of every run that is resumed.
    assert Mixture([0.5, 0.3, 0.2]).source_of(np.arange(10))[0].tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]


def test_equal_proportions_give_equal_schedules() -> None:
    want = Mixture([1, 2]).source_of(np.arange(30))
    for weights in ([0.1, 0.2], ["1/3", "2/3"], [50, 100.0], [np.float64(0.25), np.float64(0.5)]):
        assert np.array_equal(Mixture(weights).source_of(np.arange(30)), want)


@pytest.mark.parametrize(
    "weights",
    [[1, 3_000_000], [0.333333333, 0.66666667], [123_456_789, 987_654_321, 555_555_555], [1e-30, 1.0, 1.0], [1e300, 1]],
)
def test_a_long_period_is_rounded(weights: list[float]) -> None:
    mixture = Mixture(weights)
    assert mixture.period == MAX_PERIOD
    assert (mixture.shares >= 1).all()
    total = sum(Fraction(str(weight)) for weight in weights)
    for share, weight in zip(mixture.shares.tolist(), weights, strict=True):
        proportion = Fraction(str(weight)) / total
        assert abs(Fraction(share, MAX_PERIOD) - proportion) <= Fraction(1, MAX_PERIOD)
        for n in (1000, 123_456, MAX_PERIOD):
            count = mixture.counts(n)[weights.index(weight)]
            assert abs(int(count) - n * proportion) < 2


@pytest.mark.parametrize("weight", [0, -1, 0.0, -0.5, float("nan"), float("inf"), "much", "1/0", "", None, True])
def test_a_bad_weight_is_refused_by_name(weight: float) -> None:
    with pytest.raises(UserError, match=r"the weight of store wiki is .*; weights are finite numbers above 0") as error:
        Mixture([1, weight], names=["books", "wiki"])
    assert "\n" not in str(error.value)


def test_no_store_is_refused() -> None:
    with pytest.raises(UserError, match="at least one store"):
        Mixture([])
