"""TraceCapture beside other profilers, copies, skipped batches and callbacks that fail; windows alike on all ranks."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import SimpleProfiler
from torch.autograd import profiler as torch_profiler

from lit_llm import LitLLM
from lit_llm.callbacks.trace_recording import Others, Recording
from lit_llm.callbacks.trace_window import Plan, Schedule, Window
from tests.distributed import ROOT
from tests.test_step import SEQ, VOCAB
from tests.trace_ranks import SMALL, At, Plain, annotations, capture, files, fit, lies_in, read, steps_of

CPU = [torch.profiler.ProfilerActivity.CPU]
ENTRIES = [owner.__dict__[name] for owner, name in Others._ENTRIES]


class Foreign(Callback):
    """A user's profiler: made ready in a step, it records the two steps after it."""

    def __init__(self, step: int, wait: int = 0) -> None:
        self.step, self.wait = step, wait
        self.profiler: Any = None
        self.names: list[str] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and self.profiler is None:
            schedule = torch.profiler.schedule(wait=self.wait, warmup=1, active=2, repeat=1)
            self.profiler = torch.profiler.profile(activities=CPU, schedule=schedule, on_trace_ready=self.ready)
            self.profiler.start()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self.profiler is not None:
            self.profiler.step()

    def ready(self, profiler: Any) -> None:
        self.names = [one.name for one in profiler.events()]


# In a process of its own, as two at a time crash; what is recorded before theirs begins stays.
USER_PROFILER = """
import sys
from tests.test_trace_capture_beside import Foreign, Plain, capture, files, fit
for step in range(7):
    user = Foreign(step)
    fit(f"{sys.argv[1]}/{step}", user, capture(start=2, active=2), module=Plain(), steps=9)
    assert user.names.count("Optimizer.step#SGD.step") == 2, (step, user.names)
    print(step, sorted(files(f"{sys.argv[1]}/{step}").values()))
"""


def test_a_users_profiler_goes_first_in_any_order(tmp_path: Path) -> None:
    command = [sys.executable, "-c", USER_PROFILER, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:7] == ["0 []", "1 []", "2 []", "3 [[3]]", "4 [[3, 4]]", "5 [[3, 4]]", "6 [[3, 4]]"]
    assert done.stderr.count("is not recorded: another torch profiler runs") == 3
    assert done.stderr.count("step-000003 ends early: another torch profiler begins") == 2
    assert "no active profiling session" not in done.stderr
    assert read(tmp_path / "4/traces/step-000003/rank-00000.json.gz")["lit_llm"]["last_step_is_partial"] is True
    assert "last_step_is_partial" not in read(tmp_path / "5/traces/step-000003/rank-00000.json.gz")["lit_llm"]


def test_entries_of_torch_are_stood_in_for_during_a_window_alone(tmp_path: Path) -> None:
    seen: dict[int, bool] = {}

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            seen[trainer.global_step] = [owner.__dict__[name] for owner, name in Others._ENTRIES] == ENTRIES

    fit(tmp_path, Look(), capture(start=1, active=2), module=Plain())
    assert seen == {0: True, 1: False, 2: False, 3: False, 4: True, 5: True}


def test_others_give_way_or_let_through() -> None:
    gone: list[int] = []
    others = Others(lambda: (gone.append(1), others.remove()))
    ours, theirs = torch_profiler.profile(use_cpu=True), torch_profiler.profile(use_cpu=True)
    others.install(ours)
    told: list[str] = []

    def elsewhere() -> None:
        try:
            theirs._prepare_trace()
        except RuntimeError as error:
            told.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert told == ["a torch profiler can't begin in another thread while TraceCapture records"]
    with ours, torch_profiler.emit_itt(enabled=False):
        assert not gone
    with theirs:
        assert gone == [1]
    assert [owner.__dict__[name] for owner, name in Others._ENTRIES] == ENTRIES


def test_a_trace_with_other_step_marks_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Foreign(2, wait=9), capture(start=2, active=2), module=Plain())  # it waits, but marks its steps
    assert not list(tmp_path.rglob("*rank-*"))
    assert "no trace was written: its step marks are not those of its steps" in caplog.text


# The user's own


