"""What benchmarks of callbacks share: the seconds of a run's steps."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch.callbacks import Callback


class StepSeconds(Callback):
    """Seconds of each step but the first few, from the end of the one before.

    Args:
        first: steps that warm up.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.seconds: list[float] = []
        self._before = 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if trainer.global_step > self.first:
            self.seconds.append(now - self._before)
        self._before = now
