"""Asking a run that goes on for a trace: a file in its folder, or a signal to any of its processes."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from lit_llm.callbacks.trace_files import FOLDER
from lit_llm.training.signals import requeue_signals

SENTINEL = "capture"
_NUMBER: int | None = getattr(signal, "SIGUSR2", None)


class Request:
    """Notices that somebody asks for a trace: ``touch traces/capture`` in the run's folder, or SIGUSR2.

    The file is looked for by rank 0 and removed when the request is taken. The signal is listened to where nobody
    else does (its default would end the process), and only by the main thread. It is for a rank's process: sent to a
    whole process group it ends data workers that are not forked, and launchers such as torchrun.

    Args:
        trainer: of the run.
    """

    def __init__(self, trainer: Any) -> None:
        self.path = os.path.join(trainer.default_root_dir, FOLDER, SENTINEL)
        self._looks = trainer.is_global_zero
        if self._looks:
            with suppress(OSError):  # so that the file can be made before there is a trace
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._signalled = self._told = False
        self._connector = trainer._signal_connector
        self._handler: _Handler | None = None
        main = threading.current_thread() is threading.main_thread()
        if _NUMBER is None or not main or _NUMBER in requeue_signals(trainer):
            return
        there = signal.getsignal(_NUMBER)
        if there == signal.SIG_DFL or (isinstance(there, _Handler) and there.request is None):
            self._handler = _Handler(self)
            signal.signal(_NUMBER, self._handler)

    def is_new(self) -> bool:
        """Whether there is a request that was not yet told of; asks the file system once, on rank 0."""
        if self._signalled:
            self._signalled = False
        elif self._told or not self._looks or not os.path.exists(self.path):
            return False
        self._told = True
        return True

    def take(self) -> None:
        """Ends the request, of whatever rank."""
        self._told = False
        if self._looks:
            try:
                os.unlink(self.path)
            except FileNotFoundError:
                pass
            except OSError:  # it can't be removed: a second look would find it again
                self._looks = False

    def close(self) -> None:
        """Leaves the signal as it was. Can be called twice."""
        handler, self._handler = self._handler, None
        if handler is None or _NUMBER is None:
            return
        handler.request = None
        # Lightning found it there when training began, and after an exception would put it back later than this.
        before = self._connector._original_handlers
        if before.get(_NUMBER) is handler:
            before[_NUMBER] = signal.SIG_DFL
        if signal.getsignal(_NUMBER) is handler:
            with suppress(ValueError):  # of a thread: it does nothing then, and the next request takes its place
                signal.signal(_NUMBER, signal.SIG_DFL)


class _Handler:
    """Of the signal; a closed one has no request, and may be replaced."""

    def __init__(self, request: Request) -> None:
        self.request: Request | None = request

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.request is not None:
            self.request._signalled = True
