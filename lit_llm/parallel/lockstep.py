"""Evaluation where ranks that share a model have different amounts to compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_llm.model import Transformer


class Lockstep:
    """Keeps processes together that gather parameters together, however many forwards each has to make.

    A forward of a sharded model gathers its parameters from all processes of a group, so one that has less to do, with
    fewer batches or shorter completions, would leave the others waiting for ever. Here each forward begins by saying
    that it comes (one number added up over the group, which nobody reads), and who is done takes part in the others'
    forwards, with a row of one token, until nobody has one to make.

    Args:
        models: sharded over ``group``; all processes use them in the same order.
        group: that gathers together.
    """

    def __init__(self, models: Sequence[Transformer], group: dist.ProcessGroup) -> None:
        self._models, self._group = list(models), group
        self._hooks: list[Any] = []

    def start(self) -> None:
        """From now on until :meth:`finish`, all processes of the group must make their forwards so."""
        if not self._hooks:
            self._hooks = [
                model.register_forward_pre_hook(_Announcement(self, number), prepend=True)
                for number, model in enumerate(self._models)
            ]

    def count(self, number: int | None) -> Tensor:
        """How many processes are about to make a forward of each model, (models,); this one of model ``number``."""
        coming = torch.zeros(len(self._models), dtype=torch.int32, device=self._models[0].device)
        if number is not None:
            coming[number] = 1
        dist.all_reduce(coming, group=self._group)
        return coming

    def finish(self) -> None:
        """Takes part until all are done; every process must come here, also one that made no forward."""
        self.stop()
        ids = torch.zeros((1, 1), dtype=torch.int64, device=self._models[0].device)
        with torch.no_grad():
            while any(coming := self.count(None).tolist()):
                self._models[max(range(len(coming)), key=coming.__getitem__)](ids)

    def stop(self) -> None:
        """Leaves without waiting, as after an error."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _Announcement:
    """A forward's pre hook. The compiler leaves it alone."""

    def __init__(self, lockstep: Lockstep, number: int) -> None:
        self._lockstep, self._number = lockstep, number

    @torch.compiler.disable
    def __call__(self, module: Any, args: Any) -> None:
        self._lockstep.count(self._number)
