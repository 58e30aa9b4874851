"""TraceCapture: which steps, which files, on every rank; requests, and nothing outside of a window."""

from __future__ import annotations

import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import SimpleProfiler

from lit_llm.callbacks import TraceCapture
from lit_llm.callbacks.trace_window import Ranks, Schedule
from lit_llm.errors import UserError
from lit_llm.training.boundary import BAD, WISH, _Mark
from tests.distributed import run_ranks
from tests.test_step import SEQ
from tests.trace_ranks import At, Plain, annotations, both, capture, files, fit, lies_in, names, read

# Which steps


def by_hand(steps: int, begin: int, start: int, wait: int, warmup: int, active: int, every: int | None, repeat: int):
    """The recorded steps of each window, by walking through a run step by step."""
    found: list[list[int]] = []
    waited = 0
    for step in range(begin + start, steps):
        place = waited % (every or wait + warmup + active) - (0 if every else wait)
        if every and waited == 0 and step < begin + start + wait:
            continue
        waited += 1
        if place == warmup:
            if repeat and len(found) == repeat:
                break
            found.append([])
        if warmup <= place < warmup + active:
            found[-1].append(step)
    return found


def test_windows_are_those_of_a_walk_through_the_run() -> None:
    checked = 0
    for start in (0, 1, 7):
        for wait in (0, 1, 3):
            for warmup in (0, 1, 2):
                for active in (1, 3):
                    for every in (None, warmup + active, 9):
                        for repeat in (0, 1, 2):
                            for begin in (0, 100):
                                schedule = Schedule(start, wait, warmup, active, every, repeat)
                                end = begin + 40
                                walked = by_hand(end, begin, start, wait, warmup, active, every, repeat)
                                planned = list(islice(schedule.windows(begin), 60))
                                given = [[s for s in range(w.first, w.last) if s < end] for w in planned]
                                assert [steps for steps in given if steps] == walked
                                assert all(w.first - w.prepare == warmup for w in planned)
                                checked += 1
    assert checked == 972


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"start": -1}, "trace_capture.start must be a whole number of at least 0; got -1"),
        ({"wait": 0.5}, "trace_capture.wait must"),
        ({"warmup": -2}, "trace_capture.warmup must"),
        ({"active": 0}, "trace_capture.active must be a whole number of at least 1; got 0"),
        ({"repeat": -1}, "trace_capture.repeat must"),
        ({"every_n_steps": 3}, "trace_capture.every_n_steps is 3, but a window takes 4 steps"),
        ({"every_n_steps": True}, "trace_capture.every_n_steps must"),
        ({"max_windows": 0}, "trace_capture.max_windows must"),
        ({"max_mb": 0}, "trace_capture.max_mb must"),
        ({"record_shapes": "x"}, "trace_capture.record_shapes must be true or false; got 'x'"),
        ({"analyze": "no"}, "trace_capture.analyze must be true or false; got 'no'"),
        ({"on_demand": None}, "trace_capture.on_demand must be true or false; got None"),
        ({"flight_recorder": 1}, "trace_capture.flight_recorder must be true or false; got 1"),
        ({"ranks": "some"}, "trace_capture.ranks must be all, a list of ranks"),
        ({"ranks": []}, "trace_capture.ranks must"),
        ({"ranks": [-1]}, "trace_capture.ranks must"),
        ({"ranks": -8}, "trace_capture.ranks must"),
        ({"ranks": ""}, "trace_capture.ranks must"),
    ],
)
def test_an_option_out_of_its_range_is_told_in_a_line(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        TraceCapture(**options)
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ("all", list(range(20))),
        (8, [0, 8, 16]),
        ("8", [0, 8, 16]),
        (0, [0]),
        ("0", [0]),
        ([3, 1, 3], [1, 3]),
        ("1, 3", [1, 3]),
        ("[5]", [5]),
    ],
)
def test_ranks_are_all_or_listed_or_every_kth(given: Any, ranks: list[int]) -> None:
    assert Ranks.of(given).among(20) == ranks


def test_a_listed_rank_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names rank 3, but this run has the ranks 0 to 0"):
        fit(tmp_path, capture(ranks=[0, 3]))


# A run


