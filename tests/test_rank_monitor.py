"""The live monitor names the rank that is late, and why, and nobody where all are equal."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lit_llm.callbacks import RankMonitor, monitor
from lit_llm.callbacks.monitor_timing import ForwardTimer
from lit_llm.errors import UserError
from tests.distributed import run_ranks
from tests.monitor_runs import EVERY, SINGLE, STEPS, Kept, Lit, things
from tests.test_step import micro_batches


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("monitor"))
    return run_ranks("tests.monitor_runs:ranks_worker", 2, folder=folder, timeout=150)


@pytest.mark.parametrize("name", ["ddp, data", "mesh, data"])
def test_slow_data_is_named(found: list[dict[str, Any]], name: str) -> None:
    said = found[0][name]["said"]
    assert len(said) == 1
    assert said[0].startswith("step 8: rank 1 (")
    waits, median = re.findall(r"\) waits (\d+) ms a step for data; the median rank (\d+) ms$", said[0])[0]
    assert int(waits) >= 60
    assert int(median) < 20
    rows = found[0][name]["rows"]
    assert [step for step, _ in rows] == [4, 8]
    assert all(60 <= row["monitor/data_wait_ms_max"] < 120 for _, row in rows)
    assert ["monitor/slowest_rank" in row for _, row in rows] == [False, True]
    assert all(row["monitor/step_ms"] > 60 for _, row in rows)
    assert found[1][name]["said"] == found[1][name]["rows"] == []  # rank 0 speaks for all


@pytest.mark.parametrize(("name", "micro_batches"), [("ddp, forward", 2), ("mesh, forward, compiled", 1)])
def test_slow_compute_is_named(found: list[dict[str, Any]], name: str, micro_batches: int) -> None:
    said = found[0][name]["said"]
    assert len(said) == 1
    assert said[0].startswith("step 8: rank 1 (")
    assert "ms a step in its forward" in said[0]
    for _, row in found[0][name]["rows"]:
        assert 60 * micro_batches <= row["monitor/compute_ms_max"] < 100 * micro_batches
        assert row["monitor/compute_ms_median"] < 50  # the other rank waits, and that is no work
    again = 2 if name == "ddp, forward" else 1  # what is computed again in backward sleeps as well, and does not count
    assert found[1][name]["slept"] == STEPS * micro_batches * again


@pytest.mark.parametrize("name", ["ddp, equal", "mesh, equal"])
def test_equal_ranks_are_not_named(found: list[dict[str, Any]], name: str) -> None:
    assert [rank[name]["slept"] for rank in found] == [STEPS, STEPS]
    assert found[0][name]["said"] == []
    for _, row in found[0][name]["rows"]:
        assert row["monitor/data_wait_ms_max"] >= 30
        assert row["monitor/compute_ms_median"] >= 30
        assert "monitor/slowest_rank" not in row


def test_nothing_is_installed_outside_of_the_measured_steps(found: list[dict[str, Any]]) -> None:
    for rank in found:
        installed = {int(step): number for step, number in rank["installed"].items()}
        assert sorted(installed) == list(range(14))
        assert {step for step, number in installed.items() if number} == {*range(2, 7), *range(9, 14)}
        assert set(installed.values()) == {0, 2 + 3}  # two blocks' calls, and the groups of both and of the root
        assert all(rank[name]["left"] == [] for name in rank if isinstance(rank[name], dict) and "left" in rank[name])


def test_one_collective_a_comparison(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["collectives"] == {SINGLE: STEPS // EVERY, "all_gather_object": 1}


def judged(*comparisons: list[list[float]], hosts: list[str] | None = None, **options: Any) -> Any:
    """What is said and logged of tables (ranks, (step, data, compute))."""
    one = RankMonitor(10, **options)
    said: list[str] = []
    logger = Kept()
    trainer: Any = SimpleNamespace(is_global_zero=True, loggers=[logger])
    one._hosts = hosts or [f"node-{rank // 2}" for rank in range(len(comparisons[0]))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "rank_zero_warn", said.append)
        patch.setattr(monitor, "rank_zero_info", lambda text: said.append(f"info {text}"))
        for number, rows in enumerate(comparisons, 1):
            one._compare(trainer, [value for row in rows for value in row], 10 * number)
    return said, [row for _, row in logger.rows]


EVEN = [[100.0, 1.0, 30.0]] * 6


def with_rank(rank: int, data: float = 1.0, compute: float = 30.0) -> list[list[float]]:
    return [[100.0, data, compute] if r == rank else row for r, row in enumerate(EVEN)]


def test_a_rank_is_named_at_its_second_time_and_once() -> None:
    late = with_rank(5, data=61.2)
    said, rows = judged(EVEN, late, late, late, EVEN, late, late)
    assert said == [
        "step 30: rank 5 (node-2) waits 61 ms a step for data; the median rank 1 ms",
        "info step 50: no rank stands out by its data any more",
        "step 70: rank 5 (node-2) waits 61 ms a step for data; the median rank 1 ms",
    ]
    assert [row.get("monitor/slowest_rank") for row in rows] == [None, None, 5, 5, None, None, 5]
    assert rows[2] == {
        "monitor/step_ms": 100.0, "monitor/data_wait_ms_max": 61.2, "monitor/compute_ms_max": 30.0,
        "monitor/compute_ms_median": 30.0, "monitor/slowest_rank": 5,
    }  # fmt: skip


def test_who_is_late_by_turns_is_not_named() -> None:
    said, rows = judged(with_rank(1, data=60), with_rank(2, data=60), with_rank(1, compute=90), with_rank(1, data=60))
    assert said == []
    assert not any("monitor/slowest_rank" in row for row in rows)


@pytest.mark.parametrize(
    ("compute", "options", "named"),
    [(34.9, {}, False), (35.1, {}, True), (35.1, {"min_ms": 6.0}, False), (35.1, {"threshold": 0.06}, False)],
)
def test_the_limit_is_the_larger_of_the_two(compute: float, options: dict[str, float], named: bool) -> None:
    said, _ = judged(*[with_rank(3, compute=compute)] * 2, **options)
    assert [text.split(";")[0] for text in said] == [
        "step 20: rank 3 (node-1) computes 35 ms a step in its forward"
    ] * named


def test_a_host_all_of_whose_ranks_are_slow() -> None:
    late = [[100.0, 1.0, 60.0 + r if r in (2, 3) else 30.0] for r in range(6)]
    said, _ = judged(late, late)
    assert said[0].endswith("the median rank 30 ms; all 2 ranks of node-1 stand out")
    assert said[0].startswith("step 20: rank 3 (node-1)")


def test_what_could_not_be_measured_is_left_out() -> None:
    unknown = [[100.0, 1.0, math.nan] for _ in range(6)]
    said, rows = judged(unknown, unknown)
    assert said == []
    assert rows[0] == {"monitor/step_ms": 100.0, "monitor/data_wait_ms_max": 1.0}
    some = [[100.0, math.nan, math.nan if r == 0 else 90.0 if r == 1 else 30.0] for r in range(6)]
    said, rows = judged(some, some)
    assert len(said) == 1
    assert "rank 1 (node-0) computes 90 ms" in said[0]
    assert "monitor/data_wait_ms_max" not in rows[0]


class Plain(L.LightningModule):
    """No Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_one_process_and_any_module(tmp_path: Path) -> None:
    kept = Kept()
    trainer = L.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_steps=6, logger=kept, callbacks=[RankMonitor(3)],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Plain(), DataLoader(torch.zeros(8, 4)))
    assert [step for step, _ in kept.rows] == [3, 6]
    for _, row in kept.rows:
        assert 20 <= row["monitor/compute_ms_max"] <= row["monitor/step_ms"]
        assert row["monitor/data_wait_ms_max"] < row["monitor/step_ms"] - 20