class Own(SimpleProfiler):
    """Has a ``profile`` of its own, and something to set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(dirpath=folder, filename="there")
        self.profiled: list[str] = []
        self.note = 0

    def profile(self, action_name: str) -> Any:
        self.profiled.append(action_name)
        return super().profile(action_name)


def test_the_trainers_profiler_is_itself_within_a_window(tmp_path: Path) -> None:
    own, types = Own(tmp_path), []

    class Uses(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            types.append(type(trainer.profiler).__name__)
            assert trainer.profiler.profiled[-1].endswith("Uses.on_train_batch_end")
            assert trainer.profiler.recorded_durations is own.recorded_durations
            assert trainer.profiler.filename == "there"
            trainer.profiler.note = trainer.global_step
            with trainer.profiler.profile("mine") as given:
                assert given == "mine"
            assert trainer.profiler.summary()
            assert not hasattr(trainer.profiler, "no_such_thing")

    fit(tmp_path, Uses(), capture(active=2), profiler=own)
    assert types == ["Listening"] * 3 + ["Own"] * 3
    assert own.note == 6
    assert len(own.recorded_durations["mine"]) == own.profiled.count("mine") == 6


def test_the_trainers_profiler_does_not_count_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiler, current = SimpleProfiler(), []
    write, start = Recording._write, Recording._start

    def noting(which: Any) -> Any:
        return lambda *args: (current.append(dict(profiler.current_actions)), which(*args))[1]

    monkeypatch.setattr(Recording, "_write", noting(write))
    monkeypatch.setattr(Recording, "_start", noting(start))
    fit(tmp_path, capture(), profiler=profiler)
    assert [list(one) for one in current] == [["run_training_epoch"], ["run_training_epoch"]]


@pytest.mark.parametrize("module", [Plain, lambda: LitLLM(config=SMALL, vocab_size=VOCAB, seq_len=SEQ)])
def test_copies_within_a_window(tmp_path: Path, module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    copies: list[Any] = []

    class Copies(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                assert type(trainer.profiler).__name__ == "Listening"
                copies.extend(copy.deepcopy((trainer.callbacks, module)))
                assert type(copy.deepcopy(trainer.profiler)) is SimpleProfiler

    fit(tmp_path, Copies(), capture(active=4), module=module(), profiler=SimpleProfiler())
    assert len(copies) == 2
    copies.clear()
    assert list(files(tmp_path).values()) == [[1, 2, 3, 4]]
    assert "__del__" not in capsys.readouterr().err


# Steps


class Skips(Plain):
    """Skips each epoch's second batch, which ends the epoch; a turn of the epoch takes a while."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None

    def on_train_epoch_start(self) -> None:
        time.sleep(0.2)


def test_a_step_whose_batch_is_skipped_begins_anew(tmp_path: Path) -> None:
    fit(tmp_path, capture(warmup=0, active=4), module=Skips(), limit_train_batches=4, max_epochs=9)
    trace = read(tmp_path / "traces/step-000000/rank-00000.json.gz")
    assert steps_of(trace) == [0, 1, 2, 3]
    found = annotations(trace)
    assert [one["name"] for one in found if one["name"].startswith("Skipped")] == [
        f"SkippedFetch#{n}" for n in (1, 2, 3)
    ]
    for mark in [one for one in found if one["name"].startswith("ProfilerStep#")]:
        inner = [one["name"] for one in found if lies_in(one, mark)]
        assert [inner.count(name) for name in ("data_fetch", "forward", "optimizer")] == [1, 1, 1]
    marks = [one for one in found if one["name"].startswith("ProfilerStep#")]
    between = [later["ts"] - one["ts"] - one["dur"] for one, later in zip(marks, marks[1:], strict=False)]
    assert all(gap >= 200_000 for gap in between)
    assert len(between) == 3


def test_a_validation_within_a_step_is_marked_there(tmp_path: Path) -> None:
    class Slow(Callback):
        def on_validation_batch_end(self, *args: Any) -> None:
            time.sleep(0.05)

    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "check_val_every_n_epoch": None}
    fit(tmp_path, Slow(), capture(active=3), validate=True, num_sanity_val_steps=0, **options)
    trace = read(tmp_path / "traces/step-000001/rank-00000.json.gz")
    found = annotations(trace)
    marks = [one for one in found if one["name"].startswith("ProfilerStep#")]
    validations = [one for one in found if one["name"] == "validation"]
    assert [one["name"] for one in marks] == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]
    assert [[lies_in(one, mark) for mark in marks] for one in validations] == [[True, False, False], [False] * 3]
    assert all(one["dur"] >= 100_000 for one in validations)  # of two batches
    inside = [one for one in trace["traceEvents"] if one["ph"] == "X" and one.get("cat") == "cpu_op"]
    assert not [one for one in inside if lies_in(one, validations[0])]
    for mark in marks:
        inner = [one["name"] for one in found if lies_in(one, mark)]
        assert [inner.count(name) for name in ("data_fetch", "forward", "backward", "optimizer")] == [2, 2, 2, 1]


