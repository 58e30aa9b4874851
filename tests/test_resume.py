"""A run resumed by `--ckpt_path=last` gives the losses of the uninterrupted run, bit for bit, on the command line."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from lit_llm.cli.main import main


def _fit(store: str, root: Path, steps: int, save_every: int, num_workers: int, *more: str) -> dict[int, str]:
    """Losses by step, as the digits in the log."""
    code = main(
        [
            "fit",
            f"--data.store={store}",
            "--data.seq_len=16",
            "--data.global_batch_size=4",
            "--data.micro_batch_size=2",
            f"--data.num_workers={num_workers}",
            '--model.config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}',
            "--model.optimizer.lr=1e-2",
            f"--trainer.max_steps={steps}",
            "--trainer.log_every_n_steps=1",
            "--trainer.accelerator=cpu",
            "--trainer.devices=1",
            f"--trainer.default_root_dir={root}",
            "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
            f"--trainer.logger.save_dir={root}",
            f"--checkpoint.every_n_train_steps={save_every}",
            "--checkpoint.keep_last=-1",
            *more,
        ]
    )
    assert code == 0
    losses: dict[int, str] = {}
    for path in root.glob("lightning_logs/*/metrics.csv"):
        for row in csv.DictReader(path.open()):
            if row.get("train/loss"):
                losses[int(row["step"])] = row["train/loss"]
    return losses


def _check(store: str, folder: Path, steps: int, num_workers: int) -> None:
    half = steps // 2
    whole = _fit(store, folder / "whole", steps, half, num_workers)
    assert sorted(whole) == list(range(steps))
    (folder / "resumed" / "checkpoints").mkdir(parents=True)
    shutil.copy(folder / "whole" / "checkpoints" / f"step-{half}.ckpt", folder / "resumed" / "checkpoints")
    resumed = _fit(store, folder / "resumed", steps, half, num_workers, "--ckpt_path=last")
    assert resumed == {step: loss for step, loss in whole.items() if step >= half}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_short_run(store: str, tmp_path: Path, num_workers: int) -> None:
    _check(store, tmp_path, steps=12, num_workers=num_workers)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_200_steps_resumed_at_100(store: str, tmp_path: Path, num_workers: int) -> None:
    _check(store, tmp_path, steps=200, num_workers=num_workers)
