"""Learning-rate schedules: pure functions of the optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from lit_llm.errors import UserError
from lit_llm.optim.checks import as_float, as_int, one_of

ScheduleName = Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"]

_DEFAULT_WARMUP_FRACTION = 0.01
_DEFAULT_DECAY_FRACTION = 0.2


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate moves over a run; :func:`lr_factor` has the formulas. All steps are optimizer steps.

    Tokens count what all ranks read, padding included; they become steps by division through the tokens of a global
    batch, rounded up.

    Attributes:
        name: the shape after the warm-up.
        warmup_steps: steps of linear warm-up, or
        warmup_fraction: their share of the run, rounded to whole steps, or
        warmup_tokens: the tokens they read. With none of them, 1% of the run.
        decay_steps: for "wsd", steps of the final decay, or
        decay_fraction: their share of the run, rounded to whole steps, or
        decay_tokens: the tokens they read. With none of them, 20% of the run.
        min_lr_ratio: what "cosine", "linear" and "wsd" end at, as a share of the peak.
        total_steps: the length the schedule is made for, or
        total_tokens: the tokens read in it. With neither, the run's own.

    Raises:
        UserError: a value that is not as described, two for one length, or a decay for a shape that has none.
    """

    name: ScheduleName = "cosine"
    warmup_steps: int | None = None
    warmup_fraction: float | None = None
    decay_steps: int | None = None
    decay_fraction: float | None = None
    min_lr_ratio: float = 0.1
    total_steps: int | None = None
    warmup_tokens: int | float | None = None
    decay_tokens: int | float | None = None
    total_tokens: int | float | None = None

    def __post_init__(self) -> None:
        one_of("model.schedule.name", self.name, get_args(ScheduleName))
        for part, low in (("warmup", 0), ("decay", 0), ("total", 1)):
            for field in (f"{part}_steps", f"{part}_tokens"):
                if getattr(self, field) is not None:
                    object.__setattr__(self, field, as_int(f"model.schedule.{field}", getattr(self, field), low))
        for field in ("warmup_fraction", "decay_fraction", "min_lr_ratio"):
            if field == "min_lr_ratio" or getattr(self, field) is not None:
                object.__setattr__(self, field, as_float(f"model.schedule.{field}", getattr(self, field), 0.0, 1.0))
        for part in ("warmup", "decay", "total"):
            names = (f"{part}_steps", f"{part}_fraction", f"{part}_tokens")
            given = [(name, getattr(self, name)) for name in names if getattr(self, name, None) is not None]
            if len(given) > 1:
                (one, first), (other, second) = given[:2]
                raise UserError(
                    f"model.schedule.{one} ({first}) and model.schedule.{other} ({second}) exclude each other; give one"
                )
            if part == "decay" and self.name != "wsd" and given:
                raise UserError(
                    f"model.schedule.{given[0][0]}: decay_steps, decay_fraction and decay_tokens belong to wsd, not to "
                    f"{self.name}; drop them"
                )


class Lengths(NamedTuple):
    """A schedule in optimizer steps.

    Attributes:
        warmup: steps of the warm-up, as asked for: it may be longer than the run.
        decay: steps of the final decay, at most what the warm-up leaves: for "cosine" and "linear" all of that, for
            "inverse_sqrt" and "constant" 0.
        total: steps that the schedule is made for; None: not known, and not needed.
    """

    warmup: int
    decay: int
    total: int | None


def resolved(config: ScheduleConfig, total_steps: int | None = None, tokens_per_step: int | None = None) -> Lengths:
    """The schedule's lengths in steps; arguments as for :func:`lr_factor`.

    Raises:
        UserError: as :func:`lr_factor`.
    """
    total = config.total_steps or _of_tokens("total", config.total_tokens, tokens_per_step) or _known(total_steps)
    warmup = config.warmup_steps
    if warmup is None:
        warmup = _of_tokens("warmup", config.warmup_tokens, tokens_per_step)
    if warmup is None:
        warmup = _share("warmup", config.warmup_fraction, _DEFAULT_WARMUP_FRACTION, config, total)
    if config.name in ("inverse_sqrt", "constant"):
        return Lengths(warmup, 0, total)
    total = _required(total, config, config.name)
    rest = max(0, total - warmup)
    if config.name != "wsd":
        return Lengths(warmup, rest, total)
    decay = config.decay_steps
    if decay is None:
        decay = _of_tokens("decay", config.decay_tokens, tokens_per_step)
    if decay is None:
        decay = _share("decay", config.decay_fraction, _DEFAULT_DECAY_FRACTION, config, total)
    return Lengths(warmup, min(decay, rest), total)


