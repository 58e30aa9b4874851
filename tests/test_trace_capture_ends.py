"""TraceCapture at bad ends, too large a trace, reading in the background, and its other options."""

from __future__ import annotations

import gzip
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler

from lit_llm import LitLLM
from lit_llm.callbacks import TraceCapture, trace_cut, trace_files, trace_report
from lit_llm.callbacks.memory_snapshot import MemorySnapshot
from lit_llm.callbacks.trace_marks import StepMarks
from lit_llm.callbacks.trace_window import Ranks
from lit_llm.errors import UserError
from tests.distributed import ROOT
from tests.test_step import SEQ, VOCAB
from tests.trace_ranks import SMALL, At, annotations, both, capture, files, fit, lies_in, names, read, steps_of

# Bad ends


def test_an_exception_passes_and_leaves_what_was_recorded(tmp_path: Path) -> None:
    error = ArithmeticError("enough")

    def fail() -> None:
        raise error

    with pytest.raises(ArithmeticError) as caught:
        fit(tmp_path, At(3, fail), capture(active=9))
    assert caught.value is error
    assert files(tmp_path) == {"step-000001/rank-00000.json.gz": [1, 2, 3]}
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_and_leaves_what_was_recorded(tmp_path: Path, number: int) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, At(3, lambda: os.kill(os.getpid(), number)), capture(active=9), steps=20)
    assert files(tmp_path) == {"step-000001/rank-00000.json.gz": [1, 2, 3]}


def test_an_exception_stays_itself_where_writing_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "traces").write_text("no folder")

    def fail() -> None:
        raise ArithmeticError("enough")

    with pytest.raises(ArithmeticError, match="enough"):
        fit(tmp_path, At(3, fail), capture(active=9))
    assert "no trace was written" in caplog.text


def test_writing_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_files, "LEAST_FREE", 1 << 60)
    assert fit(tmp_path / "full", capture(), steps=4).global_step == 4
    assert "no trace was written: only " in caplog.text
    assert not files(tmp_path / "full")
    monkeypatch.undo()
    monkeypatch.setattr(
        "torch.profiler._KinetoProfile.export_chrome_trace", lambda self, path: Path(path).write_text("{")
    )
    assert fit(tmp_path / "cut", capture(), steps=4).global_step == 4
    assert "the profiler could not write it; is the disk full?" in caplog.text
    assert not [path for path in (tmp_path / "cut").rglob("*") if path.is_file()]


class Lightnings(PyTorchProfiler):
    def __del__(self) -> None:
        """Of one that has not begun, Lightning's own fails."""


def test_it_refuses_other_profilers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="beside Lightning's PyTorchProfiler"):
        fit(tmp_path, capture(), profiler=Lightnings())
    with pytest.raises(UserError, match="more than one TraceCapture"):
        fit(tmp_path, capture(), capture())
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(UserError, match="while another torch profiler runs"),
    ):
        fit(tmp_path, capture())
    with pytest.raises(UserError, match="a folder of this machine, but trainer.default_root_dir is"):
        fit("memory://run", capture())


def test_a_profiler_that_begins_meanwhile_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    # One is there before the window is made ready, one comes between that and its first step.
    for start, begin in ((3, 2), (1, 1)):
        run = fit(tmp_path, At(begin, other.start), At(5, other.stop), capture(start=start), steps=7)
        assert run.global_step == 7
    assert not files(tmp_path)
    assert caplog.text.count("is not recorded: another torch profiler runs") == 2


