"""Reading a window's traces while the run goes on: another process does it, of low priority."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from lit_llm.callbacks.trace_files import Packing, file_name

REPORT = "report"
_FILES_S = 60.0  # wait for the other ranks' files
_READING_S = 900.0
_POLL_S = 0.2


class Reading(threading.Thread):
    """Waits for the files of a window and has ``lit-llm trace`` read them into ``report.json`` and ``report.html``.

    Args:
        folder: of the window.
        ranks: whose files are waited for; without those that don't come it begins all the same.
        own: what packs this rank's file.
        steps: that were recorded.
        before: another reading, to be waited for.
    """

    def __init__(
        self, folder: Path, ranks: Iterable[int], own: Packing, steps: list[int], before: Reading | None
    ) -> None:
        super().__init__(name=f"read-{folder.name}", daemon=True)
        self.folder, self.steps = folder, steps
        self.report: dict[str, Any] | None = None
        """The contract's JSON, once it has ended well."""
        self.problem: str | None = None
        """Why there is none, once it has ended."""
        self._files, self._own, self._before = [folder / file_name(rank) for rank in ranks], own, before
        self._process: subprocess.Popen[str] | None = None
        self._given_up = False

    def run(self) -> None:
        """Waits and reads."""
        try:
            self._own.join()
            if self._own.packed.parent != self.folder:
                self.problem = "another run writes here too"
                return
            if self._before is not None:
                self._before.join()
                self._before = None
            end = time.monotonic() + _FILES_S
            while not all(file.exists() for file in self._files) and time.monotonic() < end and not self._given_up:
                time.sleep(_POLL_S)
            self._read()
        except Exception as error:
            self.problem = " ".join(str(error).split()) or type(error).__name__
        if self._given_up:
            self.problem = "the run has ended first"

    def _read(self) -> None:
        if self._given_up:
            return
        result, page = self.folder / f"{REPORT}.json", self.folder / f"{REPORT}.html"
        command = [sys.executable, "-m", "lit_llm", "trace", str(self.folder)]
        command += ["--json", str(result), "--html", str(page)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)
        try:
            _, told = self._process.communicate(timeout=_READING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise TimeoutError(f"it took more than {_READING_S:g} s") from None
        if self._process.returncode:
            last = (told.strip().splitlines() or [""])[-1]
            raise RuntimeError(f"exit code {self._process.returncode}: {last}")
        self.report = json.loads(result.read_text(encoding="utf-8"))

    def finish(self, seconds: float) -> None:
        """Waits a while for the end, and then gives up."""
        self.join(seconds)
        if self.is_alive():
            self._given_up = True
            if self._process is not None:
                with suppress(OSError):
                    self._process.terminate()
            self.join(5.0)


def figures(report: dict[str, Any]) -> dict[str, float]:
    """What is logged of a report: medians and shares over all steps of all ranks; what it can't tell is left out."""
    steps = [step for rank in report.get("ranks", []) for step in rank.get("steps", [])]
    durations = [step["duration_us"] for step in steps if step.get("duration_us")]
    if not durations:
        return {}
    found = {"trace/step_us": float(median(durations))}
    names = ("compute", "comm_exposed", "comm_hidden", "mem_exposed", "idle", "dataloader")
    for name in names:
        # Of the GPU's window of the step where there is one, which lies later than the host's.
        known = [
            (step[f"{name}_us"], step.get("window_us") or step["duration_us"])
            for step in steps
            if step.get(f"{name}_us") is not None
        ]
        whole = sum(window for _, window in known)
        if whole:
            found[f"trace/{name}_pct"] = 100 * sum(part for part, _ in known) / whole
    straggler = report.get("straggler")
    if straggler:
        found["trace/straggler_rank"] = float(straggler["rank"])
        found["trace/straggler_lag_us"] = float(straggler["median_lag_us"])
    return found


def lines(report: dict[str, Any], folder: Path) -> list[str]:
    """The verdicts, a line each, and where the rest is."""
    told = [
        f"{verdict['severity']}: {verdict['message']}" + (f" ({verdict['advice']})" if verdict.get("advice") else "")
        for verdict in report.get("verdicts", [])
    ]
    return [*(f"trace {folder.name}: {line}" for line in told), f"trace {folder.name}: {folder / REPORT}.html"]
