"""Which kernels or ops took the time of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lit_llm.trace.columns import Ints, RankTrace

_KEPT = 64
_SAMPLES = 4096


@dataclass
class Table:
    """By name: calls and total ns; of the longest names also single durations."""

    names: list[str]
    calls: Ints
    total: Ints
    samples: dict[str, np.ndarray]
    """uint32 ns, at most 4096 a name, evenly taken from the sorted durations."""
    all_total: int
    """Of every name, also of those that are left out here."""


def gpu_table(trace: RankTrace, places: Ints) -> Table:
    """Of kernels, by their durations."""
    return _table(trace, places, trace.events.duration[places])


def op_table(trace: RankTrace, places: Ints) -> Table:
    """Of the ops of one thread, by self time: without the ops inside them."""
    events = trace.events
    start, end = events.start[places].tolist(), events.end[places].tolist()
    own = events.duration[places].tolist()
    stack: list[int] = []
    for at in range(len(places)):
        while stack and end[stack[-1]] <= start[at]:
            stack.pop()
        if stack:
            own[stack[-1]] -= end[at] - start[at]
        stack.append(at)
    return _table(trace, places, np.maximum(np.array(own, dtype=np.int64), 0))


def _table(trace: RankTrace, places: Ints, took: Ints) -> Table:
    ids, inverse = np.unique(trace.events.name[places], return_inverse=True)
    calls = np.bincount(inverse, minlength=len(ids)).astype(np.int64)
    total = np.zeros(len(ids), dtype=np.int64)
    np.add.at(total, inverse, took)
    kept = np.argsort(-total, kind="stable")[:_KEPT]
    order = np.argsort(inverse, kind="stable")
    edges = np.concatenate(([0], np.cumsum(calls)))
    samples = {}
    for one in kept:
        values = np.sort(took[order[edges[one] : edges[one + 1]]])
        if len(values) > _SAMPLES:
            values = values[np.linspace(0, len(values) - 1, _SAMPLES).astype(np.int64)]
        samples[trace.names[ids[one]]] = np.minimum(values, 2**32 - 1).astype(np.uint32)
    names = [trace.names[ids[one]] for one in kept]
    return Table(names, calls[kept], total[kept], samples, int(total.sum()))
