"""The processes of one machine under ddp: one error line, one exit code, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Any

USER_MISTAKE = 2  # the exit code
_POLL_S = 0.2
_LAST_WORDS_S = 6.0  # more than the time for which a child keeps its error to itself


def is_first_process() -> bool:
    """Whether this is the process that speaks to the user."""
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("NODE_RANK", "0") == "0"


class Children:
    """Watches the processes that Lightning starts for the other ranks, while a command runs.

    If one of them fails, it has told why: the others are ended and this process exits with its code, where Lightning
    would kill this one too. If this one fails, the others are ended before its error is printed, so that what they have
    to say of the lost connection does not come last.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="children")

    def __enter__(self) -> Children:
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._watcher.join()
        if error is None:
            return
        mistaken = "onnection" in str(error) and self._a_child_told_a_mistake()
        self._end()
        if mistaken:  # what this process met is only the lost connection
            raise SystemExit(USER_MISTAKE) from None

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        started = getattr(self._trainer.strategy.launcher, "procs", [])
        return [process for process in started if isinstance(process, subprocess.Popen)]

    def _a_child_told_a_mistake(self) -> bool:
        give_up = time.monotonic() + _LAST_WORDS_S
        while processes := self._processes():
            codes = [process.poll() for process in processes]
            if USER_MISTAKE in codes:
                return True
            if None not in codes or time.monotonic() > give_up:
                return False
            time.sleep(_POLL_S / 4)
        return False

    def _watch(self) -> None:
        while not self._done.wait(_POLL_S):
            codes = [process.poll() for process in self._processes()]
            failed = [code for code in codes if code]
            # Negative: by a signal that somebody else sent. Lightning's own watch deals with that.
            if failed and failed[0] > 0:
                self._end()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(failed[0])

    def _end(self) -> None:
        for process in self._processes():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