def test_a_validation_that_fails_leaves_the_steps_before_it(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_validation_batch_end(self, *args: Any) -> None:
            raise ArithmeticError("enough")

    options = {"val_check_interval": 3, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    with pytest.raises(ArithmeticError, match="enough"):
        fit(tmp_path, Fails(), capture(active=9), validate=True, **options)
    assert files(tmp_path) == {"step-000001/rank-00000.json.gz": [1, 2]}
    assert "validation" in names(read(tmp_path / "traces/step-000001/rank-00000.json.gz"))


# Marks


class FakeTrainer:
    """What marks need of a Trainer that scales its loss: the optimizer's step comes after the closure."""

    def __init__(self) -> None:
        self.profiler: Any = SimpleProfiler()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.optimizers = [torch.optim.SGD([self.weight], lr=0.1)]
        self.lightning_module = self
        self.automatic_optimization = True
        self.global_step = 0

    def step(self, skip: bool) -> None:
        with self.profiler.profile("[_TrainingEpochLoop].train_dataloader_next"):
            pass
        with self.profiler.profile("[LightningModule]X.optimizer_step"):
            with self.profiler.profile("[Strategy]S.training_step"):
                loss = self.weight.sum()
            with self.profiler.profile("[Strategy]S.backward"):
                loss.backward()
            with self.profiler.profile("[Callback]Y.on_before_optimizer_step"):
                pass
            if not skip:
                self.optimizers[0].step()
        self.global_step += 1
        with self.profiler.profile("[LightningModule]X.on_train_batch_end"):
            pass


def test_marks_where_a_loss_scaler_makes_or_leaves_out_the_step(tmp_path: Path) -> None:
    run, calls = FakeTrainer(), []
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    before = run.profiler
    marks = StepMarks(run, 1, 3, profiler.start, lambda: (marks.remove(), profiler.stop()), calls.append)
    marks.install()
    for skip in (False, False, True, False):
        run.step(skip)
    assert run.profiler is before
    assert marks.steps == [1, 2]
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = annotations(json.loads((tmp_path / "trace.json").read_text()))
    assert [one["name"] for one in found] == [
        *("ProfilerStep#1", "data_fetch", "forward", "backward", "optimizer", "Optimizer.step#SGD.step"),
        *("ProfilerStep#2", "data_fetch", "forward", "backward", "optimizer"),
    ]
    assert lies_in(found[5], found[4])
    assert all(lies_in(one, found[0]) for one in found[1:6])
    assert all(lies_in(one, found[6]) for one in found[7:])
    assert not calls


# Size


def event(name: str, cat: str, start: float, length: float, **args: Any) -> str:
    inner = json.dumps(args)
    return (
        f'  {{\n    "ph": "X",\n    "cat": "{cat}",\n    "name": "{name}",\n    "pid": 1,\n    "tid": 1,\n'
        f'    "ts": {start:.3f},\n    "dur": {length:.3f}\n    ,\n    "args": {{\n      {inner[1:-1]}\n    }}\n  }}'
    )


def made_trace(steps: int = 4) -> str:
    """Steps of 100 us with 50 launches; each kernel runs a step later than it is launched."""
    host = [event(f"ProfilerStep#{step}", "user_annotation", 100 * step, 99) for step in range(steps)]
    device = []
    for step in range(steps):
        for number in range(50):
            start, correlation = 100 * step + 1 + number, 1000 * step + number
            device.append(event("k", "kernel", start + 100, 1, stream=7, correlation=correlation))
            device.append(event("cudaLaunchKernel", "cuda_runtime", start, 0.5, correlation=correlation))
    head = '{\n  "schemaVersion": 1,\n  "lit_llm": {"rank": 0, "steps": 4},\n  "traceEvents": [\n'
    meta = '  {\n    "ph": "M",\n    "name": "process_name",\n    "ts": 999999.000,\n    "pid": 1,\n    "tid": 0\n  }'
    return head + ",\n".join([meta, *host, *device]) + '\n  ],"traceName": "x" }'


def test_a_cut_keeps_whole_steps_and_the_kernels_they_launched(tmp_path: Path) -> None:
    source, target = tmp_path / "a.json", tmp_path / "b.json"
    source.write_text(made_trace())
    size = source.stat().st_size
    for share, left in ((0.6, 2), (0.8, 3), (0.01, 1)):
        assert trace_cut.main(str(source), str(target), int(size * share)) == left
        cut = json.loads(target.read_text())
        assert steps_of(cut) == list(range(left))
        kernels = [one["args"]["correlation"] for one in cut["traceEvents"] if one.get("cat") == "kernel"]
        launches = [one["args"]["correlation"] for one in cut["traceEvents"] if one.get("cat") == "cuda_runtime"]
        expected = sorted(1000 * step + number for step in range(left) for number in range(50))
        assert sorted(kernels) == expected
        assert sorted(launches) == expected
        assert [one["name"] for one in cut["traceEvents"] if one["ph"] == "M"] == ["process_name"]
        assert cut["lit_llm"] == {"rank": 0, "steps": 4, "truncated_to_steps": left}
    with pytest.raises(ValueError, match="it has 4 marked steps"):
        trace_cut.main(str(source), str(target), size)


def test_a_trace_too_large_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path / "whole", capture(active=4))
    size = len(gzip.decompress((tmp_path / "whole/traces/step-000001/rank-00000.json.gz").read_bytes()))
    monkeypatch.setattr(trace_files, "RAW_PER_PACKED", 0.6 * size / 2**20)
    fit(tmp_path / "cut", capture(active=4, max_mb=1))
    assert files(tmp_path / "whole") == {"step-000001/rank-00000.json.gz": [1, 2, 3, 4]}
    assert files(tmp_path / "cut") == {"step-000001/rank-00000.json.gz": [1, 2]}
    note = read(tmp_path / "cut/traces/step-000001/rank-00000.json.gz")["lit_llm"]
    assert (note["steps"], note["truncated_to_steps"]) == (4, 2)
    assert "was cut to its first 2 steps; raise trace_capture.max_mb" in caplog.text


# Reading in the background

REPORT = {
    "ranks": [
        {
            "rank": 0,
            "steps": [
                {"step": 1, "duration_us": 100.0, "comm_exposed_us": 20.0, "dataloader_us": 5.0, "idle_us": None},
                {"step": 2, "duration_us": 300.0, "comm_exposed_us": 20.0, "dataloader_us": 15.0, "idle_us": None},
            ],
        }
    ],
    "straggler": {"rank": 3, "median_lag_us": 7.5},
    "verdicts": [{"severity": "warning", "message": "rank 3 lags", "advice": "raise num_workers"}],
}


class Logged(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.values.append(dict(metrics))


def fake_python(path: Path, code: str) -> str:
    path.write_text(f"#!{sys.executable}\nimport json, sys, time\nfrom pathlib import Path\n{code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_window_is_read_and_its_verdicts_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "words = sys.argv[1:]\nassert words[:3] == ['-m', 'lit_llm', 'trace'], words\n"
        "assert (Path(words[3]) / 'rank-00000.json.gz').exists()\n"
        f"Path(words[words.index('--json') + 1]).write_text({json.dumps(json.dumps(REPORT))})\n"
    )
    monkeypatch.setattr(trace_report.sys, "executable", fake_python(tmp_path / "python", code))
    logger = Logged()
    fit(tmp_path, capture(analyze=True), steps=4, logger=logger)
    logged = {name: value for values in logger.values for name, value in values.items() if name.startswith("trace/")}
    assert logged == {
        "trace/first_step": 1.0,
        "trace/step_us": 200.0,
        "trace/comm_exposed_pct": 10.0,
        "trace/dataloader_pct": 5.0,
        "trace/straggler_rank": 3.0,
        "trace/straggler_lag_us": 7.5,
    }
    assert "trace step-000001: warning: rank 3 lags (raise num_workers)" in caplog.text


def test_reading_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fake_python(tmp_path / "python", "sys.exit('lit-llm: error: no such thing')")
    monkeypatch.setattr(trace_report.sys, "executable", broken)
    with pytest.warns(UserWarning, match="were not read .exit code 1: lit-llm: error: no such thing"):
        assert fit(tmp_path, capture(analyze=True), steps=4).global_step == 4
    assert len(files(tmp_path)) == 1


def test_a_run_that_fails_does_not_wait_for_its_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = fake_python(tmp_path / "python", "time.sleep(600)")
    monkeypatch.setattr(trace_report.sys, "executable", slow)

    def fail() -> None:
        raise ArithmeticError("enough")

    with (
        pytest.warns(UserWarning, match="were not read .the run has ended first"),
        pytest.raises(ArithmeticError),
    ):
        fit(tmp_path, At(4, fail), capture(analyze=True))


# Memory, NCCL


def test_the_flight_recorder_is_switched_on_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}
    files_of = {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
    monkeypatch.setattr(os, "environ", {**os.environ})  # what is set is gone behind this test
    TraceCapture()
    assert not (wanted | files_of) & set(os.environ)
    recorder = capture(flight_recorder=True, start=None)
    assert {os.environ[name] for name in wanted} == {"2000", "1"}
    fit(tmp_path, recorder, steps=1)
    assert {os.environ[name] for name in files_of} == {str(tmp_path / "traces/nccl-flight-recorder-rank-")}
    os.environ["TORCH_FR_BUFFER_SIZE"] = "7"
    capture(flight_recorder=True)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"


def test_the_flight_recorder_may_come_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    late = capture(flight_recorder=True, start=None)
    monkeypatch.undo()
    monkeypatch.setattr(os, "environ", {**os.environ})
    with pytest.warns(UserWarning, match="comes too late, as the process groups are made; set TORCH_FR_BUF"):
        fit(tmp_path, late, steps=1)


def test_memory_snapshots_without_cuda_are_said_to_do_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    fit(tmp_path, capture(memory_snapshot=True), steps=3)
    assert "trace_capture.memory_snapshot does nothing here: there is no CUDA device" in caplog.text
    assert len(files(tmp_path)) == 1


def test_a_snapshot_is_written_when_memory_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: history.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"x"))
    snapshot = MemorySnapshot(3, tmp_path / "traces")
    assert snapshot.on_exception(ValueError("no such thing")) is None
    assert snapshot.on_exception(torch.OutOfMemoryError("no room")) == tmp_path / "traces/memory-rank-00003.pickle"
    assert not history
    snapshot.start()
    assert snapshot.dump(tmp_path / "traces") == tmp_path / "traces/memory-rank-00003-2.pickle"  # none is replaced
    assert [one["enabled"] for one in history] == ["all", None]
    assert history[0]["stacks"] == "python"
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path("/no/where").write_bytes(b"x"))
    assert snapshot.on_exception(torch.OutOfMemoryError("no room")) is None


