"""Runs a function in several real processes joined by gloo, with a time limit, and cleans up when they hang."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@functools.cache
def _zygote() -> subprocess.Popen[bytes]:
    """The process that forks the ranks of this session, see :mod:`tests.zygote`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "tests.zygote"], env=environment, cwd=ROOT, stdin=subprocess.PIPE)
    assert process.stdin is not None
    atexit.register(process.stdin.close)
    return process


class _Rank:
    """A forked process."""

    def __init__(self, folder: str, rank: int, **job: Any) -> None:
        self.log = Path(folder, f"log-{rank}")
        self._rc, self._pid = Path(folder, f"rc-{rank}"), Path(folder, f"pid-{rank}")
        files = {"log": self.log, "rc": self._rc, "pid": self._pid, "out": Path(folder, f"out-{rank}")}
        stdin = _zygote().stdin
        assert stdin is not None
        stdin.write((json.dumps({**job, **{name: str(path) for name, path in files.items()}}) + "\n").encode())
        stdin.flush()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return int(self._rc.read_text()) if self._rc.exists() else None

    def kill(self) -> None:
        """Ends it, and what it has started."""
        while self.poll() is None and _zygote().poll() is None:
            if self._pid.exists() and (pid := self._pid.read_text()):
                with contextlib.suppress(ProcessLookupError):  # not yet a group of its own, or gone
                    os.killpg(int(pid), signal.SIGKILL)
            time.sleep(0.02)


def run_ranks(target: str, world_size: int, *, timeout: float = 120, **kwargs: Any) -> list[Any]:
    """Calls ``module:function(**kwargs)`` on every rank and gives what each returned (JSON types).

    The processes see what torchrun would set, so Lightning takes them as they are. All are killed when one fails or
    the time is up.
    """
    with tempfile.TemporaryDirectory() as folder:
        port, processes = _free_port(), []
        for rank in range(world_size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
            processes.append(_Rank(folder, rank, target=target, kwargs=kwargs, env=environment))
        end = time.monotonic() + timeout
        try:
            while any(p.poll() is None for p in processes):
                if any(p.poll() not in (None, 0) for p in processes) or time.monotonic() > end:
                    break
                assert _zygote().poll() is None, "the process that forks the ranks has ended"
                time.sleep(0.02)
        finally:
            for p in processes:
                p.kill()
        codes = [p.poll() for p in processes]
        if any(codes):
            text = "\n".join(
                f"--- rank {rank} ({code})\n{process.log.read_text()[-4000:]}"
                for rank, (process, code) in enumerate(zip(processes, codes, strict=True))
            )
            raise AssertionError(f"{target} failed or ran past {timeout} s:\n{text}")
        return [json.loads(Path(folder, f"out-{rank}").read_text()) for rank in range(world_size)]
