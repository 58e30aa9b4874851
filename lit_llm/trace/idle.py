"""Why a GPU did nothing: each gap between its work, by what the host did meanwhile.

Of a gap [g0, g1] before work that was launched at L, the host's part ends at L: until then there was nothing to do.
The rest is launch latency or waiting for other work (``dependency``). The host's part goes to what the host did in it,
in this order: fetching data, waiting for the device (with what follows until the next launch, if the device ran dry
meanwhile), dispatching (runtime calls and ops: ``launch``), and code that the trace does not show (``other``). What
stands before the first launch in the trace is ``other`` as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lit_llm.trace import kinds
from lit_llm.trace.columns import Category, Ints, RankTrace
from lit_llm.trace.intervals import contains, covered, join, subtract, union
from lit_llm.trace.marks import Marks
from lit_llm.trace.results import CAUSES

_LONGEST = 12


@dataclass
class Idle:
    """The gaps of one rank, (gaps,) each, in order of time."""

    start: Ints
    end: Ints
    launched: Ints
    """When the work that ends the gap was launched; -1: before the trace."""
    parts: dict[str, Ints]
    """ns of each gap by cause; they add up to its length."""
    longest: list[tuple[int, str | None]]
    """Places of the longest gaps, each with the op or call of the host that took most of it."""
    syncs: list[tuple[str, int, int, str | None]]
    """Waits of the host for the device: op or call, how many, ns in all, a line of the user's code if it is known."""

    def by_cause(self, start: int, end: int) -> dict[str, int]:
        """ns by cause within [start, end); of a gap that is cut each cause keeps the same share."""
        inside = (self.end > start) & (self.start < end)
        causes = {}
        cut = inside & ((self.start < start) | (self.end > end))
        for cause in CAUSES:
            causes[cause] = int(self.parts[cause][inside & ~cut].sum())
        for place in np.flatnonzero(cut):
            kept = min(int(self.end[place]), end) - max(int(self.start[place]), start)
            whole = int(self.end[place] - self.start[place])
            left = kept
            for cause in CAUSES[:-1]:
                part = int(self.parts[cause][place]) * kept // whole
                causes[cause] += part
                left -= part
            causes["other"] += left
        return causes


def find_idle(trace: RankTrace, marks: Marks, busy: Ints, on_device: Ints, launches: Ints) -> Idle:
    """The gaps between ``busy`` intervals of the GPU.

    Args:
        trace: of the rank.
        marks: its annotations.
        busy: (n, 2) all work of the GPU.
        on_device: places of the GPU's events.
        launches: for each of those the place of its launch, -1: none.
    """
    events = trace.events
    start, end = busy[:-1, 1].copy(), busy[1:, 0].copy()
    # Which work ends each gap: the first that starts there.
    begins = events.start[on_device]
    order = np.argsort(begins, kind="stable")
    ender = order[np.searchsorted(begins[order], end, side="left")] if len(end) else np.zeros(0, dtype=np.int64)
    call = launches[ender] if len(end) else np.zeros(0, dtype=np.int64)
    launched = np.where(call >= 0, events.start[np.maximum(call, 0)], -1)
    thread = np.where(call >= 0, events.thread[np.maximum(call, 0)], -1)
    until_launch = np.clip(launched, start, end)
    host = np.where(call >= 0, until_launch - start, 0)

    sync_ops = kinds.matching(trace.names, kinds.is_sync_op)[events.name] & (events.category == Category.CPU_OP)
    sync_calls = kinds.matching(trace.names, kinds.is_sync_call)[events.name] & (events.category == Category.RUNTIME)
    dispatch = (events.category == Category.CPU_OP) | (events.category == Category.RUNTIME)
    parts = {cause: np.zeros(len(start), dtype=np.int64) for cause in CAUSES}
    for one in np.unique(thread[thread >= 0]):
        mine = np.flatnonzero(thread == one)
        here = events.thread == one
        works = union(events.start[dispatch & here], events.end[dispatch & here])
        # Autograd launches from a thread of its own while the main one may be what waited before.
        syncs = (sync_ops | sync_calls) & (here | (events.thread == marks.thread))
        waits = union(events.start[syncs], events.end[syncs])
        # A wait that saw the GPU run dry is to blame for all the time until the next launch.
        dry = np.flatnonzero(contains(waits, start[mine]))
        waits = join(waits, np.stack([start[mine][dry], until_launch[mine][dry]], axis=1)) if len(dry) else waits
        waits = subtract(waits, marks.data)
        works = subtract(works, join(marks.data, waits))
        for cause, times in (("data_loading", marks.data), ("host_sync", waits), ("launch", works)):
            parts[cause][mine] = covered(times, start[mine], until_launch[mine])
    told = parts["data_loading"] + parts["host_sync"] + parts["launch"]
    known = call >= 0
    parts["dependency"] = np.where(known, end - start - host, 0)
    parts["other"] = np.where(known, host - told, end - start)
    longest = [
        (int(place), _op_of(trace, int(start[place]), int(end[place]), int(thread[place])))
        for place in np.argsort(start - end, kind="stable")[:_LONGEST]
    ]
    return Idle(start, end, launched, parts, longest, _syncs(trace, sync_ops, sync_calls))


