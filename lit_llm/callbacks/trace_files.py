"""The files of traces: ``traces/step-000100/rank-00003.json.gz`` in a run's folder."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from lit_llm.callbacks import trace_cut

FOLDER = "traces"
RAW_PER_PACKED = 12
"""How much larger a trace is before it is packed, at least: the limit on the raw file in terms of the packed one."""
LEAST_FREE = 256 << 20
"""Bytes that must be free on the disk before a trace is written."""
_LEVEL = 3  # of packing: a third of the time of the default level, for a tenth more bytes
_CHUNK = 1 << 20
_log = logging.getLogger("lit_llm")


def window_names(root: str) -> list[str]:
    """The names of the windows that lie in a run's folder."""
    folder = Path(root, FOLDER)
    return sorted(path.name for path in folder.glob("step-*")) if folder.is_dir() else []


def claim(taken: set[str], step: int) -> str:
    """A name that is not taken, for a window that begins with ``step``; it is taken then."""
    name, number = f"step-{step:06d}", 1
    while name in taken:
        number += 1
        name = f"step-{step:06d}-{number}"
    taken.add(name)
    return name


def file_name(rank: int) -> str:
    """Of a rank's trace."""
    return f"rank-{rank:05d}.json.gz"


def is_being_written(folder: Path) -> bool:
    """Whether there is a trace that has not got its name yet."""
    return any(folder.glob(".rank-*"))


def room_problem(folder: Path) -> str | None:
    """Why a trace had better not be written here; None where it may."""
    free = shutil.disk_usage(folder).free
    if free >= LEAST_FREE:
        return None
    return f"only {free >> 20} MiB are free in {folder} (a trace wants {LEAST_FREE >> 20})"


class Packing(threading.Thread):
    """Packs a trace that the profiler has written, and gives it its name at the end.

    Args:
        raw: the JSON; removed at the end.
        packed: the file to make.
        max_bytes: of the packed file, roughly: from :data:`RAW_PER_PACKED` times as much JSON on, the last steps are
            left out (:mod:`lit_llm.callbacks.trace_cut`).
        hurry: whether somebody waits for it; else it leaves the processor to others.
    """

    def __init__(self, raw: Path, packed: Path, max_bytes: int, hurry: bool = False) -> None:
        super().__init__(name=f"pack-{packed.name}")
        self.raw, self.packed, self.max_bytes, self.hurry = raw, packed, max_bytes, hurry
        self.problem: str | None = None
        """Why there is no file, or not all of it, once it has ended."""

    def run(self) -> None:
        """Packs."""
        if not self.hurry:
            _be_nice()
        partial = self.packed.with_name(f".{self.packed.name}.partial")
        try:
            limit = int(RAW_PER_PACKED * self.max_bytes)
            if self.raw.stat().st_size > limit:
                self._cut(limit)
            with (
                self.raw.open("rb") as source,
                partial.open("wb") as target,
                gzip.GzipFile("", "wb", _LEVEL, target, mtime=0) as stream,
            ):
                shutil.copyfileobj(source, stream, _CHUNK)
            # Names are agreed on over the ranks: only a second run in the same folder could have made this one.
            if self.packed.exists():
                raise FileExistsError(f"{self.packed} is there already")
            os.replace(partial, self.packed)
            self.raw.unlink()
        except Exception as error:
            self.problem = f"no trace was written: {' '.join(str(error).split())}"
            for path in (partial, self.raw):
                with suppress(OSError):
                    path.unlink()
        if self.problem is not None:
            _log.warning("%s: %s", self.packed, self.problem)

    def _cut(self, limit: int) -> None:
        """In a process of its own, which the training's threads need not share an interpreter with."""
        size = self.raw.stat().st_size
        target = self.raw.with_name(f"{self.raw.name}.cut")
        command = [sys.executable, trace_cut.__file__, str(self.raw), str(target), str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and target.exists():
            os.replace(target, self.raw)
            self.problem = (
                f"the trace is {size >> 20} MiB of JSON and was cut to its first {done.stdout.strip()} steps; raise "
                "trace_capture.max_mb, or lower active"
            )
            return
        with suppress(OSError):
            target.unlink()
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        self.problem = f"the trace is {size >> 20} MiB of JSON and could not be cut to fewer steps ({why})"


def is_whole(path: Path) -> bool:
    """Whether a JSON object ends here; the profiler doesn't tell of a disk that is full."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64))
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False


def _be_nice() -> None:
    """Gives this thread's turn to others; elsewhere than on Linux it can't be told from its process."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
