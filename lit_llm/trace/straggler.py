"""Does a rank keep the others waiting, and why: with a threshold, and the right to say that nothing can be said.

Ranks in lockstep take equally long for a step; the late one is the one that does not wait. So a rank is judged by how
much less it waited than the median of the others (``Lags.delay``), which needs no critical path, holds for any layout
of groups, and does not count a wait for several outstanding collectives twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lit_llm.trace.lags import Lags
from lit_llm.trace.per_rank import RankSummary
from lit_llm.trace.results import Straggler

Cause = Literal["data_loading", "slow_device", "slow_host", "uneven_work", "unknown"]
SHARE = 0.05
"""Of a step that a delay must be."""
LEAST = {"gpu": 300_000, "cpu": 5_000_000}
"""ns that it must be; starting values, the CPU's fitted on small runs of two busy cores."""
LED = 2 / 3
"""Share of the steps in which the rank must be the latest."""


@dataclass
class Finding:
    """The rank that delays most, and how sure that is."""

    place: int
    delay: int
    """ns a step, the median."""
    step_ns: int
    led: int
    steps: int
    cause: Cause
    excess: dict[str, int]
    """ns a step by which the rank exceeds the median of the others: data, ops, launch, rest."""
    others: list[int]
    """Places of further ranks that delay about as much."""
    strong: bool
    """Well above the threshold, and in nearly all steps."""
    waited_for: bool = True
    """Whether the others' waits show it."""


def threshold(ranks: Sequence[RankSummary], step_ns: float) -> float:
    """What a delay must exceed, ns."""
    return max(LEAST[ranks[0].device], SHARE * step_ns)


def step_length(ranks: Sequence[RankSummary]) -> int:
    """Median length of a step over all ranks, ns; 0 without marks."""
    times = [
        one.marks.lengths if one.device == "cpu" else one.windows[:, 1] - one.windows[:, 0]
        for one in ranks
        if len(one.windows)
    ]
    together = np.concatenate(times) if times else np.zeros(0)
    return int(np.median(together[together > 0])) if (together > 0).any() else 0


