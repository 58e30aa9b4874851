"""A run that is killed again and again ends with the weights of one that nobody disturbed, to the last bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kill_worker import train


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Forks processes that have imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.kill_worker"])
    return context


def _ledger(folder: Path) -> list[tuple[int, str]]:
    path = folder / "ledger"
    lines = path.read_text().splitlines() if path.exists() else []
    entries = [line.split() for line in lines]
    return [(int(entry[0]), entry[1]) for entry in entries if len(entry) == 2 and entry[1].count("p") == 1]


def _steps(folder: Path) -> int:
    """Lines of the ledger, whatever they say."""
    path = folder / "ledger"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _run(server: ForkServerContext, folder: Path, **options: Any) -> BaseProcess:
    process = server.Process(target=train, kwargs={"folder": str(folder), **options})
    process.start()
    return process


def killed_and_resumed(
    server: ForkServerContext, tmp_path: Path, store: str, kills: int, steps: int, **options: Any
) -> None:
    options = {"store": store, "steps": steps, "every": 3, **options}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    undisturbed = _run(server, whole, **options)
    undisturbed.join(300)
    assert undisturbed.exitcode == 0
    draw = random.Random(kills)
    done = 0
    for attempt in range(10 * kills):
        if done == kills:
            break
        process, before = _run(server, broken, **options), _steps(broken)
        wanted = before + draw.randint(1, 2 * steps // kills)
        give_up = time.monotonic() + 120
        while _steps(broken) < wanted and process.is_alive() and time.monotonic() < give_up:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.02))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        if process.exitcode == 0:  # it was too late; the run is complete
            break
        assert process.exitcode == -signal.SIGKILL, attempt
        done += 1
    assert done >= 0.8 * kills, "the run was over too soon"
    last = _run(server, broken, **options)
    last.join(300)
    assert last.exitcode == 0
    expected = torch.load(whole / "weights")
    got = torch.load(broken / "weights")
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    losses = dict(_ledger(whole))
    assert sorted(losses) == list(range(1, steps + 1))
    again = _ledger(broken)
    assert {step for step, _ in again} == set(losses)
    assert all(losses[step] == loss for step, loss in again), "every loss of every attempt, in every digit"
    assert list(broken.glob("checkpoints/.*")) == []


def test_a_few_kills(server: ForkServerContext, store: str, tmp_path: Path) -> None:
    killed_and_resumed(server, tmp_path, store, kills=4, steps=60, async_save=True, dropout=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("async_save", "dropout"), [(False, 0.0), (True, 0.0), (False, 0.1), (True, 0.1)])
def test_30_kills_over_300_steps(
    server: ForkServerContext, store: str, tmp_path: Path, async_save: bool, dropout: float
) -> None:
    killed_and_resumed(server, tmp_path, store, kills=30, steps=300, async_save=async_save, dropout=dropout)
