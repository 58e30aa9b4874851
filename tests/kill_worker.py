"""A small run that is killed and resumed; in a module of its own, which a server of processes imports once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lit_llm import LitLLM, TokenDataModule
from lit_llm.callbacks import RunCheckpoint
from lit_llm.checkpoint import find_checkpoint
from tests.training import MODEL


class Ledger(Callback):
    """Appends each step's loss, all its digits, to a file."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.file.write(f"{trainer.global_step} {float(trainer.callback_metrics['train/loss']).hex()}\n")


def train(store: str, folder: str, steps: int, every: int, async_save: bool, dropout: float) -> None:
    """Goes on from the last checkpoint to the last step, and writes the weights there."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    found = find_checkpoint(folder, "last")
    module = LitLLM(
        config={**MODEL, "attention_dropout": dropout},
        optimizer={"lr": 1e-2},
        guard={"spike_factor": 8.0},
        seed=5,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_steps=steps,
        log_every_n_steps=1,
        val_check_interval=20,
        check_val_every_n_epoch=None,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Ledger(place / "ledger"),
            RunCheckpoint(every_n_train_steps=every, async_save=async_save, keep_every_n_steps=50),
        ],
    )
    data = TokenDataModule(store, seq_len=16, global_batch_size=4, micro_batch_size=2)
    trainer.fit(module, data, ckpt_path=None if found is None else str(found.path))
    torch.save({name: p.detach() for name, p in module.named_parameters()}, place / "weights.part")
    os.replace(place / "weights.part", place / "weights")