def _op_of(trace: RankTrace, start: int, end: int, thread: int) -> str | None:
    """The innermost host event of the thread that takes at least half of a gap, else the one that takes most of it."""
    events = trace.events
    to = int(np.searchsorted(events.start, end))
    kind = events.category[:to]
    host = (kind == Category.CPU_OP) | (kind == Category.RUNTIME) | (kind == Category.ANNOTATION)
    places = np.flatnonzero(host & (events.thread[:to] == thread) & (events.start[:to] + events.duration[:to] > start))
    places = (
        places[[kinds.STEP.match(trace.names[events.name[place]]) is None for place in places]]
        if len(places)
        else places
    )
    if not len(places):
        return None
    taken = np.minimum(events.end[places], end) - np.maximum(events.start[places], start)
    half = np.flatnonzero(2 * taken >= end - start)
    best = places[half[np.argmin(events.duration[places[half]])]] if len(half) else places[taken.argmax()]
    return trace.names[events.name[best]]


def _syncs(trace: RankTrace, ops: np.ndarray, calls: np.ndarray) -> list[tuple[str, int, int, str | None]]:
    """Waits by the outermost op around them (a call alone stands for itself), the longest in all first."""
    events = trace.events
    rows: dict[str, list[int]] = {}
    covered_until: dict[int, int] = {}
    for place in np.flatnonzero(ops | calls):
        thread, start, end = int(events.thread[place]), int(events.start[place]), int(events.end[place])
        if start < covered_until.get(thread, -1):
            continue  # the call inside of an op that is counted, or the op inside of another
        covered_until[thread] = end
        rows.setdefault(trace.names[events.name[place]], []).append(int(place))
    found = []
    for name, places in rows.items():
        total = int(events.duration[places].sum())
        longest = max(places, key=lambda place: int(events.duration[place]))
        found.append((name, len(places), total, _line_of(trace, longest)))
    return sorted(found, key=lambda row: -row[2])


def _line_of(trace: RankTrace, place: int) -> str | None:
    """The innermost Python function around an event that is not torch's own; None without stacks."""
    events = trace.events
    at, thread = events.start[place], events.thread[place]
    around = np.flatnonzero(
        (events.category[: place + 1] == Category.PYTHON)
        & (events.thread[: place + 1] == thread)
        & (events.end[: place + 1] > at)
    )
    for one in around[::-1]:
        name = trace.names[events.name[one]]
        if "torch/" not in name and "<built-in" not in name and "lightning/" not in name:
            return name
    return None
