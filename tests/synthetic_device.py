"""Hosts and devices of a made run, all ranks at once: see :mod:`tests.synthetic_traces`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.synthetic_run import COLLECTIVES, Kernel, Run

MAIN, AUTOGRAD = 0, 1
COMPUTE_STREAM, COPY_STREAM, GATHER_STREAM, REDUCE_STREAM, NORM_STREAM = 7, 16, 20, 24, 28
_CALL_TO_DEVICE = 5.0  # us from a launch to the earliest start
_BETWEEN = 1.0  # us between two kernels of a stream


@dataclass
class Note:
    """An annotation on the host; times (ranks,)."""

    name: str
    step: int
    thread: int
    start: Any
    end: Any = None


@dataclass
class Launches:
    """Kernels (or copies) that a host thread has launched one after the other on a stream; times (ranks, kernels)."""

    step: int
    thread: int
    stream: int
    ops: list[tuple[str, ...]]
    names: list[str]
    call: str
    op_start: Any
    op_end: Any
    call_start: Any
    call_end: Any
    start: Any
    end: Any
    notes: tuple[Note, ...]
    mask: Any = None
    """(ranks,) of those that have them; None: all."""
    collective: dict[str, Any] | None = None
    bytes: int | None = None


@dataclass
class Loaded:
    """A host call that launches nothing, such as a synchronisation; times (ranks,)."""

    step: int
    thread: int
    name: str
    start: Any
    end: Any


class Ranks:
    """What hosts and devices do: kept in ``launches``, ``notes`` and ``calls``, in us since a common zero."""

    def __init__(self, run: Run) -> None:
        self.run, self.rng = run, np.random.default_rng(run.seed)
        self.host = np.zeros(run.ranks)
        self.free: dict[int, Any] = {}
        self.launches: list[Launches] = []
        self.notes: list[Note] = []
        self.calls: list[Loaded] = []
        self.open: list[Note] = []
        self.step, self.thread, self.sequence = 0, MAIN, 0
        self.launch_us = run.kernel_us / 5 if run.launch_us is None else run.launch_us
        self.compute_factor = _column(run.ranks, run.slow_rank)
        self.host_factor = _column(run.ranks, run.slow_host)
        self.depth = max(1, int(run.lead * 3 * run.kernels * run.layers))
        self.launched, self.ends = 0, [(0, np.zeros(run.ranks))]
        self.window = np.zeros(run.ranks)
        self.lag = np.zeros((run.steps, run.ranks))

    def _spread(self, *shape: int) -> Any:
        return np.exp(self.run.noise * self.rng.standard_normal(shape))

    @contextmanager
    def note(self, name: str) -> Iterator[None]:
        """An annotation around what happens inside, on the thread that runs."""
        self.host = self.host + 2.0
        note = Note(name, self.step, self.thread, self.host.copy())
        self.notes.append(note)
        self.open.append(note)
        self.host = self.host + 2.0
        yield
        self.host = self.host + 2.0
        note.end = self.host.copy()
        self.open.pop()

    def launch(
        self, kernels: Sequence[Kernel], stream: int = COMPUTE_STREAM, *, gate: Any = 0.0,
        call: str = "cudaLaunchKernel", compute: bool = False, mask: Any = None, bytes: int | None = None
    ) -> Any:  # fmt: skip
        """Launches kernels in a row; the first waits for ``gate``. The time when the stream is through, (ranks,)."""
        ranks, count = self.run.ranks, len(kernels)
        took = self.launch_us * self.host_factor[:, None] * self._spread(ranks, count)
        begin = self.host[:, None] + np.cumsum(took, axis=1) - took
        blocked = np.maximum(self._queue_limit(count) - (begin[:, 0] + 0.85 * took[:, 0]), 0.0)
        begin[:, 1:] += blocked[:, None]
        call_start, call_end, op_end = begin + 0.5 * took, begin + 0.85 * took, begin + 0.97 * took
        call_end[:, 0] += blocked  # a launch into a full queue waits in the call
        op_end[:, 0] += blocked
        ready = call_start + _CALL_TO_DEVICE
        ready[:, 0] = np.maximum.reduce([ready[:, 0] + blocked, np.broadcast_to(gate, ranks), self._free(stream)])
        lasts = np.array([us for *_, us in kernels]) * self._spread(ranks, count)
        if compute:
            lasts *= self.compute_factor[:, None]
        slots = np.cumsum(lasts + _BETWEEN, axis=1)
        through = slots + np.maximum.accumulate(ready - (slots - lasts - _BETWEEN), axis=1)
        start = through - lasts - _BETWEEN
        keep = np.ones(ranks, bool) if mask is None else mask
        self.host = np.where(keep, op_end[:, -1], self.host)
        self.free[stream] = np.where(keep, through[:, -1], self._free(stream))
        ops, names = [ops for ops, *_ in kernels], [name for _, name, _ in kernels]
        self.launches.append(
            Launches(self.step, self.thread, stream, ops, names, call, begin, op_end, call_start, call_end, start,
                     start + lasts, tuple(self.open), mask, None, bytes)
        )  # fmt: skip
        if stream == COMPUTE_STREAM:
            self.launched += count
            self.ends.append((self.launched, self.free[stream]))
        return self.free[stream]

    def collective(self, kind: str, elements: int, us: float, stream: int, gate: Any = 0.0) -> Any:
        """A collective of all ranks; ``elements`` of a whole. The time when it is through, (ranks,)."""
        ranks = self.run.ranks
        op, note, name, kernel, dtype, sides = COLLECTIVES[kind]
        self.sequence += 1
        took = 3 * self.launch_us * self.host_factor * self._spread(ranks)
        with self.note(note):
            begin = self.host
            call_start, call_end, self.host = begin + 0.6 * took, begin + 0.8 * took, begin + 0.97 * took
        start = np.maximum.reduce([call_start + _CALL_TO_DEVICE, np.broadcast_to(gate, ranks), self._free(stream)])
        end = start.max() + us * self._spread(1) + self.run.end_spread_us * self.rng.random(ranks)
        self.free[stream] = end + _BETWEEN
        if self.step >= 0:
            self.lag[self.step] = np.maximum(self.lag[self.step], start - start.min())
        sizes = [elements // ranks if small else elements for small in sides]
        arguments = {
            "name": name, "in": sizes[0], "out": sizes[1], "size": ranks, "dtype": dtype, "sequence": self.sequence
        }  # fmt: skip
        times = [t[:, None] for t in (begin, begin + 0.95 * took, call_start, call_end, start, end)]
        self.launches.append(
            Launches(self.step, self.thread, stream, [(op, "record_param_comms")], [kernel], "cudaLaunchKernelExC",
                     *times, tuple(self.open), None, arguments)
        )  # fmt: skip
        return end

    def _free(self, stream: int) -> Any:
        return self.free.setdefault(stream, np.zeros(self.run.ranks))

    def _queue_limit(self, count: int) -> Any:
        """When the device has come so far that another launch fits into the queue."""
        while len(self.ends) > 1 and self.ends[1][0] <= self.launched + count - self.depth:
            self.ends.pop(0)
        return self.ends[0][1] if self.launched + count > self.depth else 0.0


def _column(ranks: int, factors: Mapping[int, float]) -> Any:
    column = np.ones(ranks)
    for rank, factor in factors.items():
        column[rank] = factor
    return column
