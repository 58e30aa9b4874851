"""RunCheckpoint when it writes in the background, and when it is asked to save at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from lit_llm.callbacks import RunCheckpoint
from lit_llm.checkpoint import CheckpointWriteError, list_checkpoints, read_checkpoint, write
from lit_llm.errors import UserError
from tests.checkpoint_runs import At, WaitAfter, fill, fit, names

# ------------------------------------------------------------------ in the background


class Slow:
    """Holds a write back until training has gone on to another step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "step-4.ckpt") -> None:
        self.go_on, self.held, real = threading.Event(), 0, write.write_checkpoint

        def slow(content: dict[str, Any], path: str | Path) -> None:
            if Path(path).name == name:
                self.held += 1
                assert self.go_on.wait(60), "training waits for a write in the background"
            real(content, path)

        monkeypatch.setattr(write, "write_checkpoint", slow)

    def until(self, step: int) -> At:
        return At({step: lambda trainer: self.go_on.set()})


class Listener(DummyLogger):
    """Notes which files are there when a logger hears of a save."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, bool]] = []

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        path = checkpoint_callback.last_model_path
        self.heard.append((Path(path).name, os.path.exists(path)))


def test_the_background_writes_the_weights_of_its_step(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"every_n_train_steps": 4, "keep_last": -1}
    L.seed_everything(1)
    fit(store, tmp_path / "run", 8, At({7: lambda trainer: None}), **options)
    (tmp_path / "run").rename(tmp_path / "sync")
    slow, listener = Slow(monkeypatch), Listener()
    L.seed_everything(1)
    fit(store, tmp_path / "run", 8, slow.until(7), async_save=True, trainer={"logger": [listener]}, **options)
    assert slow.held == 1
    assert names(tmp_path / "run") == names(tmp_path / "sync") == ["step-4.ckpt", "step-8.ckpt"]
    for name in names(tmp_path / "run"):
        ours, theirs = (tmp_path / run / "checkpoints" / name for run in ("run", "sync"))
        assert ours.read_bytes() == theirs.read_bytes()
    assert listener.heard == [("step-4.ckpt", True), ("step-8.ckpt", True)]


def test_old_files_stay_until_the_new_one_is_there(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, list[str]] = {}

    def look(trainer: L.Trainer) -> None:
        seen[trainer.global_step] = names(tmp_path)

    slow = Slow(monkeypatch)
    options: dict[str, Any] = {"every_n_train_steps": 2, "keep_last": 1, "async_save": True}
    looks = At({5: lambda trainer: (look(trainer), slow.go_on.set())})
    fit(store, tmp_path, 8, looks, WaitAfter(2, 5), **options)
    assert seen[5] == ["step-2.ckpt"]
    assert names(tmp_path) == ["step-8.ckpt"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-8.ckpt"]


def test_an_error_waits_for_the_background(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)

    def fail(trainer: L.Trainer) -> None:
        threading.Timer(0.2, slow.go_on.set).start()
        raise ZeroDivisionError

    for asked, expected in ((False, ["step-4.ckpt"]), (True, ["step-4.ckpt", "step-5.ckpt"])):
        with pytest.raises(ZeroDivisionError):
            fit(
                store,
                tmp_path / str(asked),
                8,
                At({5: fail}),
                every_n_train_steps=4,
                async_save=True,
                save_on_exception=asked,
            )
        assert names(tmp_path / str(asked)) == expected
        assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]


def killed_in_the_background(store: str, folder: str) -> None:
    """Dies in the middle of writing step 4 while training is at step 6."""
    at_6 = threading.Event()
    real = write._Stream.write

    def dying(stream: Any, data: Any) -> int:
        if Path(stream.file.name).match(".step-4.ckpt.*.partial") and stream.file.tell() > 20_000:
            stream.file.flush()
            at_6.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(stream, data)

    write._Stream.write = dying  # type: ignore[method-assign]
    fit(store, folder, 8, At({6: lambda trainer: at_6.set()}), every_n_train_steps=2, async_save=True)


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_a_write(store: str, tmp_path: Path) -> None:
    call = f"from tests.test_run_checkpoint import killed_in_the_background as run; run({store!r}, {str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", call], cwd=Path(__file__).parent.parent, timeout=120)
    assert done.returncode == -signal.SIGKILL
    partial, complete = names(tmp_path)
    assert Path(partial).match(".step-4.ckpt.*.partial")
    assert complete == "step-2.ckpt"
    last = tmp_path / "checkpoints" / "step-2.ckpt"
    assert read_checkpoint(last)["global_step"] == 2
    fit(store, tmp_path, 4, ckpt_path=last, every_n_train_steps=2, async_save=True)
    assert names(tmp_path) == ["step-2.ckpt", "step-4.ckpt"]


def test_the_background_is_for_strategies_with_one_writer(tmp_path: Path) -> None:
    strategy = SimpleNamespace(broadcast=lambda value: value, checkpoint_io=None)
    trainer: Any = SimpleNamespace(strategy=strategy, default_root_dir=str(tmp_path))
    with pytest.raises(
        UserError, match=r"checkpoint\.async_save .*ddp and with MeshStrategy, not with SimpleNamespace"
    ):
        RunCheckpoint(async_save=True).setup(trainer, None, "fit")  # type: ignore[arg-type]


# ------------------------------------------------------------------ at once


@pytest.mark.parametrize("background", [False, True])
def test_saving_at_once(store: str, tmp_path: Path, background: bool) -> None:
    found: list[tuple[str | None, bool]] = []

    def now(trainer: Any) -> None:
        path = trainer.checkpoint_callback.save_now(trainer)
        found.append((path and Path(path).name, path is not None and read_checkpoint(path)["global_step"] >= 3))

    class Before(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if not found:
                now(trainer)

    twice = At({3: lambda trainer: (now(trainer), now(trainer)), 4: now})
    options: dict[str, Any] = {"every_n_train_steps": 3, "async_save": background, "keep_last": -1}
    fit(store, tmp_path, 5, Before(), twice, **options)
    assert found == [(None, False), ("step-3.ckpt", True), ("step-3.ckpt", True), ("step-4.ckpt", True)]
    assert names(tmp_path) == ["step-3.ckpt", "step-4.ckpt", "step-5.ckpt"]
    found.clear()
    fit(store, tmp_path, 6, Before(), ckpt_path=tmp_path / "checkpoints" / "step-5.ckpt", **options)
    assert found == [("step-5.ckpt", True)]


def test_saving_at_once_on_a_full_disk(store: str, small_disk: Path) -> None:
    def now(trainer: Any) -> None:
        fill(small_disk)
        with pytest.raises(CheckpointWriteError, match=r"step-3\.ckpt can't be written: No space left"):
            trainer.checkpoint_callback.save_now(trainer)
        (small_disk / "ballast").unlink()

    fit(store, small_disk, 4, At({3: now}), every_n_train_steps=2, keep_last=1)
    assert names(small_disk) == ["step-4.ckpt"]
