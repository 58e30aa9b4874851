"""The windows of one fit: opened and closed at the same steps on every rank."""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_llm.callbacks.memory_snapshot import MemorySnapshot
from lit_llm.callbacks.trace_files import FOLDER, Packing, claim, file_name, is_being_written, window_names
from lit_llm.callbacks.trace_recording import Recording
from lit_llm.callbacks.trace_report import Reading, figures, lines
from lit_llm.callbacks.trace_request import Request
from lit_llm.callbacks.trace_window import Plan, Ranks, Schedule, Window
from lit_llm.errors import RunStopped
from lit_llm.training.boundary import StepBoundary

_WRITING_S = 20.0  # wait for the other ranks of this machine to write, at the most
_TOGETHER_S, _APART_S = 5.0, 1.0  # wait for them to begin with it


@dataclass(frozen=True)
class Settings:
    """How windows are taken; see :class:`lit_llm.callbacks.TraceCapture`."""

    schedule: Schedule
    ranks: Ranks
    options: dict[str, bool]
    """Of the profiler."""
    max_windows: int
    max_bytes: int
    """Of a packed trace."""
    analyze: bool
    memory_snapshot: bool


class CaptureRun:
    """One fit of this rank. All ranks open and close the same windows, those that don't record as well.

    Args:
        settings: how windows are taken.
        trainer: that has begun to train.
        request: what notices that somebody asks for a window, if it may be asked.
    """

    def __init__(self, settings: Settings, trainer: Any, request: Request | None) -> None:
        self.settings, self.trainer, self.request = settings, trainer, request
        self.step: int = trainer.global_step
        mine = (window_names(trainer.default_root_dir), secrets.token_hex(8)) if trainer.is_global_zero else None
        names, self.run = trainer.strategy.broadcast(mine)
        self.taken = set(names)
        self.ranks = settings.ranks.among(trainer.world_size)
        self.begin = self.step
        self.plan = Plan(settings.schedule, self.begin, settings.max_windows, rank_zero_info)
        self.latest: list[tuple[Window, Path]] = []  # the two latest windows and their folders
        self.recording: Recording | None = None
        self.waiting: Recording | None = None  # its window has opened, and the last one's last step not quite ended
        self.packings: list[Packing] = []
        self.readings: list[Reading] = []
        self.memory: MemorySnapshot | None = None
        if settings.memory_snapshot and trainer.strategy.root_device.type == "cuda":
            self.memory = MemorySnapshot(trainer.global_rank, Path(trainer.default_root_dir, FOLDER))
        self.boundary = next((one for one in trainer.callbacks if isinstance(one, StepBoundary)), None)
        if self.boundary is not None and request is not None:
            self.boundary.listeners.append(lambda _: self.take_request())

    # Between two steps

    def between_steps(self) -> None:
        """In the hook of a callback at the end of a step."""
        self.step = self.trainer.global_step
        if self.request is not None and self.request.is_new():
            self._pass_on_request()
        if self.readings:
            self._tell()
        self.turn()

    def turn(self) -> None:
        """Closes and opens the windows whose turn it is."""
        if (window := self.plan.turn(self.trainer.global_step)) is not None:
            self._open(window)

    def _open(self, window: Window) -> None:
        folder = Path(self.trainer.default_root_dir, FOLDER, claim(self.taken, window.first))
        self.latest = [*self.latest[-1:], (window, folder)]
        if self.trainer.global_rank not in self.ranks:
            return
        recording = Recording(
            self.trainer,
            window,
            folder,
            self.settings.max_bytes,
            self._recorded,
            self._stop,
            self.settings.options,
            self._facts(),
            self.memory,
        )
        if self.recording is None:
            self._prepare(recording)
        else:
            self.waiting = recording

    def _prepare(self, recording: Recording) -> None:
        if recording.prepare():
            self.recording = recording

    def _facts(self) -> dict[str, Any]:
        from lit_llm import __version__

        trainer = self.trainer
        return {
            "version": __version__,
            "run": self.run,
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "host": socket.gethostname(),
            "strategy": type(trainer.strategy).__name__,
            "micro_batches": trainer.accumulate_grad_batches,
        }

    def _recorded(self) -> None:
        """At the very end of a window's last step; by its steps, the window is closed since its callbacks' hook."""
        self._stop()
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            self._prepare(waiting)

    def _stop(self, at_end: bool = False, failed: bool = False) -> None:
        recording, self.recording = self.recording, None
        if recording is None:
            return
        packing = recording.stop(hurry=at_end)
        if packing is None:
            return
        self.packings = [one for one in self.packings if one.is_alive()] + [packing]
        steps = recording.steps
        rank_zero_info(f"trace: steps {steps[0]} to {steps[-1]} go to {recording.folder}")
        if self.settings.analyze and self.trainer.is_global_zero and not failed:
            before = self.readings[-1] if self.readings else None
            self.readings.append(Reading(recording.folder, self.ranks, packing, steps, before))
            self.readings[-1].start()

    # Requests

    def _pass_on_request(self) -> None:
        if self.boundary is not None:
            self.boundary.wish = True
        elif self.trainer.world_size == 1:
            self.take_request()
        else:
            assert self.request is not None
            self.request.take()
            rank_zero_warn(
                f"a trace was asked for, but the ranks of a {type(self.trainer.lightning_module).__name__} have no "
                "way to agree on a step; only a LitLLM has. Give trace_capture.start or every_n_steps"
            )

    def take_request(self) -> None:
        """All ranks have heard of a request, at the same step."""
        assert self.request is not None
        self.request.take()
        self.turn()
        if (window := self.plan.ask(self.trainer.global_step)) is not None:
            self._open(window)

    # The end

    def end(self) -> None:
        """Training has ended."""
        open_window = self.plan.window
        self._stop(at_end=True)
        begun = open_window is not None and self.trainer.global_step > open_window.first
        if self.plan.closed or begun or self.settings.schedule.start is None:
            return
        first = open_window or next(self.settings.schedule.windows(self.begin))
        rank_zero_warn(
            f"TraceCapture has recorded nothing: the run ended before step {self.trainer.global_step}, and its first "
            f"window records from step {first.first} on; lower trace_capture.start, wait or warmup, or train longer"
        )

    def finish(self, seconds: float) -> None:
        """Waits for what goes on in the background; for the reading of traces that long at most."""
        self.waiting = None
        self._stop(at_end=True)
        for packing in self.packings:
            packing.join()
        if seconds and any(reading.is_alive() for reading in self.readings):
            rank_zero_info(f"trace: waiting up to {seconds:g} s for the traces to be read")
        end = time.monotonic() + seconds
        for reading in self.readings:
            reading.finish(max(0.0, end - time.monotonic()))
        self._tell()

    def fail(self, exception: BaseException) -> None:
        """The run ends by an exception, which must be told of and not another one."""
        try:
            self._stop(at_end=True, failed=True)
            if self.memory is not None:
                self.memory.on_exception(exception)
            self.finish(0.0)
            if self.trainer.local_rank == 0:
                self._wait_for_this_machine(isinstance(exception, SystemExit | KeyboardInterrupt | RunStopped))
        except Exception as error:
            rank_zero_warn(f"TraceCapture: {error}")

    def _wait_for_this_machine(self, together: bool) -> None:
        """The first process is about to end the others of its machine, which may still be writing.

        Args:
            together: whether all ranks end at this step.
        """
        trainer = self.trainer
        first = trainer.node_rank * trainer.num_devices
        ranks = [one for one in self.ranks if first <= one < first + trainer.num_devices]
        folders = [folder for window, folder in self.latest if window.first <= trainer.global_step]
        files = [folder / file_name(one) for folder in folders for one in ranks]
        now = time.monotonic()
        give_up, quiet = now + _WRITING_S, now + (_TOGETHER_S if together else _APART_S)
        while not all(file.exists() for file in files) and (now := time.monotonic()) < give_up:
            if now > quiet and not any(is_being_written(folder) for folder in folders):
                break
            time.sleep(0.05)

    def _tell(self) -> None:
        for reading in [one for one in self.readings if not one.is_alive()]:
            self.readings.remove(reading)
            if reading.report is None:
                how = f"lit-llm trace {reading.folder}"
                rank_zero_warn(f"the traces in {reading.folder} were not read ({reading.problem}); try `{how}`")
                continue
            try:
                self._show(reading.report, reading)
            except Exception as error:  # of a report that is other than expected, or of a logger
                rank_zero_warn(f"{reading.folder} was read, but can't be shown here: {type(error).__name__}: {error}")

    def _show(self, report: dict[str, Any], reading: Reading) -> None:
        for line in lines(report, reading.folder):
            rank_zero_info(line)
        values = {"trace/first_step": float(reading.steps[0]), **figures(report)}
        for logger in self.trainer.loggers:
            logger.log_metrics(values, step=self.trainer.fit_loop.epoch_loop._batches_that_stepped)
