"""The collectives of one rank: when it came, when they ran, how much of them nothing hid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_llm.trace import kinds
from lit_llm.trace.columns import Detail, Ints, RankTrace
from lit_llm.trace.intervals import covered, union
from lit_llm.trace.marks import Marks

_BYTES = {
    "double": 8, "float64": 8, "int64": 8, "long": 8, "long int": 8, "float": 4, "float32": 4, "int": 4, "int32": 4,
    "half": 2, "float16": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "short": 2, "byte": 1, "char": 1,
    "unsigned char": 1, "signed char": 1, "bool": 1, "int8": 1, "uint8": 1,
}  # fmt: skip


@dataclass
class Collectives:
    """Columns of equal length (n,), sorted by arrival."""

    keys: list[tuple[str, str | None]]
    """Kind and process group (None: not told), which ``key`` points to."""
    key: Ints
    sequence: Ints
    """``Seq`` of the group, -1: not told."""
    step: Ints
    """Number of the step in which it was launched, -1: in none."""
    arrival: Ints
    """When this rank came: on a GPU the kernel's start, on a CPU the call."""
    begin: Ints
    end: Ints
    bytes: Ints
    """Of the larger side; -1: not told."""
    exposed: Ints
    """ns of [begin, end) that no compute hides."""
    launched: Ints
    """When the host called for it, -1: not told."""

    def __len__(self) -> int:
        return len(self.key)

    def waits(self) -> Ints:
        """(n, 2) from this rank's call to the end, as a set."""
        return union(self.arrival, self.end)


def _build(rows: list[tuple[tuple[str, str | None], int, int, int, int, int, int, int, int]]) -> Collectives:
    rows.sort(key=lambda row: (row[3], row[4]))
    places: dict[tuple[str, str | None], int] = {}
    key = [places.setdefault(row[0], len(places)) for row in rows]
    columns = np.array([row[1:] for row in rows], dtype=np.int64).reshape(len(rows), 8)
    return Collectives(list(places), np.array(key, dtype=np.int64), *columns.T.copy())


def on_gpu(trace: RankTrace, comm: Ints, marks: Marks, exposed: Ints, launched: dict[Any, Any]) -> Collectives:
    """Of the communication kernels at places ``comm``."""
    events = trace.events
    bare = covered(exposed, events.start[comm], events.end[comm])
    called = np.array([launched.get(place, -1) for place in comm], dtype=np.int64)
    steps = _numbers(marks, called)
    rows = []
    for place, step, call, open_ns in zip(comm, steps, called, bare, strict=True):
        detail = trace.details[events.detail[place]] if events.detail[place] >= 0 else Detail()
        kind = kinds.collective_kind(detail.collective or trace.names[events.name[place]])
        sequence = -1 if detail.sequence is None else detail.sequence
        start, end = int(events.start[place]), int(events.end[place])
        size = _size(detail)
        rows.append(((kind, detail.group), sequence, int(step), start, start, end, size, int(open_ns), int(call)))
    return _build(rows)


def on_cpu(trace: RankTrace, calls: Ints, runs: Ints, marks: Marks, exposed: Ints) -> Collectives:
    """Of the calls (``c10d::`` ops on the main thread) and their executions on the backend's threads, at these places.

    gloo runs a reduce-scatter as an all-reduce, so the kind is the call's. The k-th call is the k-th execution, but for
    executions whose call came before the trace began.
    """
    events = trace.events
    bare = dict(zip(runs.tolist(), covered(exposed, events.start[runs], events.end[runs]).tolist(), strict=True))
    steps = dict(zip(calls.tolist(), _numbers(marks, events.start[calls]).tolist(), strict=True))
    pairs, waiting = [], list(runs.tolist())
    extra = len(waiting) - len(calls)
    for call in calls.tolist():
        while waiting and (extra > 0 and events.end[waiting[0]] <= events.start[call]):
            pairs.append((None, waiting.pop(0)))  # of a call before the trace
            extra -= 1
        pairs.append((call, waiting.pop(0) if waiting else None))
    pairs += [(None, run) for run in waiting]
    rows = []
    for call, run in pairs:
        if run is None:  # called, and not run any more within the trace
            continue
        name = trace.names[events.name[run if call is None else call]]
        place = run if call is None else call
        detail = trace.details[events.detail[place]] if events.detail[place] >= 0 else Detail()
        kind = kinds.collective_kind(name.rpartition(":")[2])
        begin, end = int(events.start[run]), int(events.end[run])
        arrival = begin if call is None else int(events.start[call])
        step = -1 if call is None else steps[call]
        size = _size(detail)
        if size < 0 and events.detail[run] >= 0:  # a call's shapes may be those of lists of tensors
            size = _size(trace.details[events.detail[run]])
        rows.append(
            ((kind, detail.group), -1, step, arrival, begin, end, size, bare[run], -1 if call is None else arrival)
        )
    return _build(rows)


def _numbers(marks: Marks, times: Ints) -> Ints:
    place = marks.step_of(times)
    numbers = np.concatenate((marks.numbers, [-1])) if len(marks) else np.array([-1])
    return numbers[place]


def _size(detail: Detail) -> int:
    """Bytes of the larger side; -1: not told."""
    if detail.in_elements is not None or detail.out_elements is not None:
        width = _BYTES.get(str(detail.dtype).lower())
        return max(detail.in_elements or 0, detail.out_elements or 0) * width if width else -1
    largest = _largest(detail.shapes)
    types = [detail.types] if isinstance(detail.types, str) else [str(one) for one in detail.types or []]
    widths = [_BYTES[plain] for one in types if (plain := _plain(one)) in _BYTES]
    return largest * max(widths) if largest and widths else -1


def _plain(name: str) -> str:
    return name.lower().replace("tensorlist", "").strip("[]() ")


def _largest(shapes: Any) -> int:
    """Elements of the largest tensor in ``Input Dims``, which nests lists of shapes."""
    if not isinstance(shapes, list):
        return 0
    if shapes and all(isinstance(size, int) for size in shapes):
        return math.prod(shapes)
    return max((_largest(one) for one in shapes), default=0)
