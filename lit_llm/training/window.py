"""What gathers between two optimizer steps: the global batch's loss and label tokens, and the clock."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor


class StepWindow:
    """Sums over the micro-batches of one optimizer step, kept on the device.

    A micro-batch's loss sum is divided by ``scale``, a constant that is equal on all ranks; Lightning divides by the
    number of micro-batches and the strategy by the number of ranks. :meth:`close` gives the factor that turns the
    gradient of that into the gradient of (sum of all losses) / (number of all label tokens).
    """

    def __init__(self) -> None:
        self.scale: int | None = None
        self.trained_tokens: Tensor = torch.zeros((), dtype=torch.int64)
        self._loss_sum: Tensor | None = None
        self._count: Tensor | None = None
        self._by_source: Tensor | None = None
        self.trained_tokens_by_source: Tensor | None = None
        """(sources,) int64 where the data is a mixture; to be set before the first micro-batch."""
        self._clock: float | None = None
        self._paused_at: float | None = None
        self._tokens_at_clock = 0

    def discard(self) -> None:
        """Forgets an unfinished window, as of a fit that was stopped in the middle of a step."""
        self.scale = self._loss_sum = self._count = self._by_source = None

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch has been added since the last step."""
        return self._count is not None

    def add(self, loss_sum: Tensor, count: Tensor, by_source: Tensor | None = None) -> None:
        """Adds a micro-batch: the sum of its loss, its number of label tokens, and the same of each source, (sources,).

        Every micro-batch of a run has ``by_source``, or none.
        """
        loss_sum = loss_sum.detach()
        self._loss_sum = loss_sum if self._loss_sum is None else self._loss_sum + loss_sum
        self._count = count if self._count is None else self._count + count
        if by_source is not None:
            self._by_source = by_source if self._by_source is None else self._by_source + by_source

    def close(self, trainer: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Ends the window with one reduction of two numbers (and one for each source) over the ranks.

        Returns:
            Loss sum and label tokens (at least 1) of the global batch, and the factor for the gradients; float32
            scalars on the device.
        """
        assert self._loss_sum is not None
        assert self._count is not None
        assert self.scale is not None
        # float64: a float32 sum would round counts above 16 million. MPS has none.
        wide = torch.float32 if self._loss_sum.device.type == "mps" else torch.float64
        parts = torch.stack([self._loss_sum.to(wide), self._count.to(wide)])
        if self._by_source is not None:
            parts = torch.cat([parts, self._by_source.to(wide)])
        totals = trainer.strategy.reduce(parts, reduce_op="sum")
        if self._by_source is not None:
            assert self.trained_tokens_by_source is not None
            seen = self.trained_tokens_by_source.to(totals.device)
            self.trained_tokens_by_source = seen + totals[2:].to(torch.int64)
        self._loss_sum = self._count = self._by_source = None
        self.trained_tokens = self.trained_tokens.to(totals.device) + totals[1].to(torch.int64)
        count = totals[1].clamp(min=1)
        factor = self.scale * trainer.accumulate_grad_batches * _averaged_ranks(trainer) / count
        return totals[0].float(), count.float(), factor.float()

    def start_clock(self) -> None:
        """Begins to count tokens per second."""
        self._clock, self._paused_at = time.monotonic(), None
        self._tokens_at_clock = int(self.trained_tokens)

    def pause_clock(self) -> None:
        """Leaves out what follows, such as a validation."""
        self._paused_at = time.monotonic()

    def resume_clock(self) -> None:
        """Counts again."""
        if self._clock is not None and self._paused_at is not None:
            self._clock += time.monotonic() - self._paused_at
        self._paused_at = None

    def tokens_per_second(self) -> float | None:
        """Trained tokens a second over all ranks since the last call; None at the first. Waits for the device."""
        if self._clock is None:
            self.start_clock()
            return None
        tokens, now = int(self.trained_tokens), time.monotonic()
        rate = (tokens - self._tokens_at_clock) / max(now - self._clock, 1e-9)
        self._clock, self._tokens_at_clock = now, tokens
        return rate


def _averaged_ranks(trainer: Any) -> int:
    """Ranks over which the strategy averages gradients."""
    kwargs = trainer.distributed_sampler_kwargs
    return int(kwargs["num_replicas"]) if kwargs else 1
