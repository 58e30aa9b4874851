"""The files of traces: ``traces/step-000100/rank-00003.json.gz`` in a run's folder."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lit_llm.callbacks import trace_cut

FOLDER = "traces"
RAW_PER_PACKED = 12
"""How much larger a trace is before it is packed, at least: the limit on the raw file in terms of the packed one."""
LEAST_FREE = 256 << 20
"""Bytes that must be free on the disk before a trace is written; how large it gets can't be told before."""
KEEP_FREE = 128 << 20
"""Bytes that stay free while one is packed: a checkpoint that finds no room loses more than a trace."""
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


def write_raw(export: Callable[[str], object], packed: Path, run: str) -> Path:
    """Has the profiler write its JSON beside the file that is to be made of it.

    Args:
        export: writes it to a path.
        packed: the trace's file.
        run: what tells this run from another one that writes into the same folder.

    Returns:
        The JSON's file.

    Raises:
        OSError: it was not written whole; nothing of it is left then, so that a full disk gets no fuller.
    """
    raw = packed.with_name(f".{packed.name.removesuffix('.gz')}.{run}.partial")
    try:
        export(str(raw))
        if not is_whole(raw):
            raise OSError("the profiler could not write it; is the disk full?")
        _check_room(packed.parent)
    except BaseException:
        remove_raw(raw)
        raise
    return raw


def remove_raw(raw: Path) -> None:
    """Removes the profiler's JSON, also the one that it had not finished."""
    for path in (raw, raw.with_name(f"{raw.name}.tmp")):
        with suppress(OSError):
            path.unlink()


def _check_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < KEEP_FREE:
        raise OSError(f"only {free >> 20} MiB are free in {folder} (it leaves {KEEP_FREE >> 20} for checkpoints)")


class Packing(threading.Thread):
    """Packs a trace that the profiler has written, and gives it its name at the end.

    Where another run has made that file meanwhile, it goes into the next free window's folder, ``step-000100-2``.

    Args:
        raw: the JSON, of :func:`write_raw`; removed at the end.
        packed: the file to make; where it has become another one, ``packed`` is that.
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
        partial = self.raw.with_suffix(".gz.partial")
        try:
            limit = int(RAW_PER_PACKED * self.max_bytes)
            if self.raw.stat().st_size > limit:
                self._cut(limit)
            with (
                self.raw.open("rb") as source,
                partial.open("wb") as target,
                gzip.GzipFile("", "wb", _LEVEL, target, mtime=0) as stream,
            ):
                while chunk := source.read(_CHUNK):
                    _check_room(partial.parent)
                    stream.write(chunk)
            self._give_name(partial)
        except Exception as error:
            self.problem = f"no trace was written: {' '.join(str(error).split())}"
            with suppress(OSError):
                partial.unlink()
            _log.warning("%s: %s", self.packed, self.problem)
        finally:
            remove_raw(self.raw)

    def _give_name(self, partial: Path) -> None:
        """Gives the packed file its name, never that of a file that is there."""
        wanted, number = self.packed, 1
        while not _rename_to_new(partial, self.packed):
            # Names are agreed on over the ranks: only a second run in the same folder can have made this one.
            number += 1
            folder = wanted.parent.with_name(f"{wanted.parent.name}-{number}")
            folder.mkdir(exist_ok=True)
            self.packed = folder / wanted.name
        if number > 1:
            self.problem = f"another run writes here too, so this trace is {self.packed}; give each run its own folder"
            _log.warning("%s: %s", wanted, self.problem)

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
            _log.warning("%s: %s", self.packed, self.problem)
            return
        with suppress(OSError):
            target.unlink()
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        self.problem = f"the trace is {size >> 20} MiB of JSON and could not be cut to fewer steps ({why})"
        _log.warning("%s: %s", self.packed, self.problem)


def is_whole(path: Path) -> bool:
    """Whether a JSON object ends here; the profiler doesn't tell of a disk that is full."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64))
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False


def _rename_to_new(path: Path, target: Path) -> bool:
    """Whether the target was not there and the file is it now; a rename alone would take another one's place."""
    try:
        os.link(path, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        try:
            target.touch(exist_ok=False)
        except FileExistsError:
            return False
        os.replace(path, target)
        return True
    path.unlink()
    return True


def _be_nice() -> None:
    """Gives this thread's turn to others; elsewhere than on Linux it can't be told from its process."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
