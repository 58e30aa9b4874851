"""What gathers between two optimizer steps: the global batch's loss and label tokens, and the clock."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from lit_llm.errors import UserError


class StepWindow:
    """Sums over the micro-batches of one optimizer step, kept on the device.

    A micro-batch's loss sum is divided by ``scale``, a constant that is equal on all ranks; Lightning divides by the
    number of micro-batches and the strategy by the number of ranks. :meth:`close` gives the factor that turns the
    gradient of that into the gradient of (sum of all losses) / (number of all label tokens).
    """

    def __init__(self) -> None:
        self.scale: int | None = None
        self.trained_tokens: Tensor = torch.zeros((), dtype=torch.int64)
        self.trained_tokens_by_source: Tensor | None = None
        """(sources,) int64 where the data is a mixture; to be set before the first micro-batch."""
        self._loss_sum: Tensor | None = None
        self._count: Tensor | None = None
        self._by_source: Tensor | None = None
        self._closed: Tensor | None = None
        self._offered: tuple[Any, Tensor, Tensor, Tensor | None] | None = None
        self._clock: float | None = None
        self._paused_at: float | None = None
        self._tokens_at_clock = 0

    def discard(self) -> None:
        """Forgets everything but the counts, as at the begin of a fit."""
        self.scale = self._closed = None
        self.forget()

    def forget(self) -> None:
        """Forgets an unfinished window, whose gradients are dropped."""
        self._loss_sum = self._count = self._by_source = self._offered = None

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch has been added since the last step."""
        return self._count is not None

    def offer(self, loss_sum: Tensor, count: Tensor, by_source: Tensor | None = None) -> Tensor:
        """A micro-batch: the sum of its loss, its number of label tokens, and the same of each source, (sources,).

        Every micro-batch of a run has ``by_source``, or none. It is added when :meth:`commit` sees its loss.

        Returns:
            The loss whose gradient is to be taken.
        """
        assert self.scale is not None
        loss_sum, count = loss_sum.reshape(()), torch.as_tensor(count, device=loss_sum.device).reshape(())
        loss = loss_sum / self.scale
        self._offered = (loss.grad_fn, loss_sum.detach(), count, by_source)
        return loss

    def withdraw(self) -> None:
        """Forgets an offer whose loss was not used."""
        self._offered = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the graph of a loss, which can't be copied."""
        return {**self.__dict__, "_offered": None}

    def commit(self, loss: Tensor, scaled: bool = False) -> None:
        """Adds the micro-batch that was offered, as the gradient of ``loss`` is about to be taken.

        Args:
            loss: what became of the one that :meth:`offer` gave, divided by Lightning.
            scaled: whether it was multiplied for float16 besides.

        Raises:
            UserError: it is another one, whose gradient would get the wrong scale.
        """
        if self._offered is None:  # an overridden training_step, with Lightning's own semantics
            return
        node, loss_sum, count, by_source = self._offered
        self._offered = None
        if not _is_made_of(loss, node, scaled):
            raise UserError(
                "training_step changes the loss that LitLLM.training_step returned, whose scale is not that of a mean: "
                "override loss(batch) instead and return (loss_sum + term * count, count), or a loss of your own"
            )
        self._add(loss_sum, count, by_source)

    def _add(self, loss_sum: Tensor, count: Tensor, by_source: Tensor | None) -> None:
        self._loss_sum = loss_sum if self._loss_sum is None else self._loss_sum + loss_sum
        self._count = count if self._count is None else self._count + count
        if by_source is not None:
            self._by_source = by_source if self._by_source is None else self._by_source + by_source

    def sums(self) -> Tensor:
        """(2 or 2 + sources,) of this rank: the loss sum, the label tokens, and those of each source."""
        assert self._loss_sum is not None
        assert self._count is not None
        # float64: a float32 sum would round counts above 16 million. MPS has none.
        wide = torch.float32 if self._loss_sum.device.type == "mps" else torch.float64
        parts = torch.stack([self._loss_sum.to(wide), self._count.to(wide)])
        return parts if self._by_source is None else torch.cat([parts, self._by_source.to(wide)])

    def close(self, totals: Tensor, divisions: int) -> tuple[Tensor, Tensor]:
        """Ends the window.

        Args:
            totals: :meth:`sums`, added over the ranks.
            divisions: by what the gradient has been divided beside ``scale``: micro-batches x averaged ranks.

        Returns:
            The mean loss over the global batch's label tokens (float32), and the factor for the gradients; scalars.
        """
        assert self.scale is not None
        self._loss_sum = self._count = self._by_source = None
        self._closed = totals
        count = totals[1].clamp(min=1)
        return (totals[0] / count).float(), self.scale * divisions / count

    def count_trained(self, skipped: Tensor | None = None) -> None:
        """Adds the closed window's label tokens to those trained, unless its step is ``skipped`` (a scalar, 0 or 1)."""
        if self._closed is None:
            return
        totals, self._closed = self._closed, None
        tokens = totals[1:] if skipped is None else totals[1:] * (1 - skipped.to(totals.dtype))
        tokens = tokens.to(torch.int64)
        self.trained_tokens = self.trained_tokens.to(tokens.device) + tokens[0]
        if len(tokens) > 1:
            assert self.trained_tokens_by_source is not None
            self.trained_tokens_by_source = self.trained_tokens_by_source.to(tokens.device) + tokens[1:]

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


# Nodes that leave a gradient as it is; a sum or difference has one input if the other is a constant.
_NEUTRAL = ("Add", "Sub", "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "ToCopy")


def _is_made_of(loss: Tensor, wanted: Any, scaled: bool) -> bool:
    """Whether ``loss`` is the ``wanted`` node's output, divided once, and multiplied once if ``scaled``."""
    node, number = loss.grad_fn, loss.output_nr
    left = {"Div": 1, "Mul": int(scaled)}
    while node is not wanted:
        if node is None:
            return False
        kind = node.name().removesuffix("Backward0")
        if "DDPSink" in kind:  # hands on all outputs of a training step
            node, number = node.next_functions[number]
            continue
        inputs = [one for one in node.next_functions if one[0] is not None]
        if len(inputs) != 1 or (kind not in _NEUTRAL and not left.get(kind)):
            return False
        if kind in left:
            left[kind] -= 1
        node, number = inputs[0]
    return True
