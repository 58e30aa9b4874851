"""Small runs with a RunCheckpoint, for its tests."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L

from lit_llm import LitLLM, TokenDataModule
from lit_llm.callbacks import RunCheckpoint

SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def fit(
    store: str,
    folder: str | Path,
    steps: int,
    *callbacks: L.Callback,
    trainer: Any = None,
    ckpt_path: Any = None,
    **own: Any,
) -> RunCheckpoint:
    """A run whose checkpoints take about 100 KB; one is due at every step unless said otherwise."""
    checkpoint = RunCheckpoint(**{"every_n_train_steps": 1, "save_top_k": 0, **own})
    options = {"logger": False, "limit_val_batches": 0, "accelerator": "cpu", **(trainer or {})}
    L.Trainer(
        default_root_dir=folder,
        max_steps=steps,
        callbacks=[*callbacks, checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    ).fit(
        LitLLM(SMALL, optimizer={"lr": 1e-2}),
        TokenDataModule(store, seq_len=16, global_batch_size=4 * options.get("devices", 1), micro_batch_size=2),
        ckpt_path=ckpt_path,
    )
    return checkpoint


def names(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder, "checkpoints").iterdir())


class At(L.Callback):
    """Calls functions at the end of some steps."""

    def __init__(self, steps: dict[int, Any]) -> None:
        self.steps = dict(steps)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step in self.steps and not trainer.fit_loop._should_accumulate():
            self.steps.pop(trainer.global_step)(trainer)


class WaitAfter(L.Callback):
    """Lets what is written in the background at these steps end at the next micro-batch, of two in a step."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step in self.steps:
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()


def fill(folder: str | Path) -> None:
    """Leaves no room on a disk."""
    with Path(folder, "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1024))
