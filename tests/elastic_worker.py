"""What the tests of killed jobs add to `lit-llm fit`: a record of its steps, and time to be killed in."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer


class Ledger(Callback):
    """Writes each step's loss, and who is in the run, into files of the run's folder.

    Args:
        pause: seconds that a micro-batch takes longer.
    """

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """A line for this process."""
        world, pid = trainer.world_size, os.getpid()
        _append(trainer, "members", f"{trainer.global_rank} {world} {pid} {os.getppid()} {trainer.global_step}")

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A line for this step, by rank 0."""
        time.sleep(self.pause)
        if not trainer.fit_loop._should_accumulate() and trainer.is_global_zero:
            loss = float(trainer.callback_metrics["train/loss"])
            _append(trainer, "ledger", f"{trainer.global_step} {trainer.world_size} {loss!r}")


def _append(trainer: Trainer, name: str, line: str) -> None:
    with Path(trainer.default_root_dir, name).open("a") as file:
        file.write(f"{line}\n")
