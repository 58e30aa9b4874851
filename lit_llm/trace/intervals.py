"""Sets of time as sorted, disjoint intervals: (n, 2) int64 arrays of [start, end) in nanoseconds."""

from __future__ import annotations

import numpy as np

from lit_llm.trace.columns import Ints

EMPTY: Ints = np.empty((0, 2), dtype=np.int64)


def union(start: Ints, end: Ints) -> Ints:
    """The set of all times in any of the intervals, which may overlap and need no order; empty ones are left out."""
    keep = end > start
    if not keep.all():
        start, end = start[keep], end[keep]
    if not len(start):
        return EMPTY
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    last = np.concatenate((first[1:] - 1, [len(start) - 1]))
    return np.stack([start[first], reach[last]], axis=1)


def length(one: Ints) -> int:
    """Its total time, ns."""
    return int((one[:, 1] - one[:, 0]).sum())


def until(one: Ints, times: Ints) -> Ints:
    """How much of the set lies before each of ``times``, ns."""
    if not len(one):
        return np.zeros(len(times), dtype=np.int64)
    before = np.concatenate(([0], np.cumsum(one[:, 1] - one[:, 0])))
    place = np.searchsorted(one[:, 0], times, side="right")
    behind = np.where(place > 0, one[np.maximum(place - 1, 0), 1], times)  # end of the interval that began last
    return before[place] - np.maximum(behind - times, 0)


def covered(one: Ints, start: Ints, end: Ints) -> Ints:
    """How much of each interval [start, end), which may overlap one another, lies in the set, ns."""
    return until(one, np.maximum(start, end)) - until(one, start)


def contains(one: Ints, times: Ints) -> np.ndarray:
    """Which of ``times`` lie in the set."""
    if not len(one):
        return np.zeros(len(times), dtype=bool)
    place = np.searchsorted(one[:, 0], times, side="right") - 1
    return (place >= 0) & (times < one[np.maximum(place, 0), 1])


def _select(one: Ints, other: Ints, want_other: bool) -> Ints:
    """The part of ``one`` that lies in ``other``, or that does not."""
    points = np.unique(np.concatenate((one.ravel(), other.ravel())))
    if len(points) < 2:
        return EMPTY
    left = points[:-1]
    keep = contains(one, left) & (contains(other, left) == want_other)
    return union(left[keep], points[1:][keep])


def intersect(one: Ints, other: Ints) -> Ints:
    """Times in both."""
    return _select(one, other, True) if len(one) and len(other) else EMPTY


def subtract(one: Ints, other: Ints) -> Ints:
    """Times in ``one`` that are not in ``other``."""
    return _select(one, other, False) if len(one) and len(other) else one


def join(*sets: Ints) -> Ints:
    """Times in any of the sets."""
    together = np.concatenate(sets) if sets else EMPTY
    return union(together[:, 0], together[:, 1])


def clip(one: Ints, start: int, end: int) -> Ints:
    """Times of the set within [start, end)."""
    return union(np.clip(one[:, 0], start, end), np.clip(one[:, 1], start, end))