def find_straggler(ranks: Sequence[RankSummary], lags: Lags) -> Finding | None:
    """The rank that is late in most steps by more than the threshold, and those like it; None: no rank is."""
    usable = comparable(lags)
    if len(usable) < 2:
        return None
    delay = lags.delay[usable]
    middle = np.array([np.median(column[column >= 0]) if (column >= 0).any() else -1 for column in delay.T])
    place = int(middle.argmax())
    step_ns = step_length(ranks)
    least = threshold(ranks, step_ns)
    found = None
    if middle[place] > least:
        order = np.argsort(-middle, kind="stable").tolist()
        alike = [one for one in order if middle[one] > max(least, middle[place] / 2)]
        led = int(((delay[:, place] > least) & (delay[:, place] >= delay.max(axis=1) / 2)).sum())
        excess = excess_of(ranks, place, alike)
        cause = _cause(ranks, place, alike, int(middle[place]), excess)
        gpu, low = ranks[place].device == "gpu", np.sort(delay[:, place])[len(usable) // 4]
        sure = gpu or cause == "data_loading"
        # On a CPU a neighbour's load slows a rank for a while: that is no finding to act on.
        if led >= LED * len(usable) and (sure or (middle[place] > 4 * least and low > 2 * least)):
            factor = 1.2 if gpu and cause != "unknown" else 1.5
            strong = middle[place] > factor * least and low > (least if sure else 3 * least)
            if not sure:
                explained = excess["ops"] + excess["rest"] + max(excess["data"], 0)
                strong = strong and explained > 0.6 * middle[place]
            found = Finding(
                place, int(middle[place]), step_ns, led, len(usable), cause, excess, alike[1:], bool(strong)
            )
    return found or _starved_rank(ranks, step_ns)


def comparable(lags: Lags) -> list[int]:
    """Rows of steps in which two ranks or more can be compared."""
    return [row for row in range(len(lags.steps)) if (lags.delay[row] >= 0).sum() >= 2]


def _starved_rank(ranks: Sequence[RankSummary], step_ns: int) -> Finding | None:
    """A rank of a CPU run that waits for its data far longer than the others, even where their waits do not show it.

    With more ranks than cores the others compute in the time that it leaves them, and nobody waits. On a GPU the host
    runs ahead, so that such a wait may cost nothing.
    """
    if ranks[0].device == "gpu":
        return None
    for place in range(len(ranks)):
        rows = excess_by_step(ranks, place, "data")
        more = [value for value in rows if value > max(LEAST["cpu"], 2 * SHARE * step_ns)]
        if len(rows) >= 2 and len(more) >= LED * len(rows):
            excess = excess_of(ranks, place)
            return Finding(
                place, int(np.median(rows)), step_ns, len(more), len(rows), "data_loading", excess, [], False, False
            )
    return None


def excess_of(
    ranks: Sequence[RankSummary], place: int, alike: Sequence[int] = (), step: int | None = None
) -> dict[str, int]:
    """By how much its own times exceed the median of the others', ns a step: the median over steps, or of one step."""
    found = {}
    for what in ("data", "ops", "launch", "rest", "calls"):
        values = excess_by_step(ranks, place, what, alike, step)
        found[what] = int(np.median(values)) if values else 0
    return found


def excess_by_step(
    ranks: Sequence[RankSummary], place: int, what: str, alike: Sequence[int] = (), step: int | None = None
) -> list[float]:
    """For each step (or one alone) that this rank has: its time less the median of the others', ns."""
    skipped = {place, *alike}
    others = [one for number, one in enumerate(ranks) if number not in skipped] or [
        one for number, one in enumerate(ranks) if number != place
    ]
    mine = ranks[place]
    found = []
    for number, value in zip(mine.marks.numbers.tolist(), mine.work[what].tolist(), strict=True):
        if step is not None and number != step:
            continue
        theirs = [int(one.work[what][row]) for one in others for row in np.flatnonzero(one.marks.numbers == number)[:1]]
        if theirs:
            found.append(value - float(np.median(theirs)))
    return found


def _cause(ranks: Sequence[RankSummary], place: int, alike: list[int], delay: int, excess: dict[str, int]) -> Cause:
    """What explains the larger part of a delay."""
    one = ranks[place]
    host = excess["launch"] + excess["rest"]
    if excess["data"] >= max(0.4 * delay, host, excess["ops"]):
        return "data_loading"
    if excess["ops"] >= max(0.35 * delay, host):
        return _kind_of_work(ranks, place, alike, excess)
    if host >= 0.35 * delay:
        return "slow_host"
    total = excess["data"] + excess["ops"] + host
    if total >= 0.5 * delay:
        parts = {"data_loading": excess["data"], "slow_host": host, "slow_device": excess["ops"]}
        largest = max(parts, key=lambda cause: parts[cause])
        if largest == "slow_device" and one.device == "cpu":
            return "slow_host"
        return largest  # type: ignore[return-value]
    return "unknown"


def _kind_of_work(ranks: Sequence[RankSummary], place: int, alike: list[int], excess: dict[str, int]) -> Cause:
    """More compute: of more work, or of the same work done more slowly."""
    one = ranks[place]
    calls = float(np.median(one.work["calls"])) if len(one.work["calls"]) else 0.0
    if calls and excess["calls"] > 0.02 * calls:
        return "uneven_work"
    ratios, weights = slowdown(ranks, place, alike)
    if len(ratios) >= 3:
        order = np.argsort(ratios)
        share = np.cumsum(weights[order]) / weights.sum()
        low, high = (ratios[order][int(np.searchsorted(share, part))] for part in (0.2, 0.8))
        if low < 1.02 < high and high > 1.1:  # some kernels take longer, others do not: they get more to do
            return "uneven_work"
    return "slow_device" if one.device == "gpu" else "slow_host"


def slowdown(ranks: Sequence[RankSummary], place: int, alike: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
    """For each kernel that all run: this rank's mean over the median of the others' means, and its share of time."""
    skipped = {place, *alike}
    means = [
        dict(zip(one.table.names, (one.table.total / np.maximum(one.table.calls, 1)).tolist(), strict=True))
        for one in ranks
    ]
    table = ranks[place].table
    ratios, weights = [], []
    for name, total in zip(table.names, table.total.tolist(), strict=True):
        theirs = [one[name] for number, one in enumerate(means) if number not in skipped and name in one]
        if theirs and np.median(theirs) > 0:
            ratios.append(means[place][name] / float(np.median(theirs)))
            weights.append(total)
    return np.array(ratios), np.array(weights, dtype=float)


def as_result(ranks: Sequence[RankSummary], lags: Lags, finding: Finding) -> Straggler:
    """For the report, with the arrival lag that people know."""
    lag = lags.lag[:, finding.place]
    known = lag[lag >= 0]
    median = int(np.median(known)) if len(known) else 0
    if median < finding.delay / 4 and finding.waited_for:  # the others wait elsewhere than in collectives of all
        median = finding.delay
    rank = ranks[finding.place].rank
    assert rank is not None
    return Straggler(rank, median, finding.led, finding.steps, finding.cause)
