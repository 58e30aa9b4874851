"""Classes that the tests of the command line name by their path."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lit_llm import LitLLM, TokenDataModule
from lit_llm.errors import UserError


class Mine(LitLLM):
    """A subclass with an option of its own."""

    def __init__(self, mine: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mine = mine


class NeedsVocabulary(LitLLM):
    """A subclass with a required argument that only the data can give, and few others."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(
            config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, vocab_size=vocab_size
        )


class Failing(LitLLM):
    """Fails in the second step, in the way asked for."""

    def __init__(self, mode: str = "bug", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mode = mode
        self.poison = False

    def loss(self, batch: Any) -> Any:
        """Not finite at the step that is to fail."""
        loss_sum, count = super().loss(batch)
        poison, self.poison = self.poison, False
        return loss_sum * (float("nan") if poison else 1.0), count

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Fails, or waits for a signal."""
        if batch_idx != 1:
            return
        if self.mode == "bug":
            raise ZeroDivisionError("a real bug")
        if self.mode == "user" or (self.mode == "rank1" and self.global_rank == 1):
            raise UserError(f"model.mode {self.mode} is a mistake; take another")
        if self.mode == "nan":
            self.poison = True
        if self.mode in ("pause", "wait"):
            Path("waiting").touch()
            time.sleep(3 if self.mode == "pause" else 60)


class OtherData(L.LightningDataModule):
    """A data module that knows no vocabulary and no length of rows."""

    def __init__(self, batches: int = 2) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader:
        """Rows that count."""
        ids = torch.arange(33).repeat(2, 1)
        return DataLoader([{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}] * self.batches, batch_size=None)


class Losses(Callback):
    """Appends [step, loss] of each logged step to the file that LOSSES names."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Writes a line."""
        if not trainer.fit_loop._should_accumulate():
            with open(os.environ["LOSSES"], "a", encoding="utf-8") as file:
                file.write(json.dumps([trainer.global_step, float(trainer.callback_metrics["train/loss"])]) + "\n")


class Quiet(TokenDataModule):
    """A subclass of the data module."""
