"""Sets of time against sets of integers."""

from __future__ import annotations

import numpy as np
import pytest

from lit_llm.trace.intervals import EMPTY, clip, contains, covered, intersect, join, length, subtract, union, until


def _points(one: np.ndarray) -> set[int]:
    return {point for start, end in one.tolist() for point in range(start, end)}


def _random(rng: np.random.Generator, most: int = 12) -> tuple[np.ndarray, set[int]]:
    count = int(rng.integers(0, most))
    start = rng.integers(0, 60, count).astype(np.int64)
    end = start + rng.integers(0, 15, count)
    one = union(start, end)
    return one, {point for a, b in zip(start.tolist(), end.tolist(), strict=True) for point in range(a, b)}


@pytest.mark.parametrize("seed", range(60))
def test_sets_of_time_are_those_of_integers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    (one, points), (other, others) = _random(rng), _random(rng)
    assert _points(one) == points
    assert (one[1:, 0] > one[:-1, 1]).all()  # disjoint, and merged where they touch
    assert length(one) == len(points)
    assert _points(intersect(one, other)) == points & others
    assert _points(subtract(one, other)) == points - others
    assert _points(join(one, other)) == points | others
    a, b = sorted(rng.integers(0, 80, 2).tolist())
    assert _points(clip(one, a, b)) == {point for point in points if a <= point < b}
    times = rng.integers(-5, 85, 20).astype(np.int64)
    assert until(one, times).tolist() == [sum(point < time for point in points) for time in times.tolist()]
    assert contains(one, times).tolist() == [time in points for time in times.tolist()]
    ends = times + rng.integers(0, 20, 20)
    assert covered(one, times, ends).tolist() == [
        sum(s <= point < e for point in points) for s, e in zip(times.tolist(), ends.tolist(), strict=True)
    ]


def test_times_since_1970_are_exact() -> None:
    base = 1_790_857_026_000_000_000
    one = union(np.array([base, base + 1]), np.array([base + 3, base + 7]))
    assert one.tolist() == [[base, base + 7]]
    assert length(subtract(one, union(np.array([base + 2]), np.array([base + 3])))) == 6
    assert length(EMPTY) == 0
    assert len(intersect(one, EMPTY)) == 0
    assert subtract(one, EMPTY) is one