class Fails(Callback):
    """In the fourth step."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if trainer.global_step == 3:
            assert things(module)
            raise RuntimeError("here")


def test_an_exception_leaves_nothing_installed(tmp_path: Path) -> None:
    lit, rows = Lit(), micro_batches(8)
    trainer = L.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_steps=8, logger=False, callbacks=[RankMonitor(4), Fails()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    fetchers: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        leave = monitor._Fetches.leave
        patch.setattr(monitor._Fetches, "leave", lambda self: (fetchers.append(self._fetcher), leave(self))[1])
        with pytest.raises(RuntimeError, match="here"):
            trainer.fit(lit, DataLoader(rows, batch_size=None))
    assert things(lit) == []
    assert "on_start" not in fetchers[0]._start_profiler.__qualname__


class Clock:
    """Counts 10 ms from stamp to stamp, of which the device has not come to the last ones."""

    def __init__(self, reached: int) -> None:
        self.stamp, self.reached = 0, reached

    def now(self) -> int:
        self.stamp += 1
        return self.stamp

    def ms(self, stretch: tuple[int, int]) -> float | None:
        return 10.0 * (stretch[1] - stretch[0]) if stretch[1] <= self.reached else None


def test_steps_that_the_device_is_not_through_with_are_left_out() -> None:
    timer = ForwardTimer(torch.nn.Module(), torch.device("cpu"))
    block, wait = timer._timed(lambda call: call() and None), timer._waiting(lambda: True)
    for reached, expected in ((11, 25.0), (10, 20.0), (4, math.nan)):
        timer.clock = Clock(reached)  # type: ignore[assignment]
        timer.begin(0)  # stamp 1
        block(wait)  # 2 to 5, of which 3 to 4 waits
        timer.end()
        timer.begin(1)  # 7
        block(lambda: [timer.clock.now(), timer.clock.now()])  # 8 to 11
        timer.end()
        assert timer.take() == pytest.approx(expected, nan_ok=True)
    assert math.isnan(timer.take())


def test_long_accumulation_is_sampled() -> None:
    timer = ForwardTimer(torch.nn.Module(), torch.device("cpu"))
    timer.clock = Clock(10**6)  # type: ignore[assignment]
    for _ in range(16):
        timer.begin(7)
        timer.end()
    assert timer.clock.stamp == 2 * 4
    assert timer.take() == pytest.approx(16 * 10.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be a whole number of at least 1; got 0"),
        ({"every_n_steps": 2.5}, "every_n_steps must be a whole number of at least 1; got 2.5"),
        ({"every_n_steps": True}, "every_n_steps must be a whole number of at least 1; got True"),
        ({"every_n_steps": "x"}, "every_n_steps must be a whole number of at least 1; got 'x'"),
        ({"threshold": "x"}, "threshold must be a share of a step, such as 0.05; got 'x'"),
        ({"min_ms": None}, "min_ms must be at least 0 milliseconds; got None"),
        ({"threshold": -0.1}, "threshold must be a share of a step, such as 0.05; got -0.1"),
        ({"min_ms": math.nan}, "min_ms must be at least 0 milliseconds; got nan"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        RankMonitor(**options)
    assert str(error.value) == f"rank_monitor.{text}"
