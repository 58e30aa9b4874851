"""What the CUDA memory of this process was used for, and by which lines of Python; torch draws the picture of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

_log = logging.getLogger("lit_llm")
_ENTRIES = 100_000  # allocations and frees that are kept, about 50 MB with their stacks


class MemorySnapshot:
    """Keeps the history of allocations during a window, and writes ``memory-rank-00003.pickle``.

    The file is opened by dropping it on https://docs.pytorch.org/memory_viz, which reads it in the browser.

    Args:
        rank: of this process.
        folder: for a snapshot at an out-of-memory error outside of a window.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._folder = rank, folder
        self._memory: Any = torch.cuda.memory
        self._runs = False

    def start(self) -> None:
        """Begins the history. Python stacks only: those of C++ cost a good deal of time."""
        self._memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=_ENTRIES)
        self._runs = True

    def dump(self, folder: Path) -> Path | None:
        """Writes what is known and ends the history; None, with a line, where that fails."""
        path = folder / f"memory-rank-{self._rank:05d}.pickle"
        number = 1
        while path.exists():
            number += 1
            path = folder / f"memory-rank-{self._rank:05d}-{number}.pickle"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._memory._dump_snapshot(str(path))
        except Exception as error:  # as RuntimeError of the device, or OSError
            _log.warning("%s: no memory snapshot was written: %s", path, error)
            path = None  # type: ignore[assignment]
        self.stop()
        return path

    def stop(self) -> None:
        """Ends the history."""
        if self._runs:
            self._runs = False
            self._memory._record_memory_history(enabled=None)

    def on_exception(self, error: BaseException) -> Path | None:
        """Writes a snapshot where the memory has run out: without a history, what is allocated and how large."""
        if not isinstance(error, torch.OutOfMemoryError):
            return None
        path = self.dump(self._folder)
        if path is not None:
            _log.warning("out of memory on rank %d: what it was used for is in %s", self._rank, path)
        return path
