"""Small runs under a plain Trainer, for tests in one process and on several ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lit_llm import LitLLM, TokenDataModule

MODEL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Recorder(Callback):
    """Losses and gradient norms as logged, and a hash of the rows of each micro-batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []
        self.rows: list[list[str]] = []
        self.validations: list[int] = []
        self.steps: list[int] = []

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.validations.append(trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        real = [row for row, labels in zip(batch["input_ids"], batch["labels"], strict=True) if (labels >= 0).any()]
        self.rows.append([hashlib.sha1(row.numpy().tobytes()).hexdigest()[:8] for row in real])
        self.steps.append(trainer.global_step)
        if not trainer.fit_loop._should_accumulate():
            metrics = trainer.callback_metrics
            self.losses.append(float(metrics["train/loss"]))
            self.norms.append(float(metrics["train/grad_norm"]))
            self.rates.append(float(metrics["train/learning_rate"]))


def fit(
    store: Any,
    folder: str,
    *,
    max_steps: int,
    micro_batch_size: int = 2,
    global_batch_size: int = 8,
    num_workers: int = 0,
    save_at: int | None = None,
    ckpt_path: str | None = None,
    model: dict[str, Any] | None = None,
    module: type[LitLLM] = LitLLM,
    lr: float = 1e-2,
    seq_len: int = 16,
    data: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> dict[str, Any]:
    """Trains a tiny model and returns what was recorded, as JSON types."""
    recorder = Recorder()
    rows = TokenDataModule(
        store,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        num_workers=num_workers,
        **(data or {}),
    )
    lit = module(config=model or MODEL, optimizer={"lr": lr}, schedule={"warmup_steps": 2, "total_steps": 40})
    callbacks: list[Callback] = [recorder]
    if save_at is not None:
        callbacks.append(
            ModelCheckpoint(Path(folder, "checkpoints"), filename="{step}", every_n_train_steps=save_at, save_top_k=-1)
        )
    trainer = L.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_steps=max_steps,
        log_every_n_steps=1,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        enable_checkpointing=save_at is not None,
        **trainer_options,
    )
    trainer.fit(lit, rows, ckpt_path=ckpt_path)
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "rates": recorder.rates,
        "rows": recorder.rows,
        "steps": recorder.steps,
        "validations": recorder.validations,
        "val_loss": float(trainer.callback_metrics["val/loss"]) if "val/loss" in trainer.callback_metrics else None,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "accumulation": trainer.accumulate_grad_batches,
        "weights": _checksum(lit),
        "weight_sum": {name: whole(p).double().abs().sum().item() for name, p in lit.named_parameters()},
    }


def _checksum(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for _, parameter in sorted(module.named_parameters()):
        digest.update(whole(parameter).float().numpy().tobytes())
    return digest.hexdigest()


def whole(tensor: Any) -> torch.Tensor:
    """A tensor that may lie on several ranks; all of them come here then."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
