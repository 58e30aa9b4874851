"""Runs a function in several real processes joined by gloo, with a time limit, and cleans up when they hang."""

from __future__ import annotations

import importlib
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


def run_ranks(target: str, world_size: int, *, timeout: float = 120, **kwargs: Any) -> list[Any]:
    """Calls ``module:function(**kwargs)`` on every rank and gives what each returned (JSON types).

    The processes see what torchrun would set, so Lightning takes them as they are. All are killed when one fails or
    the time is up.
    """
    with tempfile.TemporaryDirectory() as folder:
        port, processes, logs = _free_port(), [], []
        for rank in range(world_size):
            env = {
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
            logs.append(Path(folder, f"log-{rank}"))
            command = [sys.executable, "-m", "tests.distributed", target, json.dumps(kwargs), f"{folder}/out-{rank}"]
            with logs[-1].open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
        end = time.monotonic() + timeout
        try:
            while any(p.poll() is None for p in processes):
                failed = [rank for rank, p in enumerate(processes) if p.poll() not in (None, 0)]
                if failed or time.monotonic() > end:
                    break
                time.sleep(0.05)
        finally:
            for p in processes:
                if p.poll() is None:
                    os.killpg(p.pid, signal.SIGKILL)
                    p.wait()
        if any(p.returncode for p in processes):
            text = "\n".join(
                f"--- rank {r} ({p.returncode})\n{logs[r].read_text()[-4000:]}" for r, p in enumerate(processes)
            )
            raise AssertionError(f"{target} failed or ran past {timeout} s:\n{text}")
        return [json.loads(Path(folder, f"out-{rank}").read_text()) for rank in range(world_size)]


def _main() -> None:
    target, kwargs, out = sys.argv[1:4]
    module, function = target.split(":")
    result = getattr(importlib.import_module(module), function)(**json.loads(kwargs))
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    _main()