def lr_factor(
    step: int, config: ScheduleConfig, total_steps: int | None = None, tokens_per_step: int | None = None
) -> float:
    """The share of the peak learning rate that optimizer step number ``step``, counted from 0, uses.

    With w steps of warm-up, T in total (the configuration's, or else ``total_steps``) and m = ``config.min_lr_ratio``:

    - every shape: (step + 1) / w while step < w, so that the first step already learns and step w - 1 is at the peak;
    - "cosine" (Loshchilov and Hutter 2017, equation 5) and "linear": from 1 at step w to m at step T - 1, with
      x = (step - w) / (T - 1 - w): m + (1 - m) (1 + cos(pi x)) / 2, and 1 - (1 - m) x;
    - "wsd" (warm-up, stable, decay; Hu et al. 2024, section 4): 1, then over the last d steps linearly from 1 to m,
      1 - (1 - m) (step - (T - d) + 1) / d. Where w + d > T the decay has only the steps that the warm-up leaves;
    - "inverse_sqrt" (Vaswani et al. 2017, section 5.3, scaled to a peak of 1): sqrt(w / (step + 1)), with w at least 1;
    - "constant": 1.

    "cosine", "linear" and "wsd" stay at their last value beyond T. A run that is shorter than its warm-up only warms
    up, and one with a single step after it takes that step at 1 ("cosine", "linear").

    Args:
        step: from 0.
        config: the schedule.
        total_steps: optimizer steps of the run; None, -1 or infinity: not known.
        tokens_per_step: tokens of a global batch, labels or not; None: not known.

    Raises:
        UserError: T is needed, for the shape or for a fraction, and not known; or a length is in tokens and
            ``tokens_per_step`` is not known.
    """
    warmup, decay, total = resolved(config, total_steps, tokens_per_step)
    if total is not None and config.name in ("cosine", "linear", "wsd"):
        step = min(step, total - 1)
    if step < warmup:
        return (step + 1) / warmup
    if config.name == "constant":
        return 1.0
    if config.name == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / (step + 1))

    assert total is not None
    if config.name == "wsd":
        done = max(0, step - (total - decay) + 1) / max(decay, 1)
    else:
        done = (step - warmup) / max(total - 1 - warmup, 1)
    if config.name == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    # A weighted mean, and not 1 - (1 - m) done, is exact at both ends.
    return (1 - done) + config.min_lr_ratio * done


def _known(total_steps: float | None) -> int | None:
    """None for a length that is not known: None, and the -1 and infinity that trainers use."""
    return int(total_steps) if total_steps is not None and 0 < total_steps < math.inf else None


def _of_tokens(part: str, tokens: float | None, tokens_per_step: int | None) -> int | None:
    """``tokens`` in steps, rounded up."""
    if tokens is None:
        return None
    if not tokens_per_step or tokens_per_step < 0:
        raise UserError(
            f"model.schedule.{part}_tokens is {tokens}, and the tokens of a global batch are not known; give "
            f"model.schedule.{part}_steps"
        )
    return -(-int(tokens) // int(tokens_per_step))


def _share(what: str, fraction: float | None, default: float, config: ScheduleConfig, total: int | None) -> int:
    share = default if fraction is None else fraction
    return round(share * _required(total, config, f"a {what} of {share:.0%} of the run")) if share else 0


def _required(total: int | None, config: ScheduleConfig, what: str) -> int:
    if total is None:
        raise UserError(
            f"the length of the run is not known, and schedule {config.name!r} needs it for {what}: "
            "set the trainer's max_steps, or model.schedule.total_steps"
        )
    return total
