"""Signals that end a run: noted at once, acted on at the end of a step, by all ranks at the same one."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment

_log = logging.getLogger("lit_llm")


class SignalFlag:
    """Notes SIGTERM, SIGUSR1 (under SLURM the signal that asks for a requeue), SIGHUP and SIGINT while a fit runs.

    The handler only sets a flag and says a line; handlers that were there before are called too. A SIGINT after
    another signal interrupts at once.
    """

    def __init__(self) -> None:
        self.number = 0
        """The signal that came first; 0: none."""

    def install(self, trainer: Any) -> None:
        """Takes the signals over, in the main thread; Lightning's connector puts back what was there before."""
        self.number = 0
        if threading.current_thread() is not threading.main_thread():
            return
        before = trainer._signal_connector._original_handlers
        numbers = {signal.SIGTERM, *requeue_signals(trainer)}
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as of a job in the background
            numbers.add(signal.SIGINT)
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # else nohup, or the user
            numbers.add(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, _Handler(self, before.get(number), trainer.global_rank))


class _Handler:
    def __init__(self, flag: SignalFlag, before: Any, rank: int) -> None:
        self.flag, self.before, self.rank = flag, before, rank

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.flag.number:
            raise KeyboardInterrupt
        if not self.flag.number:
            self.flag.number = number
            again = "; Ctrl-C ends at once" if number != signal.SIGINT else "; once more to end at once"
            line = (
                f"\n{name_of(number)} (rank {self.rank}): the step is finished, then the run saved and ended{again}\n"
            )
            with suppress(OSError, ValueError):  # a terminal that is gone must not keep the run from its end
                # print is not safe in a handler
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
        if callable(self.before) and self.before is not signal.default_int_handler:
            self.before(number, frame)


def name_of(number: int) -> str:
    """Such as SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def requeue_signals(trainer: Any) -> set[int]:
    """SIGUSR1, and under SLURM the signal that its environment was told to requeue at."""
    signals = {signal.SIGUSR1} if hasattr(signal, "SIGUSR1") else set()
    if (environment := _slurm(trainer)) is not None and environment.requeue_signal is not None:
        signals.add(environment.requeue_signal)
    return {int(number) for number in signals}


def requeue(trainer: Any, number: int) -> str | None:
    """Puts a SLURM job back into the queue where the signal asks for it; called by rank 0 after the save.

    Returns:
        What was done, for the user; None where there is nothing to do.
    """
    environment = _slurm(trainer)
    if environment is None or number not in requeue_signals(trainer):
        return None
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"[0-9_]+", job):
        return f"not requeued: no SLURM job id but {job!r}"
    command = shutil.which("scontrol")
    if command is None:
        return f"not requeued: there is no scontrol here; run `scontrol requeue {job}`"
    done = subprocess.run([command, "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"not requeued: `scontrol requeue {job}` failed: {' '.join(done.stderr.split()) or done.returncode}"
    return f"requeued as SLURM job {job}"


def _slurm(trainer: Any) -> SLURMEnvironment | None:
    environment = trainer._accelerator_connector.cluster_environment
    return environment if isinstance(environment, SLURMEnvironment) and environment.auto_requeue else None