# Options


def test_the_command_line_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import yaml

    from lit_llm.cli.main import main

    monkeypatch.chdir(tmp_path)
    words = ["fit", "--print_config", "--data.store=x", "--trainer.callbacks+=lit_llm.callbacks.TraceCapture"]
    words += ["--trainer.callbacks.start", "2", "--trainer.callbacks.ranks", "8", "--trainer.callbacks.analyze=false"]
    assert main(words) == 0
    options = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"][-1]["init_args"]
    assert (options["start"], Ranks.of(options["ranks"]).among(9), options["analyze"]) == (2, [0, 8], False)


# Full


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"record_shapes": True, "with_stack": True, "profile_memory": True}, {}])
def test_compiled_blocks_and_all_that_the_profiler_can_keep(tmp_path: Path, options: dict[str, bool]) -> None:
    module = LitLLM(config=SMALL, vocab_size=VOCAB, seq_len=SEQ, compile=True)
    fit(tmp_path, capture(active=2, **options), module=module, steps=4)
    assert files(tmp_path) == {"step-000001/rank-00000.json.gz": [1, 2]}
    assert {"forward", "backward", "optimizer"} <= names(read(tmp_path / "traces/step-000001/rank-00000.json.gz"))


@pytest.mark.slow
def test_processes_that_lightning_starts(tmp_path: Path) -> None:
    for strategy in ("ddp_spawn", "ddp_fork"):
        fit(tmp_path / strategy, capture(), strategy=strategy, devices=2, steps=3)
        assert files(tmp_path / strategy) == both("step-000001", [1])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_first_process_lets_the_others_write(tmp_path: Path, store: str, strategy: str) -> None:
    words = ["fit", f"--data.store={store}", "--data.seq_len=16", "--data.global_batch_size=4"]
    words += [
        "--model.config.hidden_size=32",
        "--model.config.num_hidden_layers=2",
        "--model.config.num_attention_heads=2",
    ]
    words += [f"--trainer.strategy={strategy}", "--trainer.devices=2", "--trainer.accelerator=cpu"]
    words += ["--trainer.max_steps=500", f"--trainer.default_root_dir={tmp_path}"]
    words += ["--trainer.callbacks+=tests.trace_ranks.TermAt", "--trainer.callbacks.step=40"]
    words += ["--trainer.callbacks+=lit_llm.callbacks.TraceCapture", "--trainer.callbacks.start=0"]
    words += ["--trainer.callbacks.active=400"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "lit_llm", *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == both("step-000001", list(range(1, 41)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_and_its_memory(tmp_path: Path) -> None:
    options = {"val_check_interval": 2, "check_val_every_n_epoch": None, "accelerator": "gpu", "devices": 1}
    fit(tmp_path, capture(active=3, memory_snapshot=True), validate=True, **options)
    assert files(tmp_path) == {"step-000001/rank-00000.json.gz": [1, 2, 3]}
    trace = read(tmp_path / "traces/step-000001/rank-00000.json.gz")
    found = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    kernels = [one for one in found if one.get("cat") == "kernel"]
    assert kernels
    validation = next(one for one in annotations(trace) if one["name"] == "validation")
    assert not [one for one in found if one.get("cat") == "cpu_op" and lies_in(one, validation)]
    # The last step's kernels are there: as many as in the one before it.
    marks = [one for one in annotations(trace) if one["name"].startswith("ProfilerStep#")]
    launches = {one["args"]["correlation"]: one["ts"] for one in found if one.get("cat") == "cuda_runtime"}
    starts = [launches[one["args"]["correlation"]] for one in kernels if one["args"]["correlation"] in launches]
    counts = [sum(mark["ts"] <= ts <= mark["ts"] + mark["dur"] for ts in starts) for mark in marks]
    assert counts[1] == counts[2] > 0
    assert (tmp_path / "traces/step-000001/memory-rank-00000.pickle").stat().st_size > 0
