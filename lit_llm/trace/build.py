"""Typed events to columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lit_llm.trace.columns import Category, Detail, Events, Ints
from lit_llm.trace.decode import ERRORS, NOTHING, Args, Event, ExactEvent, Value
from lit_llm.trace.facts import rank_list, text, whole

_CATEGORIES = {
    "cpu_op": Category.CPU_OP,
    "operator": Category.CPU_OP,
    "user_annotation": Category.ANNOTATION,
    "gpu_user_annotation": Category.GPU_ANNOTATION,
    "kernel": Category.KERNEL,
    "hpu_op": Category.KERNEL,
    "mtia_ccp_events": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "memset": Category.MEMSET,
    "runtime": Category.RUNTIME,
    "cuda_sync": Category.SYNC,
    "python_function": Category.PYTHON,
    "overhead": Category.OVERHEAD,
}
_ENDINGS = {
    "_runtime": Category.RUNTIME,
    "_driver": Category.RUNTIME,
    "_kernel": Category.KERNEL,
    "_memcpy": Category.MEMCPY,
    "_memset": Category.MEMSET,
    "_sync": Category.SYNC,
}
_ON_DEVICE = np.zeros(256, bool)
_ON_DEVICE[[Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.GPU_ANNOTATION]] = True
_LINKED = _ON_DEVICE.copy()
_LINKED[[Category.RUNTIME, Category.SYNC, Category.OTHER, Category.OVERHEAD]] = True
_TALKS = ("c10d::", "gloo:", "nccl:", "record_param_comms")
"""How host events of collectives begin."""
_EXACT = float(1 << 43)
"""us; up to here a float64 tells nanoseconds apart."""
_LATEST = 4e15
"""us, the year 2096; what is later is no time."""
_ABSOLUTE = 10**18
"""ns, the year 2001; what is later counts from 1970."""
_NUMBER = re.compile(r"-?(?:0x[0-9a-f]+|\d+)", re.IGNORECASE)
_NO_ARGS = Args()


class _Ids(dict[Any, int]):
    """Numbers keys in the order they come."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number

    def of(self, keys: Sequence[Any]) -> NDArray[np.int32]:
        return np.fromiter(map(self.__getitem__, keys), np.int32, len(keys))


