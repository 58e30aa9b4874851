"""Which steps are not to be taken: decided on the device, from numbers that are equal on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lit_llm.errors import UserError

NonFinite = Literal["skip", "stop", "ignore"]

GOOD, NON_FINITE, SPIKE = 0, 1, 2

# A loss that hardly moves would make every rise a spike.
_LEAST_DEVIATION = 0.01


@dataclass(frozen=True)
class GuardConfig:
    """What happens to a step whose loss or gradient can't be right.

    A skipped step changes neither weights nor optimizer state; the step counts, and the data and the schedule go on.

    Attributes:
        nonfinite: a loss or gradient that is not finite: "skip" the step, "stop" the run (the step is not taken and the
            run saved), or "ignore" it.
        spike_factor: standard deviations above the mean of the last ``spike_window`` steps at which a loss or gradient
            norm makes its step be skipped; null: never. The deviation counts as at least 1% of the mean.
        spike_window: steps whose loss and gradient norm make the distribution; nothing is judged before half of them
            are there. Skipped steps do not enter.
        max_skips: skipped steps in a row after which the run stops (not finite), or takes the step and begins a new
            distribution (spikes).
        peer_timeout: seconds without a sign of life after which another rank counts as gone and the run ends.
        save_batches: how many times in a run the batch of a bad step is saved for ``lit-llm fit --replay FILE``.

    Raises:
        UserError: a value that is not as described.
    """

    nonfinite: NonFinite = "skip"
    spike_factor: float | None = None
    spike_window: int = 128
    max_skips: int = 10
    save_batches: int = 3
    peer_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.nonfinite not in get_args(NonFinite):
            raise UserError(f"model.guard.nonfinite must be skip, stop or ignore, not {self.nonfinite!r}")
        if self.spike_factor is not None:
            try:
                factor = float(self.spike_factor)
            except (TypeError, ValueError):
                factor = math.nan
            if not (math.isfinite(factor) and factor > 0):
                raise UserError(f"model.guard.spike_factor must be a number above 0 or null, not {self.spike_factor!r}")
            object.__setattr__(self, "spike_factor", factor)
        timeout = self.peer_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise UserError(f"model.guard.peer_timeout must be a number of seconds above 0, not {timeout!r}")
        for field, least in (("spike_window", 2), ("max_skips", 1), ("save_batches", 0)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"model.guard.{field} must be a whole number of at least {least}, not {value!r}")

    @property
    def active(self) -> bool:
        """Whether any step can be skipped."""
        return self.nonfinite != "ignore" or self.spike_factor is not None


class Guard:
    """Judges each step by its loss and gradient norm, with no host synchronisation.

    All of it is arithmetic on numbers that every rank has alike, so that all ranks judge alike.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self._values = torch.zeros(2, config.spike_window)  # loss and norm of accepted steps, a ring
        self._accepted = torch.zeros((), dtype=torch.int64)
        self._in_a_row = torch.zeros((), dtype=torch.int64)
        self.skipped = torch.zeros((), dtype=torch.int64)
        """Steps skipped so far, a scalar on the device."""

    def judge(self, loss: Tensor | None, norm: Tensor) -> Tensor:
        """The verdict on a step, (5,) float32: GOOD, NON_FINITE or SPIKE; loss; norm; skipped steps in a row; limit.

        Args:
            loss: the global batch's mean loss, a scalar; None where it is not known.
            norm: the gradient's norm, before clipping.
        """
        self._to(norm.device)
        values = torch.stack([norm if loss is None else loss, norm]).detach().float()
        finite = torch.isfinite(values).all()
        bad = ~finite if self.config.nonfinite != "ignore" else torch.zeros_like(finite)
        limits = torch.full_like(values, math.inf)
        spike = torch.zeros_like(finite)
        if self.config.spike_factor is not None:
            limits = self._limits(self.config.spike_factor)
            spike = finite & (values > limits).any()
            anew = spike & (self._in_a_row >= self.config.max_skips)
            spike = spike & ~anew
            self._accepted = torch.where(anew, 0, self._accepted)
        skip = bad | spike
        self._remember(values, finite & ~skip)
        self._in_a_row = torch.where(skip, self._in_a_row + 1, 0)
        self.skipped = self.skipped + skip
        kind = bad * NON_FINITE + spike * SPIKE
        limit = torch.where(values[0] > limits[0], limits[0], limits[1])
        return torch.stack([kind.float(), values[0], values[1], self._in_a_row.float(), limit])

    def _limits(self, factor: float) -> Tensor:
        window = self.config.spike_window
        known = self._accepted.clamp(max=window)
        inside = torch.arange(window, device=self._values.device) < known
        number = known.clamp(min=1)
        mean = (self._values * inside).sum(1) / number
        variance = ((self._values - mean[:, None]).square() * inside).sum(1) / number
        deviation = torch.maximum(variance.sqrt(), _LEAST_DEVIATION * mean.abs())
        return torch.where(known * 2 >= window, mean + factor * deviation, math.inf)

    def _remember(self, values: Tensor, accept: Tensor) -> None:
        window = self.config.spike_window
        here = torch.arange(window, device=self._values.device) == self._accepted % window
        self._values = torch.where(here & accept, values[:, None], self._values)
        self._accepted = self._accepted + accept

    def _to(self, device: torch.device) -> None:
        if self._values.device != device:
            for name in ("_values", "_accepted", "_in_a_row", "skipped"):
                setattr(self, name, getattr(self, name).to(device))

    def state_dict(self) -> dict[str, Any]:
        """The distribution and the counts."""
        return {
            "values": self._values.clone(),
            "accepted": self._accepted.clone(),
            "in_a_row": self._in_a_row.clone(),
            "skipped": self.skipped.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there; a window of another length begins a new distribution."""
        self.skipped, self._in_a_row = state["skipped"].clone(), state["in_a_row"].clone()
        if state["values"].shape == self._values.shape:
            self._values, self._accepted = state["values"].clone(), state["accepted"].clone()
        else:
            self._values = torch.zeros_like(self._values, device="cpu")
            self._accepted = torch.zeros((), dtype=torch.int64)
