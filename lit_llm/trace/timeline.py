"""The lanes of one rank in one step, for a picture."""

from __future__ import annotations

import numpy as np

from lit_llm.trace import kinds
from lit_llm.trace.columns import Category, Ints, RankTrace
from lit_llm.trace.marks import find_marks
from lit_llm.trace.results import Lane, Span

_MOST = 240
_PHASES = {"forward": "forward", "backward": "backward", "optimizer": "optimizer", "validation": "other", "batch_to_device": "memory"}


def lanes(trace: RankTrace, step: int | None) -> tuple[int, int, list[Lane]]:
    """The lanes of a step (None: of the whole trace) on this rank's own clock, ns, and the step's begin and end.

    Neighbours of a kind that no eye could tell apart are drawn as one.
    """
    events = trace.events
    marks = find_marks(trace)
    place = np.flatnonzero(marks.numbers == step) if step is not None else []
    if len(place):
        start, end = (int(value) for value in marks.windows[place[0]])
    else:
        start, end = int(events.start[0]), int(events.end.max())
    ends = events.end
    names = np.array([_host_kind(name) for name in trace.names], dtype=object)
    rows: list[Lane] = []
    inside = (events.start < end) & (ends > start)
    annotation = (events.category == Category.ANNOTATION) & inside
    host_lanes: list[tuple[str, Ints]] = []
    phases = np.flatnonzero(annotation & (names[events.name] != ""))
    host_lanes.append(("phases", phases))
    gpu = (events.category == Category.KERNEL) | (events.category == Category.MEMCPY) | (events.category == Category.MEMSET)
    for title, chosen in host_lanes:
        if spans := _spans(trace, chosen, [str(names[events.name[one]]) for one in chosen], start, end):
            rows.append(Lane(title, spans))
    if gpu.any():
        launched_after, reach = start, end
        reach = max(end, int(ends[gpu & inside].max())) if (gpu & inside).any() else end
        chosen = gpu & (events.start < reach) & (ends > launched_after)
        talks = kinds.matching(trace.names, kinds.is_communication)
        for stream in np.unique(events.stream[chosen]):
            here = np.flatnonzero(chosen & (events.stream == stream))
            labels = [
                "memory" if events.category[one] != Category.KERNEL else "comm" if talks[events.name[one]] else "compute"
                for one in here
            ]
            if spans := _spans(trace, here, labels, start, end):
                rows.append(Lane(f"GPU stream {stream}", spans))
    else:
        ops = (events.category == Category.CPU_OP) & (events.thread == marks.thread) & inside
        ops &= ~kinds.matching(trace.names, kinds.ENQUEUE.match)[events.name]
        main = np.flatnonzero(ops)
        top = _outermost(events.start[main], ends[main])
        if spans := _spans(trace, main[top], ["compute"] * int(top.sum()), start, end):
            rows.append(Lane("ops", spans))
        runs = annotation & kinds.matching(trace.names, kinds.is_host_communication)[events.name]
        here = np.flatnonzero(runs)
        if spans := _spans(trace, here, ["comm"] * len(here), start, end):
            rows.append(Lane("communication", spans))
    return start, end, rows


def _host_kind(name: str) -> str:
    if name in _PHASES:
        return _PHASES[name]
    if kinds.DATA.match(name):
        return "data"
    if name.startswith("Optimizer.step#"):
        return "optimizer"
    return "forward" if name == "DistributedDataParallel.forward" else ""


def _outermost(start: Ints, end: Ints) -> np.ndarray:
    """Which of the intervals, sorted by start, lie in no earlier one."""
    if not len(start):
        return np.zeros(0, dtype=bool)
    reach = np.concatenate(([start[0] - 1], np.maximum.accumulate(end)[:-1]))
    return start >= reach


def _spans(trace: RankTrace, places: Ints, labels: list[str], start: int, end: int) -> list[Span]:
    """At most some hundred spans: close neighbours of a kind are merged, longer ones keep their name."""
    events = trace.events
    least = (end - start) / (4 * _MOST)
    spans: list[Span] = []
    if len(places) and set(labels) != {"phases"}:
        outer = _outermost(events.start[places], events.end[places]) if len(set(labels)) == 1 else np.ones(len(places), dtype=bool)
        places, labels = places[outer], [label for label, keep in zip(labels, outer, strict=True) if keep]
    for place, kind in zip(places.tolist(), labels, strict=True):
        a, b = max(int(events.start[place]), start), min(int(events.end[place]), end)
        if b <= a:
            continue
        name = trace.names[events.name[place]]
        last = spans[-1] if spans else None
        if last is not None and last.kind == kind and a - last.end < least and (b - a < 4 * least or last.end - last.start < 4 * least):
            last.end = max(last.end, b)
            if last.name != name:
                last.name = last.name if last.name.endswith(", ...") else f"{last.name}, ..."
            continue
        spans.append(Span(a, b, kind, name))  # type: ignore[arg-type]
    return spans


