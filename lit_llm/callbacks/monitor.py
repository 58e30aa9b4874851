"""Which rank holds the others up, while the run goes on."""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lit_llm.callbacks.monitor_timing import ForwardTimer
from lit_llm.errors import UserError
from lit_llm.training.host import HostRead, gather_equal

_SAMPLED = 5  # steps before a gathering whose forward is measured
_DATA, _COMPUTE = "data", "compute"


class RankMonitor(Callback):
    """Compares the ranks every so many steps: how long they wait for data, and how long they compute.

    A rank that is late makes all others wait in collectives, so that all steps are equally long, and total times don't
    tell who it was. This measures what a rank does by itself: the time in its data loader, and the forward's compute
    without the gathers of sharding, in the last steps before each comparison. One small collective brings three numbers
    of each rank together, and no device is waited for.

    A rank stands out when it exceeds the median rank by more than ``min_ms`` and ``threshold`` of a step, in two
    comparisons running. It is then named with its host, once, in the log; and again when another one does.

    Logs ``monitor/step_ms``, ``monitor/data_wait_ms_max``, ``monitor/compute_ms_max`` and ``monitor/compute_ms_median``
    (ms a step; of the forward), and ``monitor/slowest_rank`` while one stands out.

    Args:
        every_n_steps: optimizer steps between two comparisons.
        threshold: share of a step by which a rank must exceed the median rank.
        min_ms: ms a step by which it must at least.

    Raises:
        UserError: a number out of its range.
    """

    def __init__(self, every_n_steps: int = 50, threshold: float = 0.05, min_ms: float = 5.0) -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise UserError(f"rank_monitor.every_n_steps must be a whole number of at least 1; got {every_n_steps!r}")
        if not _is_amount(threshold):
            raise UserError(f"rank_monitor.threshold must be a share of a step, such as 0.05; got {threshold!r}")
        if not _is_amount(min_ms):
            raise UserError(f"rank_monitor.min_ms must be at least 0 milliseconds; got {min_ms!r}")
        self.every_n_steps, self.threshold, self.min_ms = every_n_steps, threshold, min_ms
        self._timer: ForwardTimer | None = None
        self._fetches = _Fetches()
        self._read = HostRead()
        self._hosts: list[str] = []
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._seen_step = step
        self._window: tuple[int, float] | None = None  # the step and the time that it began at
        self._apart = 0.0  # seconds of the window that belong to no step
        self._validation: float | None = None
        self._above: dict[str, set[int]] = {}  # ranks that exceeded the median rank at the last comparison
        self._told: dict[str, set[int]] = {}  # those that stood out when one of them was named

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learns the names of the hosts, and begins with nothing."""
        self._begin(trainer.global_step)
        self._read.clear()
        self._timer = ForwardTimer(pl_module, trainer.strategy.root_device)
        self._hosts = [socket.gethostname()]
        if _joined(trainer):
            every: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(every, self._hosts[0])
            self._hosts = every

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins to measure the forward in the steps before a comparison."""
        self._fetches.listen(trainer)
        assert self._timer is not None
        step = trainer.global_step
        if self._window is not None and self.every_n_steps - step % self.every_n_steps <= _SAMPLED:
            self._timer.install()
            self._timer.begin(step)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """The forward is done."""
        if self._timer is not None:
            self._timer.end()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compares if it is time, after a step."""
        step = trainer.global_step
        if step == self._seen_step:
            return
        self._seen_step = step
        assert self._timer is not None
        if step % self.every_n_steps == 0:
            self._gather(trainer, step)
        elif self._window is None:  # the first step, which warms up, is left out
            self._open(step)
        if (found := self._read.take()) is not None:
            self._compare(trainer, *found)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation belongs to no step."""
        self._validation = time.perf_counter()
        if self._timer is not None:
            self._timer.remove()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Goes on."""
        if self._validation is not None:
            self._apart += time.perf_counter() - self._validation
            self._validation = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tells what has been gathered last."""
        if (found := self._read.take(wait=True)) is not None:
            self._compare(trainer, *found)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves nothing behind; Lightning calls no teardown then."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves nothing behind."""
        if self._timer is not None:
            self._timer.remove()
        self._timer = None
        self._fetches.leave()
        self._read.clear()

    def _open(self, step: int) -> None:
        self._window, self._apart = (step, time.perf_counter()), 0.0
        self._fetches.seconds = 0.0

    def _gather(self, trainer: Trainer, step: int) -> None:
        """Brings this window's numbers of all ranks together, and opens the next one."""
        assert self._timer is not None
        if self._window is not None:
            first, began = self._window
            steps, passed = step - first, time.perf_counter() - began - self._apart
            mine = [1000 * passed / steps, 1000 * self._fetches.seconds / steps, self._timer.take()]
            values = torch.tensor(mine, dtype=torch.float32, device=trainer.strategy.root_device)
            self._read.put(gather_equal(values, trainer.world_size) if _joined(trainer) else values, step)
        self._timer.remove()
        self._open(step)

    def _compare(self, trainer: Trainer, values: list[float], step: int) -> None:
        """Logs, and tells who stands out; on rank 0, as all have the same numbers."""
        if not trainer.is_global_zero:
            return
        every = {"step": values[0::3], _DATA: values[1::3], _COMPUTE: values[2::3]}
        step_ms = statistics.median_low(every["step"])
        metrics = {"monitor/step_ms": step_ms}
        waits = [ms for ms in every[_DATA] if not math.isnan(ms)]
        if waits:
            metrics["monitor/data_wait_ms_max"] = max(waits)
        known = [ms for ms in every[_COMPUTE] if not math.isnan(ms)]
        if known:
            metrics["monitor/compute_ms_max"] = max(known)
            metrics["monitor/compute_ms_median"] = statistics.median_low(known)
        limit = max(self.min_ms, self.threshold * step_ms)
        excesses = {}
        for kind in (_DATA, _COMPUTE):
            found = self._stands_out(step, kind, every[kind], limit)
            if found is not None:
                excesses[found[1]] = found[0]
        if excesses:
            metrics["monitor/slowest_rank"] = excesses[max(excesses)]
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    def _stands_out(self, step: int, kind: str, every: list[float], limit: float) -> tuple[int, float] | None:
        """The rank that does, and by how many ms a step."""
        known = {rank: ms for rank, ms in enumerate(every) if not math.isnan(ms)}
        # The lower one of two: of two ranks one is slow, and not both by half.
        median = statistics.median_low(known.values()) if known else 0.0
        above = {rank for rank, ms in known.items() if ms - median > limit}
        both, self._above[kind] = above & self._above.get(kind, set()), above
        told = self._told.setdefault(kind, set())
        if not both:
            if told and not above:
                rank_zero_info(f"step {step}: no rank stands out by its {kind} any more")
                told.clear()
            return None
        worst = max(both, key=lambda rank: known[rank])
        if worst not in told:
            rank_zero_warn(f"step {step}: {self._sentence(worst, both, kind, known[worst], median)}")
            self._told[kind] = told | both
        return worst, known[worst] - median

    def _sentence(self, worst: int, ranks: set[int], kind: str, ms: float, median: float) -> str:
        host = self._hosts[worst]
        does = f"waits {ms:.0f} ms a step for data" if kind == _DATA else f"computes {ms:.0f} ms a step in its forward"
        text = f"rank {worst} ({host}) {does}; the median rank {median:.0f} ms"
        same = {rank for rank, name in enumerate(self._hosts) if name == host}
        if len(same) > 1 and same <= ranks and len(same) < len(self._hosts):
            text += f"; all {len(same)} ranks of {host} stand out"
        return text


