"""Real runs on several ranks that are recorded, with a fault in one rank."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from lit_llm import LitLLM
from lit_llm.callbacks import TraceCapture
from lit_llm.parallel import MeshStrategy

VOCAB, SEQ, BATCH, MS = 256, 64, 4, 60


class Rows(Dataset):
    """Micro-batches of random tokens, which take long to come where ``sleeps``."""

    def __init__(self, rank: int, sleeps: bool) -> None:
        self.rank, self.sleeps = rank, sleeps

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        if self.sleeps:
            time.sleep(MS / 1000)
        generator = torch.Generator().manual_seed(1000 * self.rank + place)
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
        return {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}


class Busy(LitLLM):
    """Computes more than the model where ``extra`` is above 0."""

    extra = 0

    def loss(self, batch: Any) -> Any:
        if self.training and self.extra:
            product = torch.randn(320, 320)
            for _ in range(self.extra):
                product = torch.tanh(product @ product)
        return super().loss(batch)


def record(
    folder: str,
    strategy: str = "ddp",
    fault: str | None = None,
    late: int = 1,
    prefetch: int = 1,
    hidden_size: int = 64,
    layers: int = 2,
    active: int = 3,
    steps: int = 8,
) -> None:
    """A fit that leaves a window of traces in ``folder``.

    Args:
        folder: of the run.
        strategy: ddp, fsdp, or hsdp (two groups).
        fault: of rank ``late``: ``sleep`` (60 ms in its data) or ``compute``; None: all ranks are alike.
        late: that rank.
        prefetch: of MeshStrategy.
        hidden_size: of the model.
        layers: of the model.
        active: steps recorded.
        steps: of the run.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    split = {"replicate": 2} if strategy == "hsdp" else {}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if strategy == "ddp" else MeshStrategy(prefetch=prefetch, **split),
        max_steps=steps,
        default_root_dir=folder,
        callbacks=[TraceCapture(start=3, warmup=1, active=active, analyze=False)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    shape = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    module = Busy(config={**shape, **heads}, vocab_size=VOCAB, seq_len=SEQ)
    module.extra = 24 if fault == "compute" and rank == late else 0
    trainer.fit(module, DataLoader(Rows(rank, fault == "sleep" and rank == late), batch_size=None))


def record_all(folder: str, cases: dict[str, dict[str, Any]]) -> None:
    """Several runs one after the other, each in a folder of its own."""
    environment = dict(os.environ)
    for name, options in cases.items():
        os.environ.update(environment)  # Lightning takes torchrun's variables away when a fit ends
        record(str(Path(folder, name)), **options)
