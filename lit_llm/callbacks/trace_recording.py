"""One window of steps on one rank: the profiler, from its warm-up to the file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, _KinetoProfile, supported_activities

from lit_llm.callbacks.memory_snapshot import MemorySnapshot
from lit_llm.callbacks.trace_files import Packing, file_name, is_whole, room_problem
from lit_llm.callbacks.trace_marks import StepMarks
from lit_llm.callbacks.trace_window import Window

_PAUSED = (ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU)  # torch warns of a part of them
_log = logging.getLogger("lit_llm")


class Recording:
    """Records a window.

    Args:
        trainer: of the run.
        window: which steps.
        folder: for the files.
        max_bytes: of the packed trace.
        done: called right after the last step.
        options: of the profiler: ``record_shapes``, ``with_stack``, ``profile_memory``.
        facts: what the trace says of the run, besides its steps.
        memory: of CUDA, if its history is kept as well.
    """

    def __init__(
        self,
        trainer: Any,
        window: Window,
        folder: Path,
        max_bytes: int,
        done: Callable[[], None],
        options: dict[str, bool],
        facts: dict[str, Any],
        memory: MemorySnapshot | None,
    ) -> None:
        self.folder, self._max_bytes = folder, max_bytes
        self._rank, self._facts, self._memory = trainer.global_rank, facts, memory
        self._device = trainer.strategy.root_device.type
        self._profiler = _profiler(self._device, options)
        self._marks = StepMarks(trainer, window.first, window.last, self._start, done, self._pause)
        self._runs = False
        self._failed = False

    @property
    def steps(self) -> list[int]:
        """That were begun."""
        return self._marks.steps

    def prepare(self) -> bool:
        """Makes the profiler ready and begins to listen; False, and a line, where another profiler runs."""
        if torch.autograd._profiler_enabled():
            _log.warning("%s is not recorded: another torch profiler runs", self.folder.name)
            return False
        try:
            self._profiler.prepare_trace()
        except RuntimeError as error:
            _log.warning("%s is not recorded: %s", self.folder.name, _line(error))
            return False
        self._marks.install()
        return True

    def _start(self) -> None:
        try:
            if torch.autograd._profiler_enabled():
                raise RuntimeError("another torch profiler runs")
            if self._memory is not None:
                self._memory.start()
            self._profiler.start_trace()
            self._runs = True
        except RuntimeError as error:
            self._failed = True
            _log.warning("%s is not recorded: %s", self.folder.name, _line(error))

    def _pause(self, paused: bool) -> None:
        """Leaves validations out, which may be longer than a trace should be, but for their mark."""
        if not self._runs:
            return
        with suppress(RuntimeError):  # then they are in
            self._profiler.toggle_collection_dynamic(not paused, _PAUSED)

    def stop(self, hurry: bool = False) -> Packing | None:
        """Ends it, writes what was recorded, and begins to pack it; None, with a line, where there is nothing.

        Args:
            hurry: whether somebody waits for the packing.
        """
        self._marks.remove()
        try:
            if not self._runs:
                if not self._failed:  # made ready: it must be taken back
                    self._profiler.start_trace()
                    self._profiler.stop_trace()
                return None
            self._runs = False
            note = {**self._facts, "first_step": self.steps[0] if self.steps else None, "steps": len(self.steps)}
            self._profiler.add_metadata_json("lit_llm", json.dumps(note))
            self._profiler.stop_trace()
            return self._write(hurry) if self.steps else None
        except Exception as error:
            _log.warning("%s/%s: no trace was written: %s", self.folder, file_name(self._rank), _line(error))
            return None
        finally:
            if self._memory is not None:
                self._memory.stop()

    def _write(self, hurry: bool) -> Packing | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        packed = self.folder / file_name(self._rank)
        if (problem := room_problem(self.folder)) is not None:
            _log.warning("%s: no trace was written: %s", packed, problem)
            return None
        if self._memory is not None:
            self._memory.dump(self.folder)
        raw = packed.with_name(f".{packed.stem}.partial")
        self._profiler.export_chrome_trace(str(raw))  # in a thread it would hold up the others just as long
        self._profiler.profiler = None  # its events take as much memory as the file
        if not is_whole(raw):
            raw.unlink(missing_ok=True)
            raise OSError("the profiler could not write it; is the disk full?")
        packing = Packing(raw, packed, self._max_bytes, hurry)
        packing.start()
        return packing


def _profiler(device: str, options: dict[str, Any]) -> _KinetoProfile:
    wanted = {ProfilerActivity.CPU}
    if device in ("cuda", "xpu"):
        wanted.add(ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.XPU)
    config = None
    with suppress(AttributeError, TypeError):  # of torch's private parts: without it host syncs have no cause
        config = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    return _KinetoProfile(activities=wanted & supported_activities(), experimental_config=config, **options)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