def test_a_last_step_that_was_not_taken_is_told(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = trainer.global_step == 3 and batch_idx % 4 == 1

    def fail() -> None:
        raise ArithmeticError("enough")

    fit(tmp_path / "stopped", Stops(), capture(active=5), module=Plain(), accumulate_grad_batches=4)
    with pytest.raises(ArithmeticError):
        fit(tmp_path / "failed", At(3, fail), capture(active=5), module=Plain())
    fit(tmp_path / "short", capture(active=9), module=Plain(), steps=4)
    told = {}
    for name in ("stopped", "failed", "short"):
        trace = read(tmp_path / name / "traces/step-000001/rank-00000.json.gz")
        assert steps_of(trace) == [1, 2, 3]
        told[name] = trace["lit_llm"].get("last_step_is_partial")
    assert told == {"stopped": True, "failed": True, "short": None}


# Windows


def test_a_scheduled_window_under_a_requested_one_is_left_out(tmp_path: Path, caplog: Any) -> None:
    ask = At(1, lambda: os.kill(os.getpid(), signal.SIGUSR2))
    fit(tmp_path, ask, capture(start=4, active=3, every_n_steps=6, repeat=2), steps=16)
    assert files(tmp_path) == {
        "step-000004/rank-00000.json.gz": [4, 5, 6],
        "step-000011/rank-00000.json.gz": [11, 12, 13],
    }
    assert "the trace of steps 5 to 7 by schedule is left out: one that was asked for lies over it" in caplog.text


def test_windows_are_a_function_of_the_steps() -> None:
    said: list[str] = []
    plan = Plan(Schedule(2, 0, 1, 2, 3, 0), 0, 5, said.append)  # back to back: 2 to 5, 5 to 8, ...
    opened = {step: plan.turn(step) for step in range(6)}
    assert {step: window for step, window in opened.items() if window} == {2: Window(2, 3, 5), 5: Window(5, 6, 8)}
    assert plan.turn(5) is None  # asked again at the same step, nothing changes
    assert plan.closed == 1
    # At a window's last step a request finds that the next one has opened, whoever has been first.
    assert plan.turn(8) == Window(8, 9, 11)
    assert plan.ask(8) is None
    assert said == ["a trace was asked for, and one is being taken already; ask again after it"]

    other = Plan(Schedule(0, 0, 1, 2, None, 1), 0, 5, said.append)
    assert [other.turn(0), other.turn(1), other.turn(2), other.turn(3)] == [Window(0, 1, 3), None, None, None]
    assert other.ask(3) == Window(3, 4, 6, requested=True)

    late = Plan(Schedule(4, 0, 2, 2, None, 1), 0, 5, said.append)  # the request ends at 6: only its warm-up is short
    assert late.ask(2) == Window(2, 4, 6, requested=True)
    assert [late.turn(5), late.turn(6)] == [None, Window(4, 6, 8)]


@pytest.mark.parametrize("records", ["records", "is not listed", "cannot"])
def test_ranks_that_record_and_others_open_the_same_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: str
) -> None:
    """A request at the very step in which a window ends, with the next one right behind it, and without one."""
    opened: list[tuple[int, str]] = []
    from lit_llm.callbacks.trace_run import CaptureRun

    before = CaptureRun._open

    def noting(self: Any, window: Window) -> None:
        before(self, window)
        opened.append((self.trainer.global_step, self.latest[-1][1].name))

    monkeypatch.setattr(CaptureRun, "_open", noting)
    if records == "is not listed":
        monkeypatch.setattr("lit_llm.callbacks.trace_window.Ranks.among", lambda self, world_size: [7])
    if records == "cannot":
        monkeypatch.setattr(Recording, "prepare", lambda self: False)
    asks = [At(step, lambda: os.kill(os.getpid(), signal.SIGUSR2)) for step in (2, 6)]
    fit(tmp_path, *asks, capture(start=0, active=2, repeat=2), module=Plain(), steps=12)
    assert opened == [(0, "step-000001"), (3, "step-000004"), (7, "step-000008")]
    if records == "records":
        assert list(files(tmp_path).values()) == [[1, 2], [4, 5], [8, 9]]


# Ends


class Bad(Callback):
    """Fails, and again when it is told."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 4:
            raise ArithmeticError("enough")

    def on_exception(self, *args: Any) -> None:
        raise ValueError("me too")


def test_a_fit_that_was_not_told_of_its_end_does_not_stop_the_next(tmp_path: Path) -> None:
    for name in ("same", "new"):
        one = capture(active=6)
        with pytest.raises(ValueError, match="me too"):
            fit(tmp_path / name, Bad(), one, module=Plain(), steps=9)
        assert torch.autograd._profiler_enabled()
        fit(tmp_path / f"{name} again", one if name == "same" else capture(active=6), module=Plain(), steps=9)
        assert list(files(tmp_path / name).values()) == [[1, 2, 3]]
        assert list(files(tmp_path / f"{name} again").values()) == [[1, 2, 3, 4, 5, 6]]
        assert not torch.autograd._profiler_enabled()


LEFT_OVER = """
import sys
from tests.test_trace_capture_beside import Bad, Plain, capture, fit
try:
    fit(sys.argv[1], Bad(), capture(active=6), module=Plain(), steps=9)
except ValueError:
    print("me too")
"""


@pytest.mark.slow
def test_a_process_that_ends_with_a_window_open_writes_it(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", LEFT_OVER, str(tmp_path)], env=environment, cwd=ROOT, text=True,
                          capture_output=True)  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "me too"), done.stderr[-2000:]
    assert list(files(tmp_path).values()) == [[1, 2, 3]]