class _Fetches:
    """Adds up the seconds in a Trainer's data fetcher, by the calls that it makes around each fetch.

    Not the time from batch to batch: Lightning may wait for other ranks there, and callbacks may save.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._fetcher: Any = None
        self._calls: tuple[Callable[[], None], Callable[[], None]] | None = None
        self._ours: tuple[Callable[[], None], Callable[[], None]] | None = None

    def listen(self, trainer: Any) -> None:
        """Takes its place, which the loop gives away anew in each epoch."""
        fetcher = trainer.fit_loop._data_fetcher
        if not hasattr(fetcher, "_start_profiler"):  # another Lightning
            self.seconds = math.nan
            return
        if self._ours is not None and fetcher is self._fetcher and fetcher._stop_profiler is self._ours[1]:
            return
        start, stop = fetcher._start_profiler, fetcher._stop_profiler
        began = 0.0

        def on_start() -> None:
            nonlocal began
            start()
            began = time.perf_counter()

        def on_stop() -> None:
            self.seconds += time.perf_counter() - began
            stop()

        self._fetcher, self._calls, self._ours = fetcher, (start, stop), (on_start, on_stop)
        fetcher._start_profiler, fetcher._stop_profiler = self._ours

    def leave(self) -> None:
        """Gives it back."""
        if self._ours is not None and self._calls is not None and self._fetcher._stop_profiler is self._ours[1]:
            self._fetcher._start_profiler, self._fetcher._stop_profiler = self._calls
        self._fetcher = self._calls = self._ours = None


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _joined(trainer: Trainer) -> bool:
    return trainer.world_size > 1 and dist.is_available() and dist.is_initialized()
