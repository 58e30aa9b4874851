"""Jobs of several processes that lose some: one line names them, nobody is left, and torchrun goes on with the rest."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.distributed import ROOT, _free_port

MODEL = [
    "--model.config.hidden_size=32",
    "--model.config.intermediate_size=64",
    "--model.config.num_hidden_layers=2",
    "--model.config.num_attention_heads=4",
    "--model.optimizer.lr=0.01",
    "--model.schedule.total_steps=40",
]
RUN = [
    "--data.seq_len=16",
    "--data.global_batch_size=8",
    "--data.micro_batch_size=2",
    "--trainer.accelerator=cpu",
    "--trainer.limit_val_batches=0",
    "--trainer.log_every_n_steps=1",
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--checkpoint.every_n_train_steps=2",
    "--trainer.callbacks+=tests.elastic_worker.Ledger",
]
STEPS = 14
MARK = "LIT_TEST_JOB"
NAMED = r"rank {} \(host \S+, process \d+\) has died at step (\d+); the same command with --ckpt_path last goes on"
Host = tuple[str, ...]  # the words before a command that runs it there


def fit(store: str, folder: Path, pause: float, steps: int = STEPS, strategy: str = "ddp") -> list[str]:
    words = ["fit", f"--data.store={store}", f"--trainer.default_root_dir={folder}", "--ckpt_path=last"]
    words += [*MODEL, *RUN, f"--trainer.callbacks.pause={pause}", f"--trainer.max_steps={steps}"]
    return [*words, f"--trainer.strategy={strategy}"]


@contextmanager
def started(log: Path, *command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose whole family ends with the block, also those that are in sessions of their own."""
    log.parent.mkdir(parents=True, exist_ok=True)
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", MARK: f"{log}-{time.time_ns()}"}
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **own, **environment}, cwd=log.parent, stdout=out, stderr=out
        )
    process.mark = f"{MARK}={own[MARK]}".encode()  # type: ignore[attr-defined]
    try:
        yield process
    finally:
        while family := _family(process):
            for pid in family:
                _kill(pid)
            time.sleep(0.05)
        process.wait()