class Watch(Callback):
    """What is installed at each step's beginning."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Any, ...]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = trainer.optimizers[0]
        hooks = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
        state = type(trainer.profiler).__name__, hooks, len(trainer.callbacks), torch.autograd._profiler_enabled()
        self.seen[trainer.global_step] = state


def test_case_68_the_schedule_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch, profiler = Watch(), SimpleProfiler()
    run = fit(
        tmp_path,
        watch,
        TraceCapture(start=0, wait=1, warmup=1, active=3, repeat=2, analyze=False),
        steps=12,
        validate=True,
        accumulate_grad_batches=2,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        profiler=profiler,
    )
    assert files(tmp_path) == {"step-000002/rank-00000.json.gz": [2, 3, 4], "step-000007/rank-00000.json.gz": [7, 8, 9]}
    # Outside of a window nothing is installed, and at the end nothing is left.
    inside = {1, 2, 3, 4, 6, 7, 8, 9}  # warm-up among them
    outside = {state for step, state in watch.seen.items() if step not in inside}
    assert outside == {("SimpleProfiler", (0, 1), len(run.callbacks) + 2, False)}  # the boundary's two have left
    assert all(watch.seen[step][0] == "Listening" for step in inside)
    assert [step for step, state in watch.seen.items() if state[3]] == [2, 3, 4, 7, 8, 9]
    assert run.profiler is profiler
    assert not run.optimizers[0]._optimizer_step_pre_hooks
    assert len(profiler.recorded_durations["[Strategy]SingleDeviceStrategy.backward"]) == 24  # handed on
    assert "recorded nothing" not in caplog.text

    trace = read(tmp_path / "traces/step-000002/rank-00000.json.gz")
    found = annotations(trace)
    for mark in [one for one in found if one["name"].startswith("ProfilerStep#")]:
        inner = [one["name"] for one in found if one is not mark and lies_in(one, mark)]
        counts = {
            name: inner.count(name) for name in ("data_fetch", "batch_to_device", "forward", "backward", "optimizer")
        }
        assert counts == {"data_fetch": 2, "batch_to_device": 2, "forward": 2, "backward": 2, "optimizer": 1}
        assert "validation" not in inner
    for one in [one for one in found if one["name"] == "optimizer"]:  # the closure is not the optimizer's own work
        inner = [other["name"] for other in found if lies_in(other, one)]
        assert "forward" not in inner
        assert "backward" not in inner
        call = [other for other in found if other["name"] == "Optimizer.step#AdamW.step" and lies_in(one, other)]
        assert len(call) == 1
    validation = [one for one in found if one["name"] == "validation"]
    assert len(validation) == 1
    assert [
        one["name"]
        for one in trace["traceEvents"]
        if one["ph"] == "X" and one.get("cat") and lies_in(one, validation[0])
    ] == ["validation"]  # without its content
    note = trace["lit_llm"]
    assert (note["rank"], note["world_size"], note["first_step"], note["steps"]) == (0, 1, 2, 3)
    assert (note["strategy"], note["micro_batches"]) == ("SingleDeviceStrategy", 2)
    assert len(note["run"]) == 16


def test_a_run_that_is_too_short_is_told_of(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="recorded nothing: the run ended before step 2, and its first window records "
    ):
        fit(tmp_path, TraceCapture(start=0, wait=1, warmup=1, active=3, repeat=2, analyze=False), steps=2)
    assert not list(tmp_path.glob("traces/*"))
    assert not torch.autograd._profiler_enabled()


def test_a_window_that_the_end_cuts_short_is_written(tmp_path: Path) -> None:
    fit(tmp_path, capture(start=2, active=9), steps=5)
    assert files(tmp_path) == {"step-000003/rank-00000.json.gz": [3, 4]}


def test_windows_back_to_back_up_to_their_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, capture(repeat=0, max_windows=3), steps=12)
    assert list(files(tmp_path).values()) == [[1], [3], [5]]
    assert "no more traces: this run has taken 3 windows (trace_capture.max_windows)" in caplog.text


def test_without_warm_up_the_first_step_is_recorded(tmp_path: Path) -> None:
    fit(tmp_path, capture(warmup=0, active=2, repeat=2), steps=4)
    assert list(files(tmp_path).values()) == [[0, 1], [2, 3]]


def test_a_resumed_run_counts_from_where_it_begins(tmp_path: Path) -> None:
    run = fit(tmp_path, capture(), steps=3)
    run.save_checkpoint(tmp_path / "a.ckpt")
    fit(tmp_path, capture(), steps=6, resume=str(tmp_path / "a.ckpt"))
    assert list(files(tmp_path).values()) == [[1], [4]]


class Manual(Plain):
    """Two optimizers, each with a step in a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(SEQ, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, head in zip(self.optimizers(), (self.head, self.other), strict=True):
            self.manual_backward(head(batch["input_ids"].float()).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(one.parameters(), lr=1e-4) for one in (self.head, self.other)]


def test_other_modules_and_manual_optimization(tmp_path: Path) -> None:
    fit(tmp_path / "plain", capture(active=2), module=Plain())
    assert list(files(tmp_path / "plain").values()) == [[1, 2]]
    fit(tmp_path / "manual", capture(start=2, active=4), module=Manual(), steps=12)
    assert list(files(tmp_path / "manual").values()) == [[4, 6]]  # micro-batches of two steps
    found = [one["name"] for one in annotations(read(tmp_path / "manual/traces/step-000003/rank-00000.json.gz"))]
    assert [found.count(name) for name in ("forward", "backward", "optimizer")] == [2, 4, 4]


def test_what_is_no_training_is_left_alone(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    run = fit(tmp_path, capture(), fast_dev_run=True)
    run.callbacks.append(capture())
    assert not (tmp_path / "traces").exists()
    assert not [one for one in recwarn if "TraceCapture" in str(one.message)]


# Requests


def test_a_request_while_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sentinel = tmp_path / "lit/traces/capture"
    sentinel.parent.mkdir(parents=True)
    fit(tmp_path / "lit", At(2, sentinel.touch), capture(start=None, active=2), steps=9)
    assert list(files(tmp_path / "lit").values()) == [[5, 6]]
    assert not sentinel.exists()
    other = tmp_path / "other/traces/capture"
    other.parent.mkdir(parents=True)
    fit(tmp_path / "other", At(2, other.touch), capture(start=None), module=Plain(), steps=9)
    assert list(files(tmp_path / "other").values()) == [[4]]
    # In the middle of a window there is one already.
    sentinel.touch()
    fit(tmp_path / "lit", capture(active=5), steps=9)
    assert next(iter(files(tmp_path / "lit").values())) == [1, 2, 3, 4, 5]
    assert len(files(tmp_path / "lit")) == 2
    assert "a trace was asked for, and one is being taken already; ask again after it" in caplog.text


def test_signals_are_left_to_those_who_want_them(tmp_path: Path) -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: called.append(number))
    try:
        fit(tmp_path, At(2, lambda: os.kill(os.getpid(), signal.SIGUSR2)), capture(start=None), steps=6)
        assert called == [signal.SIGUSR2]
        assert not files(tmp_path)
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("signal_number", [0, 15, 64])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("wish", [False, True])
def test_a_rank_tells_three_things_in_one_number(signal_number: int, bad: bool, wish: bool) -> None:
    number = int(torch.tensor(float(signal_number + BAD * bad + WISH * wish)))
    assert _Mark.of(number) == (signal_number, bad, wish)


# Two ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks("tests.trace_ranks:rank_cases", 2, folder=str(folder))


def test_case_67_a_file_for_each_rank_and_run(two_ranks: tuple[Path, Any]) -> None:
    folder = two_ranks[0] / "twice"
    assert files(folder) == {**both("step-000001", [1, 2]), **both("step-000001-2", [1, 2])}
    notes = {path.parent.name + path.name[:10]: read(path)["lit_llm"] for path in folder.rglob("*.json.gz")}
    assert [(notes[name]["rank"], notes[name]["world_size"]) for name in sorted(notes)] == [(0, 2), (1, 2)] * 2
    runs = {name: note["run"] for name, note in notes.items()}
    assert runs["step-000001rank-00000"] == runs["step-000001rank-00001"] != runs["step-000001-2rank-00000"]
    assert not [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".json.gz")]


