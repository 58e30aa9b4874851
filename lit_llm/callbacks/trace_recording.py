"""One window of steps on one rank: the profiler, from its warm-up to the file."""

from __future__ import annotations

import functools
import json
import logging
import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity, _KinetoProfile, supported_activities

from lit_llm.callbacks.memory_snapshot import MemorySnapshot
from lit_llm.callbacks.trace_files import Packing, file_name, remove_raw, room_problem, write_raw
from lit_llm.callbacks.trace_marks import StepMarks
from lit_llm.callbacks.trace_window import Window
from lit_llm.training.boundary import quiet

_PAUSED = (ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU)  # torch warns of a part of them
_OTHER = "is not recorded: another torch profiler runs"
_MARK = b'"ProfilerStep#'
_log = logging.getLogger("lit_llm")


class Recording:
    """Records a window.

    Args:
        trainer: of the run.
        window: which steps.
        folder: for the files.
        max_bytes: of the packed trace.
        done: called right after the last step.
        give_way: called where another torch profiler is about to begin; it must stop this one.
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
        give_way: Callable[[], None],
        options: dict[str, bool],
        facts: dict[str, Any],
        memory: MemorySnapshot | None,
    ) -> None:
        self.folder, self._max_bytes = folder, max_bytes
        self._rank, self._facts, self._memory = trainer.global_rank, facts, memory
        self._trainer = trainer
        self._device = trainer.strategy.root_device.type
        self._profiler = _profiler(self._device, options)
        self._marks = StepMarks(trainer, window.first, window.last, self._start, done, self._pause)
        self._others = Others(lambda: self._give_way(give_way))
        self._runs = False
        self._failed = False

    @property
    def steps(self) -> list[int]:
        """That were begun."""
        return self._marks.steps

    def prepare(self) -> bool:
        """Makes the profiler ready and begins to listen; False, and a line, where another profiler runs."""
        if torch.autograd._profiler_enabled():
            _log.warning("%s %s", self.folder.name, _OTHER)
            return False
        try:
            self._profiler.prepare_trace()
        except RuntimeError as error:
            _log.warning("%s is not recorded: %s", self.folder.name, _line(error))
            return False
        self._marks.install()
        self._others.install(self._profiler.profiler)
        return True

    def _give_way(self, stop: Callable[[], None]) -> None:
        what = "ends early: another torch profiler begins" if self._runs else _OTHER
        _log.warning("%s %s", self.folder.name, what)
        stop()

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
        partial = self._marks.last_is_partial
        self._others.remove()
        self._marks.remove()
        try:
            if not self._runs:
                if not self._failed:  # made ready: it must be taken back
                    self._profiler.start_trace()
                    self._profiler.stop_trace()
                return None
            self._runs = False
            note = {**self._facts, "first_step": self.steps[0] if self.steps else None, "steps": len(self.steps)}
            if partial:
                note["last_step_is_partial"] = True
            self._profiler.add_metadata_json("lit_llm", json.dumps(note))
            with quiet(self._trainer):  # both hold the interpreter, for minutes where a trace is large
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
        # In a thread it would hold up the others just as long.
        raw = write_raw(self._profiler.export_chrome_trace, packed, self._facts["run"])
        self._profiler.profiler = None  # its events take as much memory as the file
        try:
            if _marked_steps(raw, self._marks.dropped) != set(self.steps):
                raise ValueError("its step marks are not those of its steps; does another torch profiler mark steps?")
        except Exception:
            remove_raw(raw)
            raise
        packing = Packing(raw, packed, self._max_bytes, hurry)
        try:
            packing.start()
        except RuntimeError:  # the interpreter is about to end and lets no thread begin
            packing.run()
        return packing


class Others:
    """Notices that another torch profiler is about to begin; two at a time make a process crash.

    Meanwhile their entries are stood in for. Where one has been prepared before ours was, and begins, it is prepared
    again, as ours has taken its place.

    Args:
        give_way: called before the other one begins; it must stop ours.
    """

    _ENTRIES = (
        (torch_profiler.profile, "_prepare_trace"),
        (torch_profiler.profile, "_start_trace"),
        (torch_profiler.emit_nvtx, "__enter__"),
        (torch_profiler.emit_itt, "__enter__"),
    )

    def __init__(self, give_way: Callable[[], None]) -> None:
        self._give_way = give_way
        self._ours: Any = None
        self._thread = 0
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # class, method, what it was, what stands in for it

    def install(self, ours: Any) -> None:
        """Begins; ``ours`` is let through."""
        self._ours, self._thread = ours, threading.get_ident()
        for owner, name in self._ENTRIES:
            if (before := owner.__dict__.get(name)) is not None:
                instead = self._stand_in(name, before)
                self._replaced.append((owner, name, before, instead))
                setattr(owner, name, instead)

    def remove(self) -> None:
        """Leaves everything as it was."""
        self._ours = None
        for owner, name, before, instead in self._replaced:
            if owner.__dict__.get(name) is instead:  # else somebody else stands before it, and it lets all through
                setattr(owner, name, before)
        self._replaced.clear()

    def _stand_in(self, name: str, before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def begin(other: Any, *args: Any, **kwargs: Any) -> Any:
            if self._ours is not None and other is not self._ours and getattr(other, "enabled", True):
                if threading.get_ident() != self._thread:  # ours can't be stopped from there
                    raise RuntimeError("a torch profiler can't begin in another thread while TraceCapture records")
                self._give_way()
                if name == "_start_trace":
                    other._prepare_trace()
            return before(other, *args, **kwargs)

        return begin


def _marked_steps(raw: Path, dropped: list[str]) -> set[int]:
    """The numbers of the step marks in a trace, but for those to drop, which are given another name of that length."""
    found = set()
    with raw.open("r+b") as file, mmap.mmap(file.fileno(), 0) as text:
        at = text.find(_MARK)
        while at >= 0:
            end = text.find(b'"', at + len(_MARK))
            name = text[at + 1 : end]
            number = name.partition(b"#")[2]
            if name.decode(errors="replace") in dropped:
                text[at + 1 : end] = name.replace(b"ProfilerStep", b"SkippedFetch")
            elif number.isdigit():
                found.add(int(number))
            at = text.find(_MARK, end)
    return found


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
