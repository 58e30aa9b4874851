"""Progress for a log file: a line now and then instead of a bar."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

_SHOWN = ("train/loss", "val/loss", "train/tokens_per_second")


class ProgressLines(Callback):
    """Prints the step, the losses and the speed after each validation and at most every few seconds.

    The numbers are those that were logged last, so that printing never waits for a device.

    Args:
        every_seconds: least time between two lines outside validation.
    """

    def __init__(self, every_seconds: float = 30.0) -> None:
        self.every_seconds = every_seconds
        self._printed_at = 0.0
        self._printed_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._printed_at = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Prints if it is time."""
        if trainer.is_global_zero and time.monotonic() - self._printed_at >= self.every_seconds:
            self._print(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints what validation found."""
        if trainer.is_global_zero and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._print(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the last numbers."""
        if trainer.is_global_zero:
            self._print(trainer)

    def _print(self, trainer: Trainer) -> None:
        self._printed_at = time.monotonic()
        if trainer.global_step == self._printed_step:
            return
        self._printed_step = trainer.global_step
        total = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
        metrics = trainer.callback_metrics
        shown = [
            f"{name} {float(metrics[name]):,.0f}" if name.endswith("second") else f"{name} {float(metrics[name]):.4f}"
            for name in _SHOWN
            if name in metrics
        ]
        with suppress(OSError, ValueError):  # nobody listens any more, as behind a pipe that was closed: train on
            print("  ".join([f"step {trainer.global_step}{total}", *shown]), file=sys.stderr, flush=True)
