"""Which steps of a run are recorded: a function of the options and of the step alone, so equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
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


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _bad_ranks(given: object) -> UserError:
    return UserError(
        f"trace_capture.ranks must be all, a list of ranks such as [0, 3], or a number k for every k-th; got {given!r}"
    )
