"""Evaluation where ranks that share a model have different amounts to compute."""

from __future__ import annotations

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
        model: sharded over ``group``.
        group: that gathers together.
    """

    def __init__(self, model: Transformer, group: dist.ProcessGroup) -> None:
        self._model, self._group = model, group
        self._hook: Any = None

    def start(self) -> None:
        """From now on until :meth:`finish`, all processes of the group must make their forwards so."""
        if self._hook is None:
            self._hook = self._model.register_forward_pre_hook(self._announce, prepend=True)

    def _announce(self, module: Any, args: Any) -> None:
        self._count(1)

    def _count(self, forwards: int) -> Tensor:
        coming = torch.full((1,), forwards, dtype=torch.int32, device=self._model.device)
        dist.all_reduce(coming, group=self._group)
        return coming

    def finish(self) -> None:
        """Takes part until all are done; every process must come here, also one that made no forward."""
        self.stop()
        ids = torch.zeros((1, 1), dtype=torch.int64, device=self._model.device)
        with torch.no_grad():
            while int(self._count(0)):
                self._model(ids)

    def stop(self) -> None:
        """Leaves without waiting, as after an error."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
