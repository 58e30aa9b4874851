"""The moving average of the weights when a run is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lit_llm import LitLLM, TokenDataModule
from lit_llm.callbacks import RunCheckpoint
from lit_llm.callbacks.weight_average import WeightAverage
from lit_llm.checkpoint import read_checkpoint
from lit_llm.errors import UserError
from tests.test_weight_average import MODEL, VALIDATED, equal, fit, reference


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("stop", [1, 10])
def test_a_resumed_run_is_bit_equal(store: str, tmp_path: Path, stop: int, precision: Any) -> None:
    options = {"precision": precision, **VALIDATED}
    whole, resumed = WeightAverage(0.7, start_step=3), WeightAverage(0.7, start_step=3)
    watch, _ = fit(store, tmp_path / "a", whole, RunCheckpoint(every_n_train_steps=1, keep_last=-1), **options)
    path = tmp_path / "a" / "checkpoints" / f"step-{stop}.ckpt"
    again, _ = fit(store, tmp_path / "b", resumed, ckpt_path=path, **options)
    assert len(again.raw) == 21 - stop
    assert equal(again.raw[-1], watch.raw[-1])
    assert again.losses == {step: loss for step, loss in watch.losses.items() if step > stop}
    one, other = whole.state_dict(), resumed.state_dict()
    assert equal(one.pop("weights"), other.pop("weights"))
    assert one == other


def test_a_checkpoint_of_a_callback_that_came_first(store: str, tmp_path: Path) -> None:
    """It was saved after the step but before the average's update, which is made up for on resuming.

    Without accumulation, so that there is no micro-batch before the next step.
    """

    class Early(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 10 and not (tmp_path / "early.ckpt").exists():
                trainer.save_checkpoint(tmp_path / "early.ckpt")

    whole, resumed = WeightAverage(0.7), WeightAverage(0.7)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=20,
        callbacks=[Early(), whole],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    data = TokenDataModule(store, seq_len=16, global_batch_size=4, micro_batch_size=4)
    trainer.fit(LitLLM(MODEL, optimizer={"lr": 1e-2}, schedule={"warmup_steps": 2, "total_steps": 40}), data)
    state = read_checkpoint(tmp_path / "early.ckpt")["callbacks"]["WeightAverage"]
    assert (state["step"], state["updates"]) == (9, 9)
    fit(store, tmp_path, resumed, micro=4, ckpt_path=tmp_path / "early.ckpt")
    assert resumed.updates == 20
    assert equal(resumed.state_dict()["weights"], whole.state_dict()["weights"])


def test_a_checkpoint_without_an_average_begins_one(store: str, tmp_path: Path) -> None:
    path, average = tmp_path / "plain.ckpt", WeightAverage(0.9)

    class Save(Callback):
        def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
            trainer.save_checkpoint(path)

    fit(store, tmp_path, WeightAverage(0.9), Save(), max_steps=5)
    content = torch.load(path, weights_only=True)
    del content["callbacks"]["WeightAverage"]
    torch.save(content, path)
    watch, _ = fit(store, tmp_path, average, ckpt_path=path)
    assert average.updates == 15
    assert equal(average.state_dict()["weights"], reference(watch.raw, 0.9)[-1])


def test_another_meaning_is_refused_on_resuming(store: str, tmp_path: Path) -> None:
    fit(store, tmp_path, WeightAverage(0.9), RunCheckpoint(), max_steps=2)
    path = tmp_path / "checkpoints" / "step-2.ckpt"
    with pytest.raises(UserError, match=r"weight_average\.decay is 0\.99, but .* made with 0\.9; give 0\.9"):
        fit(store, tmp_path, WeightAverage(0.99), ckpt_path=path)
    with pytest.raises(UserError, match=r"weight_average\.every_n_steps is 4"):
        fit(store, tmp_path, WeightAverage(0.9, every_n_steps=4), ckpt_path=path)
