"""Processes that do one thing together, and all hear of it when one of them fails."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")


class Team:
    """The processes of a group, or this one alone where there are no others.

    Args:
        group: of a back end that sends objects, best gloo; None: all processes.
    """

    def __init__(self, group: Any = None) -> None:
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.group = group
        self.rank = torch.distributed.get_rank(group) if joined else 0
        self.size = torch.distributed.get_world_size(group) if joined else 1
        self.alone = not joined

    def gather(self, value: Any) -> list[Any]:
        """Every process' value, by rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values

    def first(self, step: Callable[[], _Result]) -> _Result:
        """Lets rank 0 do something; all get its result, or raise what it raised."""
        return self._told(*_tried(step) if self.rank == 0 else (None, None), first=True)

    def all(self, step: Callable[[], _Result]) -> _Result:
        """Lets every process do something; if it raises on one, it does on all."""
        return self._told(*_tried(step), first=False)

    def _told(self, result: Any, error: BaseException | None, *, first: bool) -> Any:
        if first:
            told = self.gather((result, error) if self.rank == 0 else None)
            result, failure = told[0]
        else:
            failure = next((one for one in self.gather(error) if one is not None), None)
        if error is not None:
            raise error
        if failure is not None:
            raise failure
        return result


def _tried(step: Callable[[], _Result]) -> tuple[_Result | None, BaseException | None]:
    try:
        return step(), None
    except Exception as error:
        try:
            pickle.dumps(error)
        except Exception:
            return None, RuntimeError(repr(error))
        return None, error
