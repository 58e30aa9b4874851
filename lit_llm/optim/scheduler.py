"""The schedule at work on an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_llm.optim.resume import SCHEDULED
from lit_llm.optim.schedules import ScheduleConfig, lr_factor


class StepSchedule(LambdaLR):
    """Sets each group's rate to its peak x ``factor(step)``; its state is the step alone.

    Peaks and schedule are those it was built with: a resumed run follows the configuration it is given, from the step
    it has reached, with the very rates that an uninterrupted run would use.

    Args:
        optimizer: its groups' "lr" are the peaks.
        factor: the share of the peak that step number 0, 1, ... uses.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        super().__init__(optimizer, factor)
        setattr(optimizer, SCHEDULED, True)

    @property
    def factor(self) -> float:
        """The share of the peak that the next optimizer step uses."""
        return self.lr_lambdas[0](self.last_epoch)

    def state_dict(self) -> dict[str, Any]:
        """The step, as an int."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to the step of ``state_dict``, which any of torch's schedulers may have made, and sets the rates."""
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = self.last_epoch + 1
        factor = self.factor
        self._last_lr = [peak * factor for peak in self.base_lrs]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def build_scheduler(
    optimizer: Optimizer,
    config: ScheduleConfig,
    total_steps: int | None = None,
    tokens_per_step: int | None = None,
) -> StepSchedule:
    """A scheduler, stepped after every optimizer step, that sets each group's rate to its peak x :func:`lr_factor`.

    Raises:
        UserError: as :func:`lr_factor`.
    """
    factor = partial(lr_factor, config=config, total_steps=total_steps, tokens_per_step=tokens_per_step)
    return StepSchedule(optimizer, factor)
