"""Who comes late: arrivals at collectives on one clock, waits that follow, delay that a rank causes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lit_llm.trace.columns import Ints
from lit_llm.trace.intervals import covered, intersect, union
from lit_llm.trace.matching import Clock, Match
from lit_llm.trace.per_rank import RankSummary

_PARTIAL = 0.2
"""Collectives of which some member was not seen, over those that are whole: a few are cut off at the window's ends."""


@dataclass
class Lags:
    """Per step number and rank, ns; -1 where a rank has no such step."""

    steps: list[int]
    lag: Ints
    """(steps, ranks): the latest arrival after the first one's, over the step's collectives."""
    waits: Ints
    """(steps, ranks): time in which communication was exposed and somebody had not come yet."""
    delay: Ints
    """(steps, ranks): how much less a rank waited than the others usually did, at least 0: who is late waits least.

    That is their median, on GPUs their upper quartile."""
    waiting: list[Ints]
    """For each rank (n, 2): when it waited so, on its own clock."""
    complete: np.ndarray
    """(ranks,) bool: whether all members of (nearly) all its collectives were seen, so that no wait is missed."""


def find_lags(
    ranks: Sequence[RankSummary], matches: Sequence[Match], clocks: Sequence[Clock], everybody: bool = True
) -> Lags:
    """Arrivals and waits, with the clocks' offsets taken off.

    Args:
        ranks: of one run.
        matches: their collectives.
        clocks: their clocks.
        everybody: whether these are all its ranks.
    """
    shift = np.array([one.offset if one.applied and one.offset is not None else 0 for one in clocks], dtype=np.int64)
    lag: dict[int, Ints] = {}
    spans: list[list[tuple[int, int]]] = [[] for _ in ranks]
    compared = np.zeros(len(ranks), dtype=bool)
    whole, partial = np.zeros((2, len(ranks)), dtype=np.int64)
    for one in matches:
        if one.step >= 0 and one.kind != "send_recv":
            size = one.size or (len(ranks) if everybody else len(ranks) + 1)
            (partial if len(one.place) < size else whole)[one.place] += 1
        if len(one.place) < 2:
            continue
        compared[one.place] = True
        arrival, off = one.arrival - shift[one.place], shift[one.place]
        until = np.minimum(arrival.max() + off, one.end)
        since = np.maximum(one.begin, one.arrival)
        for place, start, end in zip(one.place.tolist(), since.tolist(), until.tolist(), strict=True):
            if end > start:
                spans[place].append((start, end))
        if one.step >= 0 and one.kind != "send_recv":
            row = lag.setdefault(one.step, np.full(len(ranks), -1, dtype=np.int64))
            np.maximum.at(row, one.place, arrival - arrival.min())
    waiting = []
    for one_rank, rows in zip(ranks, spans, strict=True):
        both = np.array(rows, dtype=np.int64).reshape(-1, 2)
        waiting.append(intersect(one_rank.bare, union(both[:, 0], both[:, 1])))
    steps = sorted(lag)
    row_of = {step: row for row, step in enumerate(steps)}
    waits = np.full((len(steps), len(ranks)), -1, dtype=np.int64)
    for place, one_rank in enumerate(ranks):
        if not compared[place]:
            continue
        times = covered(waiting[place], one_rank.windows[:, 0], one_rank.windows[:, 1])
        for step, waited in zip(one_rank.marks.numbers.tolist(), times.tolist(), strict=True):
            if step in row_of:
                waits[row_of[step], place] = waited
    delay = np.full_like(waits, -1)
    for at in range(len(steps)):
        known = np.flatnonzero(waits[at] >= 0)
        for place in known.tolist() if len(known) > 1 else ():
            others = waits[at][known[known != place]]
            # Half of a GPU run's ranks may lag; a busy CPU's waits are too uneven for that.
            usual = np.percentile(others, 75 if ranks[place].device == "gpu" else 50)
            delay[at, place] = max(int(usual) - int(waits[at, place]), 0)
    lags = np.stack([lag[step] for step in steps]) if steps else np.zeros((0, len(ranks)), dtype=np.int64)
    return Lags(steps, lags, waits, delay, waiting, compared & (partial <= _PARTIAL * whole))
