"""Learning-rate schedules: pure functions of the optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_llm.errors import UserError
from lit_llm.optim.checks import as_float, as_int, one_of

ScheduleName = Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"]

_DEFAULT_WARMUP_FRACTION = 0.01
_DEFAULT_DECAY_FRACTION = 0.2


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate moves over a run; :func:`lr_factor` has the formulas. All steps are optimizer steps.

    Attributes:
        name: the shape after the warm-up.
        warmup_steps: steps of linear warm-up, or
        warmup_fraction: their share of the run, rounded to whole steps. With neither, 1% of the run.
        decay_steps: for "wsd", steps of the final decay, or
        decay_fraction: their share of the run, rounded to whole steps. With neither, 20% of the run.
        min_lr_ratio: what "cosine", "linear" and "wsd" end at, as a share of the peak.
        total_steps: the length the schedule is made for; None: the run's own.

    Raises:
        UserError: a value that is not as described, both of a pair, or a decay for a shape that has none.
    """

    name: ScheduleName = "cosine"
    warmup_steps: int | None = None
    warmup_fraction: float | None = None
    decay_steps: int | None = None
    decay_fraction: float | None = None
    min_lr_ratio: float = 0.1
    total_steps: int | None = None

    def __post_init__(self) -> None:
        one_of("model.schedule.name", self.name, get_args(ScheduleName))
        for field, low in (("warmup_steps", 0), ("decay_steps", 0), ("total_steps", 1)):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, as_int(f"model.schedule.{field}", getattr(self, field), low))
        for field in ("warmup_fraction", "decay_fraction", "min_lr_ratio"):
            if field == "min_lr_ratio" or getattr(self, field) is not None:
                object.__setattr__(self, field, as_float(f"model.schedule.{field}", getattr(self, field), 0.0, 1.0))
        for part in ("warmup", "decay"):
            steps, fraction = getattr(self, f"{part}_steps"), getattr(self, f"{part}_fraction")
            if steps is not None and fraction is not None:
                raise UserError(
                    f"model.schedule.{part}_steps ({steps}) and model.schedule.{part}_fraction ({fraction}) exclude "
                    "each other; give one"
                )
            if part == "decay" and self.name != "wsd" and not (steps is None and fraction is None):
                raise UserError(
                    f"model.schedule.decay_steps and decay_fraction belong to wsd, not to {self.name}; drop them"
                )


def lr_factor(step: int, config: ScheduleConfig, total_steps: int | None = None) -> float:
    """The share of the peak learning rate that optimizer step number ``step``, counted from 0, uses.

    With w steps of warm-up, T in total (``config.total_steps``, or ``total_steps``) and m = ``config.min_lr_ratio``:

    - every shape: (step + 1) / w while step < w, so that the first step already learns and step w - 1 is at the peak;
    - "cosine" (Loshchilov and Hutter 2017, equation 5) and "linear": from 1 at step w to m at step T - 1, with
      x = (step - w) / (T - 1 - w): m + (1 - m) (1 + cos(pi x)) / 2, and 1 - (1 - m) x;
    - "wsd" (warm-up, stable, decay; Hu et al. 2024, section 4): 1, then over the last d steps linearly from 1 to m,
      1 - (1 - m) (step - (T - d) + 1) / d. Where w + d > T the decay has only the steps that the warm-up leaves;
    - "inverse_sqrt" (Vaswani et al. 2017, section 5.3, scaled to a peak of 1): sqrt(w / (step + 1)), with w at least 1;
    - "constant": 1.

    "cosine", "linear" and "wsd" stay at their last value beyond T. A run that is shorter than its warm-up only warms
    up, and one with a single step after it takes that step at 1 ("cosine", "linear").

    Raises:
        UserError: T is needed, for the shape or for a fraction, and not known.
    """
    total = config.total_steps or _known(total_steps)
    warmup = _part("warmup", config.warmup_steps, config.warmup_fraction, _DEFAULT_WARMUP_FRACTION, config, total)
    if config.name in ("cosine", "linear", "wsd"):
        total = _required(total, config, config.name)
        step = min(step, total - 1)
    if step < warmup:
        return (step + 1) / warmup
    if config.name == "constant":
        return 1.0
    if config.name == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / (step + 1))

    assert total is not None
    if config.name == "wsd":
        decay = _part("decay", config.decay_steps, config.decay_fraction, _DEFAULT_DECAY_FRACTION, config, total)
        decay = min(decay, total - warmup)
        done = max(0, step - (total - decay) + 1) / max(decay, 1)
    else:
        done = (step - warmup) / max(total - 1 - warmup, 1)
    if config.name == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    # A weighted mean, and not 1 - (1 - m) done, is exact at both ends.
    return (1 - done) + config.min_lr_ratio * done


def build_scheduler(optimizer: Optimizer, config: ScheduleConfig, total_steps: int | None = None) -> LambdaLR:
    """A scheduler, stepped after every optimizer step, that sets each group's rate to its peak x :func:`lr_factor`.

    Its state is the step and the peak rates, plain types that load with ``weights_only=True``. The schedule itself is
    no part of it: a resumed run follows the configuration it is given, from the step it has reached.

    Raises:
        UserError: as :func:`lr_factor`.
    """
    # A partial's __dict__, which LambdaLR would save and restore, is empty.
    return LambdaLR(optimizer, partial(lr_factor, config=config, total_steps=total_steps))


def _known(total_steps: float | None) -> int | None:
    """None for a length that is not known: None, and the -1 and infinity that trainers use."""
    return int(total_steps) if total_steps is not None and 0 < total_steps < math.inf else None


def _part(
    what: str, steps: int | None, fraction: float | None, default: float, config: ScheduleConfig, total: int | None
) -> int:
    if steps is not None:
        return steps
    share = default if fraction is None else fraction
    return round(share * _required(total, config, f"a {what} of {share:.0%} of the run")) if share else 0


def _required(total: int | None, config: ScheduleConfig, what: str) -> int:
    if total is None:
        raise UserError(
            f"the length of the run is not known, and schedule {config.name!r} needs it for {what}: "
            "set the trainer's max_steps, or model.schedule.total_steps"
        )
    return total