class Builder:
    """Takes events chunk by chunk and turns them into columns at once."""

    def __init__(self) -> None:
        self.dropped = 0
        """Complete events without a time, or with one that can't be."""
        self.details: list[Detail] = []
        self.group_members: dict[str, tuple[int, ...]] = {}
        """Of process groups, from the arguments of their kernels."""
        self._names, self._category_ids, self._threads, self._detail_ids = _Ids(), _Ids(), _Ids(), _Ids()
        self._talks: list[bool] = []
        self._thread_names: dict[int, str] = {}
        self._columns: dict[str, list[NDArray[Any]]] = {name: [] for name in Events.__dataclass_fields__}
        self._fractions = False

    def add(self, events: list[Event]) -> bool:
        """Takes the events of a chunk; False: they need to come as :class:`ExactEvent`, and none was taken."""
        complete = [event for event in events if event.ph == "X"]
        start = np.array([event.ts for event in complete])
        duration = np.array([event.dur for event in complete])
        if start.dtype.kind == "f" and len(start) and (np.abs(start) >= _EXACT).any():
            return False
        if start.dtype == object or duration.dtype == object:  # whole numbers beyond 64 bits
            start, duration = start.astype(float), duration.astype(float)
        self._take(events, complete, start, duration)
        return True

    def add_exact(self, events: list[ExactEvent]) -> None:
        """Takes the events of a chunk whose times a float64 can't hold."""
        complete = [event for event in events if event.ph == "X"]
        keep = [event for event in complete if _possible(event.ts) and _possible(event.dur)]
        self.dropped += len(complete) - len(keep)
        start = np.array([round(event.ts * 1000) for event in keep], np.int64)
        duration = np.array([round(event.dur * 1000) for event in keep], np.int64)
        self._fractions |= any(event.ts % 1 for event in keep[:1000])
        self._fill(keep, start, duration)
        self._name_threads(events)

    def _take(self, events: list[Event], complete: list[Event], start: NDArray[Any], duration: NDArray[Any]) -> None:
        fine = (np.abs(start) <= _LATEST) & (np.abs(duration) <= _LATEST)  # NaN is not
        if not fine.all():
            complete = [event for event, good in zip(complete, fine, strict=True) if good]
            self.dropped += int((~fine).sum())
            start, duration = start[fine], duration[fine]
        if start.dtype.kind == "f" and len(start):
            self._fractions = True
        self._fill(complete, _nanoseconds(start), _nanoseconds(duration))
        self._name_threads(events)

    def _fill(self, events: Sequence[Event | ExactEvent], start: Ints, duration: Ints) -> None:
        """Appends a piece to each column."""
        count = len(events)
        category_id = self._category_ids.of([event.cat for event in events])
        category = np.array([_category(name) for name in self._category_ids], np.uint8)[category_id]
        name = self._names.of([event.name for event in events])
        if len(self._names) > len(self._talks):
            self._talks += [name.startswith(_TALKS) for name in list(self._names)[len(self._talks) :]]
        columns = self._columns
        columns["start"].append(start)
        columns["duration"].append(np.maximum(duration, 0))
        columns["category"].append(category)
        columns["name"].append(name)
        columns["thread"].append(self._threads.of([(event.pid, event.tid) for event in events]))

        arguments = [event.args or _NO_ARGS for event in events]
        detail = np.full(count, -1, np.int32)
        linked, gpu = np.flatnonzero(_LINKED[category]), np.flatnonzero(_ON_DEVICE[category])
        columns["correlation"].append(
            _column(count, linked, [arguments[index].correlation for index in linked.tolist()])
        )
        of_gpu = [(events[index], arguments[index]) for index in gpu.tolist()]
        devices = [event.pid if args.device is None else args.device for event, args in of_gpu]
        streams = [event.tid if args.stream is None else args.stream for event, args in of_gpu]
        columns["device"].append(_column(count, gpu, devices, bits=31).astype(np.int32))
        columns["stream"].append(_column(count, gpu, streams))
        columns["bytes"].append(_column(count, gpu, [args.bytes for _, args in of_gpu]))
        talks = np.array(self._talks, bool)[name] & ~_ON_DEVICE[category]
        talking = [index for index, (_, args) in zip(gpu.tolist(), of_gpu, strict=True) if args.collective is not None]
        for index in [*talking, *np.flatnonzero(talks).tolist()]:
            detail[index] = self._detail(arguments[index])
        columns["detail"].append(detail)

    def _detail(self, args: Args) -> int:
        """Number of the detail that holds these arguments; -1 if there are none."""
        key = (
            *(args.collective, args.group, args.sequence, args.in_elements, args.out_elements, args.dtype),
            *(args.group_size, bytes(args.shapes), bytes(args.types)),
        )
        if all(value is None or value == b"" for value in key):
            return -1
        known = len(self._detail_ids)
        number = self._detail_ids[key]
        if number == known:
            group = text(args.group)
            self.details.append(
                Detail(
                    text(args.collective),
                    group,
                    whole(args.sequence),
                    whole(args.in_elements),
                    whole(args.out_elements),
                    text(args.dtype),
                    whole(args.group_size),
                    _loaded(args.shapes),
                    _loaded(args.types),
                )
            )
            if group is not None and (ranks := rank_list(args.members)) is not None:
                self.group_members[group] = ranks
        return number

    def _name_threads(self, events: Sequence[Event | ExactEvent]) -> None:
        for event in events:
            if event.ph == "M" and event.name == "thread_name" and event.args and event.args.name is not None:
                self._thread_names[self._threads[event.pid, event.tid]] = str(event.args.name)

    def finish(self, base: int) -> tuple[Events, bool]:
        """The columns, sorted, ``base`` ns added to times that do not count from 1970 already; whether they do now.

        Empties itself column by column, so that no second copy of all of them is held.
        """
        kinds = {"category": np.uint8, **dict.fromkeys(("name", "thread", "device", "detail"), np.int32)}

        def joined(name: str) -> NDArray[Any]:
            parts = self._columns.pop(name)
            return np.concatenate(parts) if parts else np.empty(0, kinds.get(name, np.int64))

        start, duration, category = joined("start"), joined("duration"), joined("category")
        absolute = len(start) > 0 and int(np.median(start[:: max(1, len(start) // 10_000)])) > _ABSOLUTE
        early, longer = (1, 2) if self._fractions else (1000, 1000)  # so that viewers draw them around their kernels
        annotation = category == Category.GPU_ANNOTATION
        start[annotation] += early
        duration[annotation] = np.maximum(duration[annotation] - longer, 0)
        if base and not absolute:
            start += base
        order = np.lexsort((-duration, start))
        columns = {"start": start[order], "duration": duration[order], "category": category[order]}
        del start, duration, category
        for name in list(self._columns):
            columns[name] = joined(name)[order]
        self.names: list[str] = list(self._names)
        return self._merge_threads(Events(**columns)), bool(base or absolute)

    def _merge_threads(self, events: Events) -> Events:
        """Threads whose ids differ in type only, such as 7 and "7", are one."""
        merged = _Ids()
        new = np.array([merged[str(pid), str(tid)] for pid, tid in self._threads], np.int32)
        self.threads: list[tuple[str, str]] = list(merged)
        self.thread_names = {int(new[index]): name for index, name in self._thread_names.items()}
        if len(events):
            events.thread = new[events.thread]
        return events


def _possible(us: Decimal) -> bool:
    return us.is_finite() and abs(us) <= _LATEST


def _category(name: str) -> Category:
    name = name.lower()
    ending = (kind for end, kind in _ENDINGS.items() if name.endswith(end))
    return _CATEGORIES.get(name, next(ending, Category.OTHER))


def _column(count: int, rows: NDArray[np.intp], values: Sequence[Value], bits: int = 63) -> Ints:
    """A column with ``values`` as numbers in ``rows``, and -1 in all others."""
    column = np.full(count, -1, np.int64)
    if len(rows):
        numbers = np.array([-1 if value is None else value for value in values])
        if numbers.dtype != np.int64 or (bits < 63 and np.abs(numbers).max() >= 1 << bits):
            numbers = np.array([_number(value, bits) for value in values], np.int64)
        column[rows] = numbers
    return column


def _nanoseconds(us: NDArray[Any]) -> Ints:
    """Exact for whole microseconds, and for a fraction where a float64 holds it."""
    if us.dtype.kind == "f":
        # Not at once: the product would be rounded a second time, and be 1 ns off near 2**42 us.
        whole = np.floor(us)
        return whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)
    return us.astype(np.int64) * 1000


def _number(value: Value, bits: int = 63) -> int:
    """A whole number, or the one in a text such as ``0x0`` or ``stream 7``; -1 if there is none."""
    if isinstance(value, str):
        found = _NUMBER.search(value)
        if found is None:
            return -1
        digits = found[0]
        value = int(digits, 16 if "x" in digits.lower() else 10)
    if not isinstance(value, int | float) or not -(1 << bits) <= value < 1 << bits:
        return -1
    return int(value)


def _loaded(raw: msgspec.Raw) -> Any:
    if raw is NOTHING or not bytes(raw):
        return None
    try:
        return msgspec.json.decode(raw)
    except ERRORS:
        return None
