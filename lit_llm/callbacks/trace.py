"""Traces of the PyTorch profiler, of the same steps on every rank."""

from __future__ import annotations

import atexit
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_llm.callbacks.flight_recorder import switch_on, write_into
from lit_llm.callbacks.trace_files import FOLDER
from lit_llm.callbacks.trace_request import Request
from lit_llm.callbacks.trace_run import CaptureRun, Settings
from lit_llm.callbacks.trace_window import Ranks, Schedule, check_count, check_flag
from lit_llm.errors import UserError

_READING_AT_END_S = 60.0
_live: list[CaptureRun] = []  # fits of this process that have not been ended


class TraceCapture(Callback):
    """Records windows of training steps with the PyTorch profiler, the same steps on every rank.

    Each rank writes ``<default_root_dir>/traces/step-000100/rank-00003.json.gz`` (the first recorded step, the global
    rank); ``lit-llm trace`` reads the folder. Steps are optimizer steps of this fit, counted from its beginning or from
    where it resumes: after ``start + wait`` steps come ``warmup`` steps for which the profiler is only made ready, and
    then ``active`` recorded ones. Between windows nothing of the profiler is installed.

    In the trace, ``ProfilerStep#N`` spans a step from its first data fetch to its last callback, N being
    ``trainer.global_step`` as it begins; ``data_fetch``, ``batch_to_device``, ``forward``, ``backward``, ``optimizer``
    and ``checkpoint`` lie in it, and ``validation`` between two of them, without its content.

    A run that goes on is asked for a window by ``touch <default_root_dir>/traces/capture`` or by SIGUSR2 to a rank's
    main process (not to its process group or torchrun: launchers and spawned data workers end by it). With a LitLLM the
    ranks agree on the step within the reduction that each step has anyway.

    A run that ends in the middle of a window, by an exception or a signal as well, writes what was recorded. Writing
    itself never ends a run: what goes wrong there is a warning.

    Args:
        start: steps before the first window; None: only windows that are asked for.
        wait: further steps, before each window where ``every_n_steps`` is not given.
        warmup: steps of a window for which the profiler runs without recording.
        active: recorded steps of a window.
        every_n_steps: from one window to the next, at least ``warmup + active``; None: ``wait + warmup + active``.
        repeat: windows by schedule; 0: until the run ends.
        ranks: that record: ``all``, a list, or k for every k-th.
        record_shapes: with the shapes of each operation's inputs.
        with_stack: with Python stacks; costly.
        profile_memory: with allocations and frees.
        on_demand: whether the run can be asked for windows.
        max_windows: of a run, asked for or not.
        max_mb: of a file, roughly, in MiB: a larger trace is cut to its first steps.
        analyze: rank 0 has each window read in the background, logs its figures (``trace/step_us``,
            ``trace/comm_exposed_pct``, ``trace/dataloader_pct``, ...) and prints the verdicts.
        memory_snapshot: with a snapshot of CUDA memory per window, and one when it runs out.
        flight_recorder: switches NCCL's flight recorder on, whose dumps go into ``traces/``.

    Raises:
        UserError: an option out of its range; beside Lightning's PyTorchProfiler, a second TraceCapture or another
            profiler that runs.
    """

    def __init__(
        self,
        start: int | None = 10,
        wait: int = 0,
        warmup: int = 1,
        active: int = 3,
        every_n_steps: int | None = None,
        repeat: int = 1,
        ranks: int | list[int] | str = "all",
        record_shapes: bool = False,
        with_stack: bool = False,
        profile_memory: bool = False,
        on_demand: bool = True,
        max_windows: int = 20,
        max_mb: int = 512,
        analyze: bool = True,
        memory_snapshot: bool = False,
        flight_recorder: bool = False,
    ) -> None:
        check_count("max_windows", max_windows, 1)
        check_count("max_mb", max_mb, 1)
        options = {"record_shapes": record_shapes, "with_stack": with_stack, "profile_memory": profile_memory}
        others = {"on_demand": on_demand, "analyze": analyze, "memory_snapshot": memory_snapshot}
        for name, value in {**options, **others, "flight_recorder": flight_recorder}.items():
            check_flag(name, value)
        self.settings = Settings(
            Schedule(start, wait, warmup, active, every_n_steps, repeat),
            Ranks.of(ranks),
            options,
            max_windows,
            max_mb << 20,
            analyze,
            memory_snapshot,
        )
        self.on_demand, self.flight_recorder = on_demand, flight_recorder
        self._late = switch_on() if flight_recorder else None
        self._request: Request | None = None
        self._run: CaptureRun | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy is one that has not begun."""
        return {**self.__dict__, "_request": None, "_run": None}

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Refuses what it can't work beside, and begins to listen."""
        if stage != TrainerFn.FITTING or trainer.fast_dev_run:
            return
        _end_left_over(trainer)
        self._leave()
        if isinstance(trainer.profiler, PyTorchProfiler):
            raise UserError(
                "TraceCapture can't run beside Lightning's PyTorchProfiler, as torch has one profiler at a time; leave "
                "trainer.profiler away"
            )
        if sum(isinstance(one, TraceCapture) for one in trainer.callbacks) > 1:
            raise UserError("trainer.callbacks has more than one TraceCapture; keep one, with every_n_steps and repeat")
        if torch.autograd._profiler_enabled():
            raise UserError("TraceCapture can't run while another torch profiler runs; end that one before the fit")
        if "://" in str(trainer.default_root_dir):
            raise UserError(
                f"TraceCapture writes into a folder of this machine, but trainer.default_root_dir is "
                f"{trainer.default_root_dir}; give a local one, and a logger or checkpoint callback for the other"
            )
        self.settings.ranks.among(trainer.world_size)
        if self.settings.memory_snapshot and not torch.cuda.is_available():
            rank_zero_info("trace_capture.memory_snapshot does nothing here: there is no CUDA device")
        if self.flight_recorder:
            write_into(Path(trainer.default_root_dir, FOLDER))
            if self._late is not None:
                rank_zero_warn(self._late)
        if self.on_demand:
            self._request = Request(trainer)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Agrees on the names of files, and begins to count."""
        if trainer.fast_dev_run:
            return
        self._run = CaptureRun(self.settings, trainer, self._request)
        _live.append(self._run)
        self._run.turn()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Between two steps: whether a window begins."""
        if self._run is not None and trainer.global_step != self._run.step:
            self._run.between_steps()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends a window that the run's end has cut short."""
        if self._run is not None:
            self._run.end()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the files, and a while for the verdicts."""
        if self._run is not None:
            self._run.finish(_READING_AT_END_S)
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes what was recorded."""
        if self._run is not None:
            self._run.fail(exception)
        self._leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves everything as it was."""
        if self._run is not None:
            self._run.finish(0.0)
        self._leave()

    def _leave(self) -> None:
        if self._run is not None:
            _end(self._run)
        if self._request is not None:
            self._request.close()
        self._request = self._run = None


def _end_left_over(trainer: Any = None) -> None:
    """Ends fits whose callback was not told that they have ended, as by another callback's ``on_exception`` raising.

    Args:
        trainer: that begins a fit, so has no other one; None: all end, as the process does.
    """
    for run in list(_live):
        if trainer in (None, run.trainer) or run.trainer.state.status != TrainerStatus.RUNNING:
            _end(run)


def _end(run: CaptureRun) -> None:
    if run in _live:
        _live.remove(run)
        with suppress(Exception):
            run.finish(0.0)
        if run.request is not None:
            run.request.close()


atexit.register(_end_left_over)  # a process that ends while torch's profiler runs may crash
