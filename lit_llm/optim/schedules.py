"""Learning rate schedules: pure functions of the optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch.optim.lr_scheduler import LambdaLR

from lit_llm.errors import UserError
from lit_llm.optim.numbers import as_float, as_steps

ScheduleName = Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"]
WARMUP_FRACTION = 0.01
DECAY_FRACTION = 0.2


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up, then one of five shapes; see :func:`lr_factor`.

    Args:
        name: the shape.
        warmup_steps, warmup_fraction: length of the warm-up in steps, or as a share of the run; neither: 1% of the run,
            or none where its length is unknown.
        decay_steps, decay_fraction: length of the last part of ``wsd``; neither: 20% of the run.
        min_lr_ratio: the rate at the end as a share of the peak (cosine, linear, wsd).
        total_steps: length of the run in optimizer steps; None: the Trainer's.
    """

    name: ScheduleName = "cosine"
    warmup_steps: int | None = None
    warmup_fraction: float | None = None
    decay_steps: int | None = None
    decay_fraction: float | None = None
    min_lr_ratio: float = 0.1
    total_steps: int | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(ScheduleName):
            known = ", ".join(get_args(ScheduleName))
            raise UserError(f"model.schedule.name {self.name!r} is unknown; known are {known}")
        for part in ("warmup", "decay"):
            steps, fraction = f"{part}_steps", f"{part}_fraction"
            if getattr(self, steps) is not None and getattr(self, fraction) is not None:
                raise UserError(f"give model.schedule.{steps} or model.schedule.{fraction}, not both")
            object.__setattr__(self, steps, as_steps(f"model.schedule.{steps}", getattr(self, steps)))
            if getattr(self, fraction) is not None:
                share = as_float(f"model.schedule.{fraction}", getattr(self, fraction), low=0.0, high=1.0)
                object.__setattr__(self, fraction, share)
        ratio = as_float("model.schedule.min_lr_ratio", self.min_lr_ratio, low=0.0, high=1.0)
        object.__setattr__(self, "min_lr_ratio", ratio)
        object.__setattr__(self, "total_steps", as_steps("model.schedule.total_steps", self.total_steps, low=1))

    def needs_total(self) -> bool:
        """Whether the rate depends on the length of the run."""
        return self.name in ("cosine", "linear", "wsd") or bool(self.warmup_fraction)


def lr_factor(step: int, config: ScheduleConfig, total_steps: int | None) -> float:
    """The share of the peak rate that optimizer step ``step`` (from 0) is taken with.

    With a warm-up of w steps it is (step + 1) / w while step < w; step w is the first at the full rate. Then, over the
    steps from w to the last one, total_steps - 1:

    - ``cosine`` (Loshchilov and Hutter 2017) and ``linear`` fall from 1 to ``min_lr_ratio``, reached at the last step;
    - ``wsd`` (Hu et al. 2024, MiniCPM) stays at 1 and falls linearly to ``min_lr_ratio`` over the last decay steps;
    - ``inverse_sqrt`` (Vaswani et al. 2017) is sqrt(w / (step + 1)), with w at least 1;
    - ``constant`` stays at 1.

    Beyond the last step the rate stays as it is there.

    Raises:
        UserError: the length of the run is needed and unknown.
    """
    if total_steps is None and config.needs_total():
        raise UserError(
            f"model.schedule {config.name} needs the length of the run: give trainer.max_steps, or "
            "model.schedule.total_steps"
        )
    warmup = _length(config.warmup_steps, config.warmup_fraction, WARMUP_FRACTION, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.name == "constant":
        return 1.0
    if config.name == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / max(step + 1, warmup, 1))
    assert total_steps is not None
    last = total_steps - 1
    start = warmup
    if config.name == "wsd":
        # The first step below the peak is the first of the last `decay` steps.
        decay = _length(config.decay_steps, config.decay_fraction, DECAY_FRACTION, total_steps)
        start = max(warmup, last - decay)
    done = min(max(step - start, 0) / (last - start), 1.0) if last > start else float(step > start)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if config.name == "cosine" else 1 - done
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape


def _length(steps: int | None, fraction: float | None, default: float, total: int | None) -> int:
    if steps is not None:
        return steps
    if total is None:
        return 0
    return round((default if fraction is None else fraction) * total)


def build_scheduler(optimizer: torch.optim.Optimizer, config: ScheduleConfig, total_steps: int | None) -> LambdaLR:
    """The schedule as torch's scheduler; step it after every optimizer step.

    Raises:
        UserError: the length of the run is needed and unknown.
    """
    lr_factor(0, config, total_steps)

    # A function, not an object: LambdaLR saves an object's fields in checkpoints and would bring old settings back.
    def factor(step: int) -> float:
        return lr_factor(step, config, total_steps)

    return LambdaLR(optimizer, factor)
