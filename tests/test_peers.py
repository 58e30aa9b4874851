"""A rank that dies, stops, fails or hangs: the others end in time and name it; real processes, joined by gloo."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist

from lit_llm.errors import RunStopped, UserError
from lit_llm.training.beats import Beat
from lit_llm.training.peers import PeerWatch, _Run
from tests.distributed import _free_port
from tests.elastic_peers import rank_main

TIMEOUT = 3.0  # where silence is what tells; long enough for a busy machine elsewhere


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Forks processes that have imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.elastic_peers"])
    return context


def ranks(
    server: ForkServerContext,
    folder: Path,
    world: int,
    what: str,
    who: int = -1,
    then: Callable[[list[BaseProcess]], None] | None = None,
    timeout: float = 20.0,
) -> tuple[list[int | None], list[str]]:
    """Exit codes, and what each rank said."""
    port = _free_port()
    processes = [
        server.Process(target=rank_main, args=(rank, world, port, str(folder), what, who, timeout))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + 60
    paths = [folder / f"at-{rank}" for rank in range(world)]
    try:
        while not all(path.exists() and int(path.read_text()) >= 15 for path in paths):
            assert time.monotonic() < end, "the ranks did not begin"
            time.sleep(0.01)
        if then is not None:
            then(processes)
        for rank, process in enumerate(processes):
            if not (what == "paused" and rank == who):
                process.join(30)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return codes, [(folder / f"err-{rank}").read_text() for rank in range(world)]


def kill(*numbers: int, by: int = signal.SIGKILL) -> Callable[[list[BaseProcess]], None]:
    def then(processes: list[BaseProcess]) -> None:
        for number in numbers:
            assert processes[number].pid is not None
            os.kill(processes[number].pid, by)

    return then


def told(text: str) -> list[str]:
    return re.findall(r"lit-llm: error: (.*)", text)


@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_rank_is_named_by_all_others(server: ForkServerContext, tmp_path: Path, who: int) -> None:
    codes, said = ranks(server, tmp_path, 3, "killed", who, kill(who))
    assert codes == [-signal.SIGKILL if rank == who else 1 for rank in range(3)]
    step = r"at step (\d+); the same command with --ckpt_path last goes on"
    for rank in {0, 1, 2} - {who}:
        (line,) = told(said[rank])
        found = re.match(rf"RunStopped rank {who} \(host \S+, process \d+\) has died {step}", line)
        assert found is not None, said
        assert abs(int(found[1]) - int((tmp_path / f"at-{who}").read_text())) <= 1
        assert said[rank].count("\n") == 1, said[rank]


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_paused_rank_is_gone_after_the_timeout(server: ForkServerContext, tmp_path: Path, who: int) -> None:
    codes, said = ranks(server, tmp_path, 2, "paused", who, kill(who, by=signal.SIGSTOP), TIMEOUT)
    assert codes[1 - who] == 1, "its main thread hangs in a collective"
    (line,) = told(said[1 - who])
    assert re.match(rf"rank {who} \(host \S+, process \d+\) has not been heard of for 3 s", line)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_raises_is_quoted(server: ForkServerContext, tmp_path: Path, who: int) -> None:
    codes, said = ranks(server, tmp_path, 3, "raises", who)
    assert codes == [1, 1, 1]
    assert told(said[who]) == ["ValueError a bad"], "its own error is left alone"
    for rank in {0, 1, 2} - {who}:
        (line,) = told(said[rank])
        assert re.match(rf"RunStopped rank {who} \(host \S+, process \d+\) failed: ValueError: a bad sample; ", line)


@pytest.mark.slow
def test_a_rank_that_hangs_is_not_dead_and_named_when_the_exchange_times_out(
    server: ForkServerContext, tmp_path: Path
) -> None:
    codes, said = ranks(server, tmp_path, 2, "hangs", 1, lambda processes: processes[0].join(30), TIMEOUT)
    assert codes[0] == 1
    (line,) = told(said[0])
    assert re.match(
        r"RunStopped rank 1 \(host \S+, process \d+\) lives but is behind, at step 15, .*[Tt]imed? ?out", line
    )


def test_a_run_that_stops_on_all_ranks_blames_nobody(server: ForkServerContext, tmp_path: Path) -> None:
    codes, said = ranks(server, tmp_path, 2, "stops")
    assert codes == [1, 1]
    assert [told(text) for text in said] == [["RunStopped the loss is no longer finite"]] * 2


def test_the_end_is_silent_although_rank_0_goes_first(server: ForkServerContext, tmp_path: Path) -> None:
    codes, said = ranks(server, tmp_path, 3, "ends")
    assert codes == [0, 0, 0]
    assert said == ["", "", ""]
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(3))


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_says_so_may_be_silent_for_longer(server: ForkServerContext, tmp_path: Path, who: int) -> None:
    codes, said = ranks(server, tmp_path, 2, "quiet", who, timeout=1.0)
    assert (codes, said) == ([0, 0], ["", ""])
    assert (tmp_path / f"quiet-{who}").exists()


@pytest.mark.slow
def test_a_rank_that_does_not_say_so_may_not(server: ForkServerContext, tmp_path: Path) -> None:
    codes, said = ranks(server, tmp_path, 2, "quiet unsaid", 1, timeout=1.0)
    assert codes[0] == 1
    (line,) = told(said[0])
    assert re.match(r"rank 1 \(host \S+, process \d+\) has not been heard of for 1 s", line)


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_that_dies_while_it_is_silent_is_named(server: ForkServerContext, tmp_path: Path, who: int) -> None:
    codes, said = ranks(server, tmp_path, 2, "quiet, then dead", who, timeout=3.0)
    assert codes == [-signal.SIGKILL if rank == who else 1 for rank in range(2)]
    (line,) = told(said[1 - who])
    assert re.match(rf"RunStopped rank {who} \(host \S+, process \d+\) has died at step", line)


class Rank(_Run):
    """One of three that judges and does not talk; nobody beats."""

    def __init__(self, rank: int, silence: float, pid: int, machine: str) -> None:
        self.rank, self.way_out, self.timeout, self.period = rank, "go on", 60.0, 1.0
        self.mine = Beat.of_this_process(rank)
        other = Beat(1 - rank, count=5, host="a", pid=pid, machine=machine or self.mine.machine, silence=silence)
        self.others, self.line, self.final, self.rounds = [other], None, False, 9
        self.broken_at = self.alarm_at = None
        self.answered_at, self.dead_at, self.step = other.heard, {}, lambda: 7
        self._wake = threading.Event()

    def after(self, seconds: float) -> str | None:
        heard = self.others[0].heard
        self.answered_at = heard + seconds  # the store, which needs no interpreter, goes on
        self._decide(heard + seconds)
        return self.line


DEAD = 2**22 + 1  # above the largest process id


@pytest.mark.parametrize("rank", [0, 1])
def test_how_long_a_silent_rank_is_waited_for(rank: int) -> None:
    plain = Rank(rank, 0.0, os.getpid(), "")
    assert plain.after(59) is None
    assert plain.after(61) is not None
    writing = Rank(rank, 600.0, os.getpid(), "")
    assert writing.after(599) is None
    assert "not been heard of" in (writing.after(601) or "")
    elsewhere = Rank(rank, 600.0, DEAD, "another machine")
    assert elsewhere.after(599) is None
    assert elsewhere.after(601) is not None
    dead = Rank(rank, 600.0, DEAD, "")
    assert dead.after(59) is None
    assert dead.after(61) is not None


def test_a_connection_that_breaks_while_a_rank_is_silent() -> None:
    """Another machine's rank may have died, or another one's connection may have broken; it is not called alive."""
    run = Rank(0, 600.0, DEAD, "another machine")
    run.others[0].heard -= 10
    run.mine.state, run.mine.text = "lost", "connection closed"
    assert run.after(10) is None
    assert re.match(
        r"rank 1 \(host a, process \d+\) has said nothing since it began to write at step 0, .*closed",
        run.after(17) or "",
    )


@pytest.mark.slow
def test_all_ranks_paused_together_go_on(server: ForkServerContext, tmp_path: Path) -> None:
    def then(processes: list[BaseProcess]) -> None:
        kill(0, 1, by=signal.SIGSTOP)(processes)
        time.sleep(TIMEOUT + 2)
        before = int((tmp_path / "at-0").read_text())
        kill(0, by=signal.SIGCONT)(processes)
        time.sleep(1)  # it must not hold the other's silence, as long as its own, against it
        kill(1, by=signal.SIGCONT)(processes)
        time.sleep(TIMEOUT * 0.9)
        assert int((tmp_path / "at-0").read_text()) > before + 10
        kill(0, 1)(processes)

    codes, said = ranks(server, tmp_path, 2, "paused together", -1, then, TIMEOUT)
    assert codes == [-signal.SIGKILL] * 2
    assert said == ["", ""]


def test_nothing_to_watch() -> None:
    watch = PeerWatch()
    watch.start(lambda: 0)
    with watch.quiet():
        assert watch._run is None
    error = RuntimeError("Connection closed by peer")
    assert watch.explain(error) is None
    watch.attach_to(error)
    assert error.__cause__ is None
    watch.stop()
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        watch.start(lambda: 0)
        assert watch._run is None
    finally:
        dist.destroy_process_group()
    with pytest.raises(UserError, match="timeout of PeerWatch is 0; give seconds above 0"):
        PeerWatch(0)
    assert issubclass(RunStopped, RuntimeError)
