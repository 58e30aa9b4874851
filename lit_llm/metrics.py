"""The loss over an evaluated text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric


class TokenLoss(Metric):
    """Mean loss per label token over all batches and ranks, and what follows from it.

    Sums are float64 where the device has it, and reduced over ranks by torchmetrics; logits are never seen.
    """

    full_state_update = False
    loss_sum: Tensor
    tokens: Tensor
    num_bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        dtype = torch.float32 if torch.backends.mps.is_available() else torch.float64  # Apple's GPUs have no float64
        for name in ("loss_sum", "tokens", "num_bytes"):
            self.add_state(name, torch.zeros((), dtype=dtype), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Module:
        """Moves the sums, and never narrows them: in 16 bits they would stop to grow after a few hundred batches."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, exclude_state)

    def update(self, loss_sum: Tensor, tokens: Tensor, num_bytes: Tensor | None) -> None:
        """Adds a batch.

        Args:
            loss_sum, tokens: scalars, summed loss and number of label tokens.
            num_bytes: UTF-8 bytes of text that the label tokens stand for, any shape; None: not known.
        """
        # Not in place: a state that an evaluation under inference_mode left behind can't be changed by the next one.
        self.loss_sum = self.loss_sum + loss_sum
        self.tokens = self.tokens + tokens
        self.num_bytes = self.num_bytes + (math.nan if num_bytes is None else num_bytes.sum())

    def compute(self) -> dict[str, float]:
        """``loss``, ``perplexity`` = exp(loss), and ``bits_per_byte`` = summed loss / ln 2 / bytes where known.

        Nothing where no rank has seen a label token.
        """
        loss_sum, tokens, num_bytes = float(self.loss_sum), float(self.tokens), float(self.num_bytes)
        if tokens == 0:
            return {}
        loss = loss_sum / tokens
        values = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        if num_bytes > 0:
            values["bits_per_byte"] = loss_sum / math.log(2) / num_bytes
        return values
