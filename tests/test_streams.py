"""Random numbers of training: a function of seed, step, micro-batch and rank; and the rates of a run."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lit_llm import LitLLM
from lit_llm.training.streams import stream_seed
from tests.distributed import run_ranks
from tests.test_step import SEQ, VOCAB, micro_batches, trainer
from tests.training import MODEL


def test_seeds_differ_by_each_of_their_parts() -> None:
    seeds = {stream_seed(*parts) for parts in itertools.product(range(3), range(20), range(8), range(8))}
    assert len(seeds) == 3 * 20 * 8 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(1, 2, 3, 4) == stream_seed(1, 2, 3, 4)


class Drawn(LitLLM):
    """Attention dropout of one half, on the same rows everywhere; what each micro-batch lost is kept."""

    def __init__(self) -> None:
        config = {**MODEL, "attention_dropout": 0.5}
        super().__init__(config=config, vocab_size=VOCAB, seq_len=SEQ, optimizer={"lr": 0.0}, seed=3)
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Any:
        loss_sum, count = super().loss(batch)
        if self.training:
            self.losses.append(float(loss_sum))
        return loss_sum, count


def losses(
    folder: str, devices: int = 1, steps: int = 4, start: str | None = None, validate: bool = False
) -> list[float]:
    """Of 2 micro-batches a step, all with the same rows and weights that stand still."""
    same = micro_batches(1) * (2 * steps)
    module = Drawn()
    options: dict[str, Any] = {"strategy": "ddp"} if devices > 1 else {}
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    run = trainer(
        folder,
        devices=devices,
        max_steps=steps,
        accumulate_grad_batches=2,
        enable_checkpointing=True,
        callbacks=[saving],
        **options,
    )
    validation = DataLoader(micro_batches(3), batch_size=None) if validate else None
    run.fit(module, DataLoader(same, batch_size=None), validation, ckpt_path=start)
    return module.losses


def test_dropout_depends_on_the_step_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = losses(str(tmp_path / "a"))
    assert len(set(whole)) == 8, "each micro-batch has a mask of its own"
    torch.manual_seed(2)
    torch.rand(100)
    assert losses(str(tmp_path / "b"), validate=True) == whole
    resumed = losses(str(tmp_path / "c"), start=str(tmp_path / "a" / "step=2.ckpt"))
    assert resumed == whole[4:]


def rank_losses(folder: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    return {name: losses(f"{folder}/{name}/{rank}", devices=2) for name in "ab"}


def test_masks_differ_between_ranks_and_repeat(tmp_path: Path) -> None:
    one, other = run_ranks("tests.test_streams:rank_losses", 2, folder=str(tmp_path))
    assert one["a"] == one["b"]
    assert other["a"] == other["b"]
    assert not set(one["a"]) & set(other["a"])
    assert one["a"] == losses(str(tmp_path / "c")), "rank 0 draws what one process does"


# The rate

PEAK = 0.01


def expected_rate(name: str, step: int, total: int = 10, warmup: int = 3, decay: int = 4, least: float = 0.1) -> float:
    """The formulas, written down again."""
    if step < warmup:
        return PEAK * (step + 1) / warmup
    done = (step - warmup) / (total - 1 - warmup)
    return (
        PEAK
        * {
            "cosine": least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done)),
            "linear": 1 - (1 - least) * done,
            "wsd": 1.0 if step < total - decay else 1 - (1 - least) * (step - (total - decay) + 1) / decay,
            "inverse_sqrt": math.sqrt(warmup / (step + 1)),
            "constant": 1.0,
        }[name]
    )


class Rates(Callback):
    """The rate that each micro-batch will be used with, and a save in the middle of a window."""

    def __init__(self, save_at: Path) -> None:
        self.rates: list[float] = []
        self.save_at = save_at

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        rates = {group["lr"] for group in trainer.optimizers[0].param_groups}
        assert len(rates) == 1
        self.rates.append(rates.pop())

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (23, 25):  # at the end of step 6, and within step 7
            trainer.save_checkpoint(self.save_at / f"{batch_idx}.ckpt")


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
def test_the_rate_of_each_of_40_micro_batches(store: str, tmp_path: Path, name: str) -> None:
    from lit_llm import TokenDataModule

    def rates(start: Path | None = None) -> list[float]:
        schedule: dict[str, Any] = {"name": name, "warmup_steps": 3, **({"decay_steps": 4} if name == "wsd" else {})}
        module = LitLLM(config=MODEL, optimizer={"lr": PEAK}, schedule=schedule)
        recorder = Rates(tmp_path)
        data = TokenDataModule(store, seq_len=16, global_batch_size=4, micro_batch_size=1)
        run = trainer(str(tmp_path), max_steps=10, callbacks=[recorder], limit_val_batches=0)
        run.fit(module, data, ckpt_path=start)
        assert run.accumulate_grad_batches == 4
        return recorder.rates

    whole = rates()
    assert whole == pytest.approx([expected_rate(name, i // 4) for i in range(40)], rel=1e-12)
    for saved in (23, 25):
        resumed = rates(tmp_path / f"{saved}.ckpt")
        assert resumed == whole[24:], "an unfinished window is done again"
