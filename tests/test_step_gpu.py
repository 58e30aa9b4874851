"""On a GPU: a step that is not logged never makes the device wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lit_llm import LitLLM
from lit_llm.parallel import MeshStrategy
from tests.test_step import SEQ, VOCAB, micro_batches
from tests.training import MODEL

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


class NoWaiting(L.Callback):
    """Makes every synchronisation inside a step an error, from its third on."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= 2:
            torch.cuda.set_sync_debug_mode("error")
            self.steps += 1

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


class SplitAlone(MeshStrategy):
    """Splits over one process, which MeshStrategy would leave as it is: all that sharding does on a device."""

    shards = True


@pytest.mark.parametrize("strategy", ["auto", "mesh", "sharded"])
@pytest.mark.parametrize("spike_factor", [None, 6.0])
def test_a_step_does_not_wait_for_the_device(tmp_path: Path, spike_factor: float | None, strategy: str) -> None:
    module = LitLLM(config=MODEL, vocab_size=VOCAB, seq_len=SEQ, guard={"spike_factor": spike_factor})
    watch = NoWaiting()
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        default_root_dir=tmp_path,
        precision="bf16-mixed",
        max_steps=8,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=100,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[watch],
        strategy="auto" if strategy == "auto" else {"mesh": MeshStrategy, "sharded": SplitAlone}[strategy](),
    )
    try:
        trainer.fit(module, DataLoader(micro_batches(16), batch_size=None))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.steps == 12
