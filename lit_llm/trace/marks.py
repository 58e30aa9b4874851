"""Step marks and annotations of a rank: what the host was doing when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lit_llm.trace import kinds
from lit_llm.trace.columns import Category, Ints, RankTrace
from lit_llm.trace.intervals import EMPTY, covered, join, subtract, union


@dataclass
class Marks:
    """The steps of a rank, in order of time."""

    numbers: Ints
    """(steps,) as in ``ProfilerStep#N``."""
    windows: Ints
    """(steps, 2) on the host."""
    thread: int
    """The main thread, that of the marks."""
    data: Ints
    """(n, 2) waiting for the next batch."""
    has_data: bool
    optimizer: Ints
    """(n, 2) the optimizer's own work."""
    has_optimizer: bool
    phases: dict[str, Ints]
    """Intervals of ``forward``, ``backward``, ``validation``, ..."""
    repeated: bool = False
    """Whether numbers came twice, so that steps are counted from 0 here instead."""

    def __len__(self) -> int:
        return len(self.numbers)

    def step_of(self, times: Ints) -> Ints:
        """The place of the step in which each time lies, -1 for none."""
        if not len(self):
            return np.full(len(times), -1, dtype=np.int64)
        place = np.searchsorted(self.windows[:, 0], times, side="right") - 1
        return np.where((place >= 0) & (times < self.windows[np.maximum(place, 0), 1]), place, -1)

    @property
    def lengths(self) -> Ints:
        """(steps,) ns on the host, without a validation in the middle of a step."""
        return self.windows[:, 1] - self.windows[:, 0] - self.per_step(self.phases.get("validation", EMPTY))

    def per_step(self, one: Ints) -> Ints:
        """How much of a set lies in each step, ns."""
        return covered(one, self.windows[:, 0], self.windows[:, 1])


_PHASES = ("forward", "backward", "validation", "batch_to_device")


def find_marks(trace: RankTrace) -> Marks:
    """The step marks and annotations; a mark that a GPU mirrors counts once."""
    events = trace.events
    host = events.category == Category.ANNOTATION
    steps = {place: int(found.group(1)) for place, name in enumerate(trace.names) if (found := kinds.STEP.match(name))}
    is_step = np.isin(events.name, list(steps)) & host if steps else np.zeros(len(events), dtype=bool)
    places = np.flatnonzero(is_step)
    if len(places):
        threads, counts = np.unique(events.thread[places], return_counts=True)
        thread = int(threads[counts.argmax()])
        places = places[events.thread[places] == thread]
    else:
        ops = events.thread[events.category == Category.CPU_OP]
        thread = int(np.bincount(ops).argmax()) if len(ops) else -1
    numbers = np.array([steps[int(events.name[place])] for place in places], dtype=np.int64)
    windows = np.stack([events.start[places], events.end[places]], axis=1) if len(places) else EMPTY
    numbers, windows = _merged(numbers, windows)
    if trace.meta.get("last_step_is_partial") and len(numbers) > 1:  # the run ended in it
        numbers, windows = numbers[:-1], windows[:-1]
    repeated = len(np.unique(numbers)) < len(numbers)
    if repeated:  # as of two epochs that count anew
        numbers = np.arange(len(numbers), dtype=np.int64)

    def named(test: object, among: np.ndarray) -> Ints:
        chosen = kinds.matching(trace.names, test)[events.name] & among  # type: ignore[arg-type]
        return union(events.start[chosen], events.end[chosen])

    # A loader's annotation may be a CPU op on other versions; a GPU's mirror of it is not meant.
    on_host = host | (events.category == Category.CPU_OP) | (events.category == Category.OTHER)
    data = named(kinds.DATA.match, on_host)
    optimizer = named(lambda name: name == "optimizer", host)
    if not len(optimizer):  # torch's own mark, around the closure that Lightning runs in it
        optimizer = subtract(named(kinds.OPTIMIZER.match, host), join(named(kinds.FORWARD_BACKWARD.match, host), data))
    phases = {name: named(lambda one, name=name: one == name, host) for name in _PHASES}
    return Marks(numbers, windows, thread, data, len(data) > 0, optimizer, len(optimizer) > 0, phases, repeated)


def _merged(numbers: Ints, windows: Ints) -> tuple[Ints, Ints]:
    """Marks one after the other: of nested ones the inner, of overlapping ones the first until the next begins."""
    keep: list[tuple[int, int, int]] = []
    for number, (start, end) in zip(numbers.tolist(), windows.tolist(), strict=True):
        while keep and keep[-1][2] >= end and keep[-1][1] <= start:  # around this one
            keep.pop()
        if keep and keep[-1][2] > start:
            keep[-1] = (keep[-1][0], keep[-1][1], start)
        keep.append((number, start, end))
    table = np.array(keep, dtype=np.int64).reshape(len(keep), 3)
    return table[:, 0], table[:, 1:]
