"""Runs a function on many files in processes of their own, in order, one file at a time in each.

Plain subprocesses that are told names over a pipe: a pool of multiprocessing would fork threads of torch, or import the
caller's script again.
"""

from __future__ import annotations

import importlib
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lit_llm.errors import UserError

_SMALL = 24 * 2**20
"""Bytes of all files below which starting processes takes longer than it saves."""


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_on_files(
    function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], processes: int | None = None
) -> list[Any]:
    """``function(*job)`` for each job, whose first entry is a file; what it returns or the UserError that it raised.

    Args:
        function: of a module's top level; arguments and results can be pickled.
        jobs: its arguments.
        processes: at most so many; None: one for each CPU, none for small files.
    """
    size = sum(
        os.path.getsize(job[0]) * (8 if str(job[0]).endswith(".gz") else 1) for job in jobs if os.path.exists(job[0])
    )
    wanted = processes if processes is not None else (1 if size < _SMALL else cores())
    wanted = min(wanted, len(jobs))
    if wanted <= 1:
        return [_call(function, job) for job in jobs]
    results: list[Any] = [None] * len(jobs)
    order = iter(range(len(jobs)))
    lock = threading.Lock()
    failures: list[BaseException] = []

    def serve() -> None:
        # -c instead of -m, which would import the package's module twice
        command = [sys.executable, "-c", "from lit_llm.trace.workers import _serve; _serve()"]
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
                try:
                    while not failures:
                        with lock:
                            place = next(order, None)
                        if place is None:
                            break
                        results[place] = _ask(process, function, jobs[place])
                finally:
                    assert process.stdin is not None
                    process.stdin.close()
                    if failures:
                        process.kill()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(wanted)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C: the processes end as their pipe closes
        failures.append(error)
        raise
    if failures:
        raise failures[0]
    return results


def _call(function: Callable[..., Any], job: tuple[Any, ...]) -> Any:
    try:
        return function(*job)
    except (UserError, MemoryError) as error:
        return UserError(str(error) or f"{job[0]} does not fit into memory")


def _ask(process: subprocess.Popen[bytes], function: Callable[..., Any], job: tuple[Any, ...]) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _send(process.stdin, (function.__module__, function.__qualname__, job))
        result = _receive(process.stdout)
    except (BrokenPipeError, EOFError):
        raise UserError(
            f"the process that read {job[0]} has died, perhaps for want of memory; try --processes 1"
        ) from None
    if isinstance(result, Exception) and not isinstance(result, UserError):
        raise result
    return result


def _send(stream: Any, what: Any) -> None:
    data = pickle.dumps(what, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(struct.pack("<q", len(data)))
    stream.write(data)
    stream.flush()


def _receive(stream: Any) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<q", head)[0]))


def _serve() -> None:
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anybody prints must not get between the results
    while True:
        try:
            module, name, job = _receive(source)
        except (EOFError, KeyboardInterrupt):
            return
        try:
            result = _call(getattr(importlib.import_module(module), name), job)
            _send(target, result)
        except KeyboardInterrupt:
            return
        except Exception as error:
            _send(target, RuntimeError(f"{job[0]}: {type(error).__name__}: {error}"))
