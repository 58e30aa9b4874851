"""Signals end a run with its work saved: one process, one rank of two, SLURM, torchrun; no hang."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lit_llm import LitLLM, TokenDataModule
from lit_llm.callbacks import RunCheckpoint
from lit_llm.checkpoint import find_checkpoint
from tests.distributed import ROOT
from tests.test_step import SEQ, VOCAB, micro_batches, trainer
from tests.training import MODEL


class SendAt(Callback):
    """Sends a signal to this process in the middle of a step."""

    def __init__(self, step: int, number: int, ranks: tuple[int, ...] = (0,)) -> None:
        self.step, self.number, self.ranks = step, number, ranks

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.global_rank in self.ranks:
            self.step = -1
            os.kill(os.getpid(), self.number)


def fit(folder: Path, number: int, callbacks: list[Callback], step: int = 4, **options: Any) -> L.Trainer:
    module = LitLLM(config=MODEL, vocab_size=VOCAB, seq_len=SEQ)
    run = trainer(
        str(folder),
        callbacks=[SendAt(step, number), *callbacks],
        accumulate_grad_batches=2,
        **{"max_steps": 10, "enable_checkpointing": True, **options},
    )
    validation = DataLoader(micro_batches(2), batch_size=None)
    with pytest.raises(SystemExit) as end:
        run.fit(module, DataLoader(micro_batches(20), batch_size=None), validation)
    assert end.value.code == (1 if number == signal.SIGINT else 0)  # Lightning's own code for Ctrl-C
    return run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_the_step_is_finished_and_saved(tmp_path: Path, number: int) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)
    run = fit(tmp_path, number, [RunCheckpoint()])
    assert run.global_step == 5
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-5.ckpt"]
    content = torch.load(tmp_path / "checkpoints" / "step-5.ckpt", weights_only=True)
    assert content["global_step"] == 5
    after = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)
    assert after[0] == before[0]
    assert after[2] == before[2]


def test_lightnings_own_checkpoints_will_do(tmp_path: Path) -> None:
    fit(tmp_path, signal.SIGTERM, [])
    assert torch.load(tmp_path / "checkpoints" / "step-5.ckpt", weights_only=True)["global_step"] == 5
    fit(tmp_path / "b", signal.SIGTERM, [ModelCheckpoint(tmp_path / "mine", every_n_train_steps=5, filename="{step}")])
    assert (tmp_path / "mine" / "step=5.ckpt").exists()
    assert not (tmp_path / "b" / "checkpoints").exists()


def test_a_signal_at_a_step_that_is_validated_is_saved_once(tmp_path: Path) -> None:
    checkpoint = RunCheckpoint(every_n_train_steps=5)
    fit(tmp_path, signal.SIGTERM, [checkpoint], val_check_interval=10, check_val_every_n_epoch=None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-5.ckpt"]


def test_min_steps_do_not_hold_it(tmp_path: Path) -> None:
    assert fit(tmp_path, signal.SIGTERM, [RunCheckpoint()], min_steps=9).global_step == 5


def test_earlier_handlers_are_called_and_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    called = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    try:
        fit(tmp_path, signal.SIGUSR1, [RunCheckpoint()])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert called == [signal.SIGUSR1]

    class Twice(SendAt):
        def on_train_batch_start(self, *args: Any) -> None:
            super().on_train_batch_start(*args)
            if self.step == -1:
                os.kill(os.getpid(), signal.SIGINT)

    twice = fit(tmp_path / "b", signal.SIGINT, [Twice(4, signal.SIGINT)], step=4)
    assert twice.global_step == 4


def test_without_checkpoints_it_says_that_nothing_was_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, signal.SIGTERM, [], enable_checkpointing=False)
    assert "stopped by SIGTERM (rank 0) after step 5; nothing was saved, as checkpoints are off" in caplog.text


# SLURM


@pytest.mark.parametrize(("fails", "told"), [(False, "requeued as SLURM job 77"), (True, "not requeued: ")])
def test_slurm_requeues_after_the_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: bool,
    told: str,
) -> None:
    log = tmp_path / "scontrol.log"
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-5.ckpt"
    program.write_text(f'#!/bin/sh\ntest -f "{checkpoint}" && echo "$@" >> "{log}"\nexit {int(fails)}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    environment = {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0"}
    environment |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    fit(tmp_path / "run", signal.SIGUSR1, [RunCheckpoint()])
    assert log.read_text() == "requeue 77\n"
    assert told in caplog.text


# Two ranks


def rank_main(folder: str) -> None:
    """A fit that would take minutes."""

    class Slowly(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            time.sleep(0.02)
            Path(folder, f"at-{trainer.global_rank}").write_text(f"{os.getpid()} {trainer.global_step}")

    run = trainer(
        folder,
        callbacks=[Slowly(), RunCheckpoint()],
        enable_checkpointing=True,
        max_steps=10_000,
        devices=2,
        strategy="ddp",
    )
    data = DataLoader(micro_batches(10_000), batch_size=None)
    run.fit(LitLLM(config=MODEL, vocab_size=VOCAB, seq_len=SEQ), data)


def _progress(folder: Path, rank: int) -> tuple[int, int]:
    try:
        pid, step = (folder / f"at-{rank}").read_text().split()
    except (FileNotFoundError, ValueError):
        return 0, 0
    return int(pid), int(step)


def _wait(folder: Path, process: subprocess.Popen[bytes], step: int = 5) -> None:
    end = time.monotonic() + 90
    while min(_progress(folder, rank)[1] for rank in (0, 1)) < step:
        assert process.poll() is None
        assert time.monotonic() < end, "the ranks did not begin"
        time.sleep(0.05)


def _started(folder: Path, main: str, log: Any, torchrun: bool) -> subprocess.Popen[bytes]:
    """A script that calls a function of this file with the folder, on two ranks."""
    script = folder / "script.py"
    script.write_text(f"from tests.test_signals import {main}; {main}({str(folder)!r})")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *([*start, "--max_restarts", "1"] if torchrun else []), str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # torchrun's own store outlives a restart, and with it the addresses of the processes that are gone.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


@pytest.mark.parametrize(
    ("launcher", "rank"),
    [
        ("torchrun", 1),
        pytest.param("lightning", 0, marks=pytest.mark.slow),
        pytest.param("torchrun", 0, marks=pytest.mark.slow),
        pytest.param("lightning", 1, marks=pytest.mark.slow),
    ],
)
def test_sigterm_to_one_of_two_ranks_ends_both_with_a_checkpoint(tmp_path: Path, launcher: str, rank: int) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = _started(tmp_path, "rank_main", log, torchrun=launcher == "torchrun")
        try:
            _wait(tmp_path, process)
            os.kill(_progress(tmp_path, rank)[0], signal.SIGTERM)
            code = process.wait(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    told = (tmp_path / "log").read_text()
    assert code == 0, told
    assert f"stopped by SIGTERM (rank {rank}) after step" in told
    (saved,) = (tmp_path / "checkpoints").glob("*.ckpt")
    step = torch.load(saved, weights_only=True)["global_step"]
    assert saved.name == f"step-{step}.ckpt"
    assert 5 <= step <= 9_999


NAMES = ("restarted", "undisturbed")


class DieAt(Callback):
    """Kills this process at a step, unless torchrun has started it again."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and trainer.global_step == 8 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def restarted_main(folder: str, die: bool = True) -> None:
    """A job that goes on from its last checkpoint, whichever start this is."""
    run = trainer(
        folder,
        callbacks=[RunCheckpoint(every_n_train_steps=3), *([DieAt()] if die else [])],
        enable_checkpointing=True,
        max_steps=12,
        accumulate_grad_batches=2,
        devices=2,
        strategy="ddp",
    )
    found = find_checkpoint(folder, "last")
    rows = Path(folder).parent / "data" / "store"
    data = TokenDataModule(str(rows), seq_len=SEQ, global_batch_size=8, micro_batch_size=2)
    run.fit(LitLLM(config=MODEL), data, ckpt_path=None if found is None else str(found.path))


def undisturbed_main(folder: str) -> None:
    """The same, and nobody dies."""
    restarted_main(folder, die=False)


@pytest.mark.slow
def test_torchrun_starts_a_killed_job_again(store: str, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "data" / "store")
    weights = []
    for main in (f"{name}_main" for name in NAMES):
        folder = tmp_path / main
        folder.mkdir()
        with (folder / "log").open("wb") as log:
            process = _started(folder, main, log, torchrun=True)
            try:
                code = process.wait(timeout=120)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        assert code == 0, (folder / "log").read_text()[-4000:]
        weights.append(torch.load(folder / "checkpoints" / "step-12.ckpt", weights_only=True)["state_dict"])
    restored = ["Restored all states" in (tmp_path / f"{name}_main" / "log").read_text() for name in NAMES]
    assert restored == [True, False]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
