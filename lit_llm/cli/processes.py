"""The processes of one machine under ddp: one error line, one exit code, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Any, NoReturn

from lit_llm.errors import RunStopped
from lit_llm.training.peers import AGAIN, WAY_OUT, quiet_lightnings_observer
from lit_llm.training.signals import name_of

USER_MISTAKE = 2  # the exit code
_POLL_S = 0.2
_LAST_WORDS_S = 6.0  # more than the time for which a child keeps its error to itself
_OWN_WORDS_S = 15.0  # for a process that has lost another to find out which, and to end by itself
_PARENT = "LIT_LLM_PARENT"  # the process that has started this one for another rank


def is_first_process() -> bool:
    """Whether this is the process that speaks to the user."""
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in names)


class Children:
    """Watches the processes that Lightning starts for the other ranks, while a command runs.

    If one of them fails, it has told why: the others are ended and this process exits with its code. If one is killed
    by a signal, it could tell nothing: this process names it and ends with code 1. (Lightning would kill this one too,
    which then can't speak.) If this one fails, the others are ended before its error is printed, so that what they have
    to say of the lost connection does not come last. If this one is killed, the others end by themselves.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._parent: int | None = None
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="children")

    def __enter__(self) -> Children:
        if os.environ.get("LOCAL_RANK", "0") != "0" and _PARENT in os.environ:
            self._parent = int(os.environ[_PARENT])
        elif hasattr(self._trainer.strategy.launcher, "procs"):
            os.environ[_PARENT] = str(os.getpid())  # for those that Lightning is about to start
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._watcher.join()
        if self._parent is None:
            os.environ.pop(_PARENT, None)
        if error is None:
            return
        mistaken = "onnection" in str(error) and self._a_child_told_a_mistake()
        killed = self._killed() if "onnection" in str(error) and error.__cause__ is None else None
        self._end()
        if mistaken:  # what this process met is only the lost connection
            raise SystemExit(USER_MISTAKE) from None
        if killed is not None:
            raise RunStopped(killed) from error

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        started = getattr(self._trainer.strategy.launcher, "procs", [])
        return [process for process in started if isinstance(process, subprocess.Popen)]

    def _a_child_told_a_mistake(self) -> bool:
        give_up = time.monotonic() + _LAST_WORDS_S
        while processes := self._processes():
            codes = [process.poll() for process in processes]
            if USER_MISTAKE in codes:
                return True
            if None not in codes or any(code < 0 for code in codes if code) or time.monotonic() > give_up:
                return False
            time.sleep(_POLL_S / 4)
        return False

    @property
    def _way_out(self) -> str:
        return WAY_OUT if self._trainer.state.fn == "fit" else AGAIN

    def _killed(self) -> str | None:
        """The line of the children that a signal has ended."""
        processes = self._processes()
        first = int(os.environ.get("NODE_RANK", "0")) * (len(processes) + 1)
        told = [
            f"rank {first + local} (process {process.pid}) was killed by {name_of(-process.returncode)}"
            for local, process in enumerate(processes, start=1)
            if (process.poll() or 0) < 0
        ]
        return f"{', '.join(told)}; {self._way_out}" if told else None

    def _watch(self) -> None:
        killed_at: float | None = None
        while not self._done.wait(_POLL_S):
            if self._parent is not None and os.getppid() != self._parent:
                self._outlive(f"the first process of this run (process {self._parent}) is gone; {self._way_out}")
            processes = self._processes()
            if processes:
                quiet_lightnings_observer(processes)
            codes = [process.poll() for process in processes]
            if (failed := [code for code in codes if code is not None and code > 0]) and killed_at is None:
                self._leave(failed[0])
            if killed_at is None and any(code < 0 for code in codes if code):
                killed_at = time.monotonic()
            if killed_at is not None and time.monotonic() > killed_at + _OWN_WORDS_S:
                self._say(str(self._killed()))
                self._leave(1)

    def _outlive(self, line: str) -> None:
        """Ends this process, unless it does so by itself in time: it may say more of why."""
        if not self._done.wait(_OWN_WORDS_S):
            self._say(line)
            self._leave(1)

    def _say(self, line: str) -> None:
        sys.stdout.flush()
        print(f"lit-llm: error: {line}", file=sys.stderr, flush=True)

    def _leave(self, code: int) -> NoReturn:
        self._end()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _end(self) -> None:
        for process in self._processes():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
