"""A rank's trace as columns: what the reader fills and the analysis computes with."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Category(IntEnum):
    """Of an event, by what kineto calls it today (old names are mapped)."""

    OTHER = 0
    CPU_OP = 1
    ANNOTATION = 2
    """``user_annotation``, on the host."""
    GPU_ANNOTATION = 3
    KERNEL = 4
    MEMCPY = 5
    MEMSET = 6
    RUNTIME = 7
    """``cuda_runtime`` and ``cuda_driver``, and the same of other devices."""
    SYNC = 8
    """``cuda_sync``: the device or a stream waits for an event."""
    PYTHON = 9
    """``python_function``, of a trace with stacks."""
    OVERHEAD = 10


@dataclass
class Events:
    """The complete events (``ph`` X) of a trace, sorted by start, at equal starts the longer first.

    Columns of equal length (events,). Missing is -1 where not said otherwise.
    """

    start: Ints
    """ns since 1970 where the trace has a base time or absolute times, else since whatever it counts from."""
    duration: Ints
    """ns, at least 0."""
    category: NDArray[np.uint8]
    name: NDArray[np.int32]
    """Into ``RankTrace.names``."""
    thread: NDArray[np.int32]
    """Into ``RankTrace.threads``."""
    device: NDArray[np.int32]
    """Of GPU events (kernels, copies, fills, GPU annotations)."""
    stream: NDArray[np.int64]
    """Of GPU events."""
    correlation: Ints
    """Joins a runtime call with what it launched."""
    bytes: Ints
    """That a copy or fill moves."""
    detail: NDArray[np.int32]
    """Into ``RankTrace.details``: for events with arguments of a collective, or with shapes of one."""

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def end(self) -> Ints:
        """ns."""
        return self.start + self.duration


@dataclass
class Detail:
    """Arguments of a collective; None where the trace does not tell."""

    collective: str | None = None
    """``Collective name``, such as ``allreduce`` or ``_allgather_base``."""
    group: str | None = None
    """``Process Group Name``."""
    sequence: int | None = None
    """``Seq``."""
    in_elements: int | None = None
    out_elements: int | None = None
    dtype: str | None = None
    group_size: int | None = None
    shapes: Any = None
    """``Input Dims``, of host events."""
    types: Any = None
    """``Input type``, of host events."""


@dataclass
class RankTrace:
    """What was read of one file."""

    path: str
    rank: int | None
    rank_from: str
    """How ``rank`` was found: ``trace``, ``file name`` or ``none`` (then the order of the files gives it)."""
    world_size: int | None
    host: str | None
    backend: str | None
    groups: dict[str, tuple[int, ...]]
    """Global ranks of each process group, by name."""
    group_descriptions: dict[str, str]
    meta: dict[str, Any]
    """What :class:`lit_llm.callbacks.TraceCapture` has noted (``lit_llm`` in the file); else empty."""
    clock: str
    """``wall``: starts are ns since 1970, comparable between ranks up to their clocks' skew; ``unknown``: not so."""
    truncated: bool
    problems: list[str]
    """What was wrong with the file, a line each, for the user."""
    events: Events
    names: list[str]
    threads: list[tuple[str, str]]
    """(pid, tid) as text, of each thread."""
    details: list[Detail]
    thread_names: dict[int, str] = field(default_factory=dict)
    """By index into ``threads``."""
