"""The lanes of one rank in a stretch of time, for a picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lit_llm.trace import kinds
from lit_llm.trace.columns import Category, Ints, RankTrace
from lit_llm.trace.marks import find_marks
from lit_llm.trace.results import Lane, Span

_MOST = 240
_PHASES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "validation": "other",
    "batch_to_device": "memory",
    "DistributedDataParallel.forward": "forward",
}


def lanes(trace: RankTrace, start: int, end: int) -> list[Lane]:
    """What happened in [start, end) on this rank's own clock, ns: phases of the host, and streams or ops.

    Neighbours of a kind that no eye could tell apart are drawn as one.
    """
    events, rows = trace.events, []
    inside = (events.start < end) & (events.end > start)
    annotation = (events.category == Category.ANNOTATION) & inside
    phase = [_phase(name) for name in trace.names]
    phases = np.flatnonzero(annotation & np.array([bool(kind) for kind in phase], dtype=bool)[events.name])
    if any(trace.names[events.name[one]] == "optimizer" for one in phases):  # torch's mark holds the closure as well
        phases = phases[[not trace.names[events.name[one]].startswith("Optimizer.step#") for one in phases.tolist()]]
    rows.append(("phases", phases, [phase[events.name[one]] for one in phases]))
    kernel = events.category == Category.KERNEL
    gpu = kernel | (events.category == Category.MEMCPY) | (events.category == Category.MEMSET)
    if gpu.any():
        talks = kinds.matching(trace.names, kinds.is_communication)[events.name]
        for stream in np.unique(events.stream[gpu & inside]):
            here = np.flatnonzero(gpu & inside & (events.stream == stream))
            labels = ["comm" if talks[one] else "compute" if kernel[one] else "memory" for one in here]
            rows.append((f"GPU stream {stream}", here, labels))
    else:
        marks = find_marks(trace)
        enqueue = kinds.matching(trace.names, kinds.ENQUEUE.match)[events.name]
        ops = (events.category == Category.CPU_OP) & (events.thread == marks.thread) & inside & ~enqueue
        main = np.flatnonzero(ops)
        top = main[_outermost(events.start[main], events.end[main])]
        runs = np.flatnonzero(annotation & kinds.matching(trace.names, kinds.is_host_communication)[events.name])
        rows += [("ops", top, ["compute"] * len(top)), ("communication", runs, ["comm"] * len(runs))]
    drawn = [(name, _spans(trace, places, labels, start, end)) for name, places, labels in rows]
    return [Lane(name, spans) for name, spans in drawn if spans]


def _phase(name: str) -> str:
    if kinds.DATA.match(name):
        return "data"
    if name.startswith("Optimizer.step#"):
        return "optimizer"
    return _PHASES.get(name, "")


def _outermost(start: Ints, end: Ints) -> np.ndarray:
    """Which of the intervals, sorted by start, begin in no earlier one."""
    if not len(start):
        return np.zeros(0, dtype=bool)
    reach = np.concatenate(([start[0] - 1], np.maximum.accumulate(end)[:-1]))
    return start >= reach


def _spans(trace: RankTrace, places: Ints, labels: Sequence[str], start: int, end: int) -> list[Span]:
    """A few hundred spans at most: short neighbours of a kind are merged, longer ones keep their name."""
    events = trace.events
    least = (end - start) / (4 * _MOST)
    spans: list[Span] = []
    for place, kind in zip(places.tolist(), labels, strict=True):
        a, b = max(int(events.start[place]), start), min(int(events.end[place]), end)
        last = spans[-1] if spans else None
        if b <= a or (last is not None and last.kind == kind and b <= last.end):
            continue
        name = trace.names[events.name[place]]
        short = last is not None and min(b - a, last.end - last.start) < 4 * least
        if last is not None and last.kind == kind and a - last.end < least and short:
            last.end = max(last.end, b)
            if last.name != name:
                last.name = last.name if last.name.endswith(", ...") else f"{last.name}, ..."
            continue
        spans.append(Span(a, b, kind, name))  # type: ignore[arg-type]
    return spans