def test_requests_are_agreed_on(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = two_ranks
    assert files(folder / "asked") == both("step-000005", [5, 6])
    assert all(one["sentinel_is_gone"] and one["handler_is_back"] for one in found)
    assert files(folder / "signalled") == {**both("step-000002", [2]), **both("step-000006", [6])}


def test_listed_ranks_alone_record(two_ranks: tuple[Path, Any]) -> None:
    assert files(two_ranks[0] / "listed") == {"step-000001/rank-00001.json.gz": [1]}


def test_a_split_model_says_what_is_gathered(two_ranks: tuple[Path, Any]) -> None:
    assert files(two_ranks[0] / "split") == both("step-000001", [1])
    found = names(read(two_ranks[0] / "split/traces/step-000001/rank-00001.json.gz"))
    assert {"data_fetch", "forward", "backward", "optimizer"} <= found
    assert any(name.startswith("FSDP::all_gather") for name in found)


def test_other_modules_on_two_ranks(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    assert files(two_ranks[0] / "plain") == both("step-000001", [1])
    told, other = (one["plain"] for one in two_ranks[1])
    assert len(told) == 1
    assert "the ranks of a Plain have no way to agree on a step; only a LitLLM has" in told[0]
    assert not other
    assert not (two_ranks[0] / "plain/traces/capture").exists()


def test_a_rank_that_fails_leaves_what_was_recorded_on_both(tmp_path: Path) -> None:
    told = run_ranks("tests.trace_ranks:rank_failure", 2, folder=str(tmp_path))
    assert told[1] == "ArithmeticError: rank 1 has had enough / None"
    assert "rank 1" in told[0]
    assert "failed: ArithmeticError: rank 1 has had enough" in told[0]
    assert files(tmp_path) == both("step-000001", [1, 2, 3])
