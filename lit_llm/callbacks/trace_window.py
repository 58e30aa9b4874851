"""Which steps of a run are recorded: a function of the options and of the step alone, so equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lit_llm.errors import UserError


@dataclass(frozen=True)
class Window:
    """Steps that are recorded together, by ``trainer.global_step`` when they begin."""

    prepare: int
    """Before this step the profiler is made ready."""
    first: int
    """Is recorded."""
    last: int
    """Is the first that isn't any more."""
    requested: bool = False
    """Asked for while the run went on."""


@dataclass(frozen=True)
class Schedule:
    """See :class:`lit_llm.callbacks.TraceCapture`.

    Raises:
        UserError: a number out of its range.
    """

    start: int | None
    wait: int
    warmup: int
    active: int
    every_n_steps: int | None
    repeat: int

    def __post_init__(self) -> None:
        if self.start is not None:
            check_count("start", self.start, 0)
        for name, least in (("wait", 0), ("warmup", 0), ("active", 1), ("repeat", 0)):
            check_count(name, getattr(self, name), least)
        if self.every_n_steps is not None:
            check_count("every_n_steps", self.every_n_steps, 1)
            if self.every_n_steps < self.warmup + self.active:
                raise UserError(
                    f"trace_capture.every_n_steps is {self.every_n_steps}, but a window takes "
                    f"{self.warmup + self.active} steps (warmup {self.warmup} + active {self.active}); "
                    f"give at least {self.warmup + self.active}"
                )

    def windows(self, begin: int) -> Iterator[Window]:
        """The windows of a run, in order; without end where ``repeat`` is 0.

        Args:
            begin: the step that the run begins with.
        """
        if self.start is None:
            return
        period = self.every_n_steps or self.wait + self.warmup + self.active
        number = 0
        while not self.repeat or number < self.repeat:
            prepare = begin + self.start + number * period + self.wait
            yield self._window(prepare)
            number += 1

    def requested(self, step: int) -> Window:
        """The window of a request that all ranks hear of before ``step``."""
        return self._window(step, requested=True)

    def _window(self, prepare: int, requested: bool = False) -> Window:
        first = prepare + self.warmup
        return Window(prepare, first, first + self.active, requested)


class Plan:
    """The windows of a run as they open and close: by steps alone, so alike on ranks that record and on others.

    Args:
        schedule: of the options.
        begin: the step that the run begins with.
        max_windows: after which no more are opened.
        tell: called with a line on what is left out.
    """

    def __init__(self, schedule: Schedule, begin: int, max_windows: int, tell: Callable[[str], None]) -> None:
        self.window: Window | None = None
        """That is open."""
        self.closed = 0
        """Windows that went to their end."""
        self._schedule, self._max_windows, self._tell = schedule, max_windows, tell
        self._windows = schedule.windows(begin)
        self._next = next(self._windows, None)
        self._opened = 0
        self._taken_to = begin  # the end of the latest window

    def turn(self, step: int) -> Window | None:
        """Closes the window that ends before ``step``, and gives the one that opens; once a step is enough."""
        if self.window is not None and step >= self.window.last:
            self.window = None
            self.closed += 1
        while self.window is None and self._next is not None and step >= self._next.prepare:
            window, self._next = self._next, next(self._windows, None)
            if window.first < self._taken_to:
                steps = f"steps {window.first} to {window.last - 1}"
                self._tell(f"the trace of {steps} by schedule is left out: one that was asked for lies over it")
            elif step < window.last and self._open(window):
                return window
        return None

    def ask(self, step: int) -> Window | None:
        """The window of a request that all ranks hear of before ``step``; None, with a line, where there is none."""
        if self.window is not None:
            self._tell("a trace was asked for, and one is being taken already; ask again after it")
            return None
        window = self._schedule.requested(step)
        return window if self._open(window) else None

    def _open(self, window: Window) -> bool:
        if self._opened >= self._max_windows:
            self._next = None
            self._tell(f"no more traces: this run has taken {self._opened} windows (trace_capture.max_windows)")
            return False
        self._opened += 1
        self.window, self._taken_to = window, window.last
        return True


@dataclass(frozen=True)
class Ranks:
    """The ranks that record.

    Args:
        given: ``all``, a list of ranks, or a number k for the ranks 0, k, 2k, ... (0: rank 0 alone); also as text.

    Raises:
        UserError: it is none of these.
    """

    given: str | int | tuple[int, ...]

    @classmethod
    def of(cls, given: object) -> Ranks:
        """Reads the option."""
        value = given.strip() if isinstance(given, str) else given
        if value == "all":
            return cls("all")
        if isinstance(value, str):
            parts = value.strip("[]").split(",")
            if not all(part.strip().isdecimal() for part in parts):
                raise _bad_ranks(given)
            numbers = [int(part) for part in parts]
            value = numbers if len(numbers) > 1 or value.startswith("[") else numbers[0]
        if isinstance(value, list | tuple):
            if not value or not all(_is_count(rank) for rank in value):
                raise _bad_ranks(given)
            return cls(tuple(sorted(set(value))))
        if not _is_count(value):
            raise _bad_ranks(given)
        assert isinstance(value, int)
        return cls(value) if value else cls((0,))

    def among(self, world_size: int) -> list[int]:
        """The ranks of a run that record.

        Raises:
            UserError: one of them is none of the run's.
        """
        if self.given == "all":
            return list(range(world_size))
        if isinstance(self.given, int):
            return list(range(0, world_size, self.given))
        assert isinstance(self.given, tuple)
        if self.given[-1] >= world_size:
            raise UserError(
                f"trace_capture.ranks names rank {self.given[-1]}, but this run has the ranks 0 to {world_size - 1}"
            )
        return list(self.given)


def check_count(name: str, value: object, least: int) -> None:
    """Refuses what is no whole number of at least ``least``.

    Raises:
        UserError: names the option.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"trace_capture.{name} must be a whole number of at least {least}; got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Refuses what is neither true nor false.

    Raises:
        UserError: names the option.
    """
    if not isinstance(value, bool):
        raise UserError(f"trace_capture.{name} must be true or false; got {value!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _bad_ranks(given: object) -> UserError:
    return UserError(
        f"trace_capture.ranks must be all, a list of ranks such as [0, 3], or a number k for every k-th; got {given!r}"
    )