def _family(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes that live and have inherited this one's mark, itself the first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = process.mark in (folder / "environ").read_bytes().split(b"\0")  # type: ignore[attr-defined]
        except OSError:
            continue
        if marked:  # one that is dead has no environment
            found.append(int(folder.name))
    return sorted(found, key=lambda pid: pid != process.pid)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def lines(folder: Path, name: str) -> list[list[str]]:
    path = folder / name
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(
    condition: Callable[[], object], *processes: subprocess.Popen[bytes], log: Path, seconds: float = 90
) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, log.read_text()[-5000:]
        assert all(process.poll() is None for process in processes), log.read_text()[-5000:]
        time.sleep(0.02)


def steps_done(folder: Path) -> int:
    return max((int(line[0]) for line in lines(folder, "ledger")), default=0)


@pytest.fixture(scope="module")
def undisturbed(store: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The loss of each step of a run of one process."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    folder.mkdir()
    words = fit(store, folder, pause=0, strategy="auto")
    with started(folder / "log", sys.executable, "-m", "lit_llm", *words) as process:
        assert process.wait(120) == 0, (folder / "log").read_text()
    losses = {int(step): float(loss) for step, _, loss in lines(folder, "ledger")}
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses


# Processes that Lightning has started


@pytest.mark.parametrize("who", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_job_with_one_line(store: str, tmp_path: Path, who: int) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    words = [*fit(store, folder, pause=0.1, steps=1000), "--trainer.devices=2"]
    with started(log, sys.executable, "-m", "lit_llm", *words) as process:
        wait_for(lambda: steps_done(folder) >= 5, process, log=log)
        (killed,) = (int(line[2]) for line in lines(folder, "members") if int(line[0]) == who)
        os.kill(killed, signal.SIGKILL)
        assert process.wait(60) == (1 if who else -signal.SIGKILL), log.read_text()
        wait_for(lambda: not _family(process), log=log, seconds=60)
        said = re.findall(r"^lit-llm: error: (.*)$", log.read_text(), re.M)
        assert len(said) == 1, log.read_text()
        named = re.match(NAMED.format(who), said[0])
        assert named is not None, said
        assert abs(int(named[1]) - steps_done(folder)) <= 1
        assert "Traceback" not in log.read_text()


# Agents of torchrun


def agent(
    log: Path,
    words: list[str],
    port: int,
    first: bool,
    host: Host = (),
    address: str = "127.0.0.1",
    own: str = "",
    **environment: str,
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """One host's torchrun, with one process; the first one keeps the store of the rendezvous."""
    conf = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60,read_timeout=10"
    launch = ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc_per_node=1", "--max_restarts=5"]
    launch += ["--rdzv_backend=c10d", "--rdzv_id=job", f"--rdzv_endpoint={address}:{port}"]
    launch += [f"--rdzv_conf=is_host={int(first)},{conf}", "--monitor_interval=0.5"]
    launch += [f"--local_addr={own}"] if own else []
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environment}
    return started(log, *host, sys.executable, *launch, "-m", "lit_llm", *words, **environment)


def lose_an_agent(store: str, tmp_path: Path, seed: int, again: bool, strategy: str = "ddp") -> list[list[str]]:
    """Kills the second agent with its worker at some step, and may start it again; gives the ledger."""
    folder, port = tmp_path / "run", _free_port()
    logs = [tmp_path / "a" / "log", tmp_path / "b" / "log"]
    folder.mkdir()
    words = fit(store, folder, pause=0.15, strategy=strategy)
    draw = random.Random(seed)
    with ExitStack() as stack:
        first = stack.enter_context(agent(logs[0], words, port, first=True))
        second = stack.enter_context(agent(logs[1], words, port, first=False))
        wanted = draw.randint(3, 9)
        wait_for(lambda: steps_done(folder) >= wanted, first, second, log=logs[0])
        time.sleep(draw.uniform(0, 0.3))
        before = len(lines(folder, "members"))
        family = _family(second)
        assert len(family) >= 2
        for pid in family:
            _kill(pid)
        if again:
            stack.enter_context(agent(logs[1], words, port, first=False))
        wait_for(lambda: first.poll() is not None, log=logs[0])
        assert first.returncode == 0, logs[0].read_text()[-5000:]
        assert len(lines(folder, "members")) > before
    return lines(folder, "ledger")


def check(ledger: list[list[str]], undisturbed: dict[int, float], last_world: int) -> None:
    """All steps are there, those done twice too, with the losses of a run that nobody disturbed."""
    assert {int(step) for step, _, _ in ledger} == set(undisturbed)
    assert len(ledger) > len(undisturbed) or ledger[-1][1] != ledger[0][1]
    for step, _, loss in ledger:
        assert float(loss) == pytest.approx(undisturbed[int(step)], abs=1e-5)
    assert ledger[0][1] == "2"
    assert ledger[-1][1] == str(last_world)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_of_two_agents_is_lost_and_the_other_goes_on(
    store: str, tmp_path: Path, undisturbed: dict[int, float], strategy: str
) -> None:
    check(lose_an_agent(store, tmp_path, seed=1, again=False, strategy=strategy), undisturbed, last_world=1)
    told = (tmp_path / "a" / "log").read_text()
    assert re.search(r"lit-llm: error: rank \d \(host \S+, process \d+\) has died at step \d+; the same command", told)


@pytest.mark.slow
def test_a_lost_agent_that_comes_back_joins(store: str, tmp_path: Path, undisturbed: dict[int, float]) -> None:
    check(lose_an_agent(store, tmp_path, seed=2, again=True), undisturbed, last_world=2)


# Two machines: network namespaces, joined by a cable of their own


@contextmanager
def two_hosts(folder: Path) -> Iterator[list[Host]]:
    """host-a at 10.99.0.1 and host-b at 10.99.0.2, each with an eth0; they end with the block."""
    if not shutil.which("unshare") or not shutil.which("ip") or subprocess.run(["unshare", "-nu", "true"]).returncode:
        pytest.skip("network namespaces need root on Linux, unshare and ip")
    with ExitStack() as stack:
        hosts: list[Host] = []
        for name in ("host-a", "host-b"):
            command = f"hostname {name} && touch {folder}/{name} && exec sleep 1000"
            process = stack.enter_context(started(folder / f"{name}.log", "unshare", "-nu", "sh", "-c", command))
            wait_for((folder / name).exists, process, log=folder / f"{name}.log")
            hosts.append(("nsenter", "-t", str(process.pid), "-n", "-u"))
        run = [*hosts[0], "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", hosts[1][2]]
        subprocess.run(run, check=True)
        for number, host in enumerate(hosts, start=1):
            subprocess.run([*host, "ip", "addr", "add", f"10.99.0.{number}/24", "dev", "eth0"], check=True)
            for device in ("lo", "eth0"):
                subprocess.run([*host, "ip", "link", "set", device, "up"], check=True)
        yield hosts


@pytest.mark.slow
def test_a_machine_that_is_cut_off_is_named_and_the_other_goes_on(
    store: str, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    """No connection is closed: only silence says that the other machine is gone."""
    folder, logs = tmp_path / "run", [tmp_path / "a" / "log", tmp_path / "b" / "log"]
    folder.mkdir()
    words = [*fit(store, folder, pause=0.15), "--model.guard.peer_timeout=5"]
    with two_hosts(tmp_path) as hosts, ExitStack() as stack:
        agents = [
            stack.enter_context(
                agent(
                    logs[number],
                    words,
                    29400,
                    first=number == 0,
                    host=host,
                    address="10.99.0.1",
                    own=f"10.99.0.{number + 1}",
                    GLOO_SOCKET_IFNAME="eth0",
                )
            )
            for number, host in enumerate(hosts)
        ]
        wait_for(lambda: steps_done(folder) >= 5, *agents, log=logs[0], seconds=150)
        ranks = {int(line[0]): int(line[2]) for line in lines(folder, "members")}
        on_b = next(rank for rank, pid in ranks.items() if pid in _family(agents[1]))
        subprocess.run([*hosts[0], "ip", "link", "set", "eth0", "down"], check=True)
        wait_for(lambda: agents[0].poll() is not None, log=logs[0], seconds=150)
        assert agents[0].returncode == 0, logs[0].read_text()[-5000:]
    told = logs[0].read_text()
    name = rf"rank {on_b} \(host host-b, process {ranks[on_b]}\)"
    assert re.search(
        rf"lit-llm: error: {name} has not been heard of for 5 s \(dead, paused or cut off\) at step", told
    ), told
    check(lines(folder, "ledger"), undisturbed, last_world=1)
