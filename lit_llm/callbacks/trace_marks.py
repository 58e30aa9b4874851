"""What a recorded step is made of: marks in the trace, put there by listening to Lightning's own profiler calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.profilers import Profiler
from torch.profiler import record_function

# Lightning calls `trainer.profiler` around each hook and fetch: `[Strategy]DDPStrategy.backward`, `[Callback]....`.
_STRATEGY = {"batch_to_device": "batch_to_device", "training_step": "forward", "backward": "backward"}
_PLAIN = {"optimizer_step": "optimizer", "save_checkpoint": "checkpoint"}  # of manual optimization; of the Trainer


class StepMarks(Profiler):
    """Stands before the Trainer's profiler during a window; it hands everything on, and marks the trace.

    ``ProfilerStep#N`` is open from the first data fetch of a step to the end of its last ``on_train_batch_end``, those
    of all callbacks and the module included; in it ``data_fetch``, ``batch_to_device``, ``forward``, ``backward``,
    ``optimizer`` (from behind the closure to the end of the optimizer's own step) and ``checkpoint``. What lies
    between two steps is outside: epoch turns and ``validation``.

    Args:
        trainer: of the run.
        first: the step that the marks begin with.
        last: the step before which they end.
        begin: called right before the first mark.
        end: called right after the last one.
        pause: called with True where a validation begins and with False where it has ended.
    """

    def __init__(
        self,
        trainer: Any,
        first: int,
        last: int,
        begin: Callable[[], None],
        end: Callable[[], None],
        pause: Callable[[bool], None],
    ) -> None:
        super().__init__()
        self.steps: list[int] = []
        """That are recorded; the last one may still be open."""
        self.inner = trainer.profiler
        self._trainer, self._first, self._last = trainer, first, last
        self._begin, self._end, self._pause = begin, end, pause
        self._begun = self._step_is_open = self._inside_step_call = False
        self._open: dict[str, Any] = {}  # in the order of opening
        self._actions: dict[str, tuple[Callable[[], None] | None, Callable[[], None] | None]] = {}
        self._hooks: list[Any] = []

    # Lightning's profiler

    def start(self, action_name: str) -> None:
        """Of an action."""
        self.inner.start(action_name)
        if (do := self._of(action_name)[0]) is not None:
            do()

    def stop(self, action_name: str) -> None:
        """Of an action."""
        if (do := self._of(action_name)[1]) is not None:
            do()
        self.inner.stop(action_name)

    def summary(self) -> str:
        """The inner one's."""
        return self.inner.summary()

    def describe(self) -> None:
        """The inner one's."""
        self.inner.describe()

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """The inner one's."""
        self.inner.setup(*args, **kwargs)

    def teardown(self, stage: str | None) -> None:
        """Nothing: the inner one is torn down by the Trainer."""

    # In and out

    def install(self) -> None:
        """Takes its place in the Trainer and at its optimizers."""
        self._trainer.profiler = self
        for optimizer in self._trainer.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step_call))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step_call))

    def remove(self) -> None:
        """Closes what is open, and leaves everything as it was."""
        self._end_validation()
        while self._open:
            self._close(next(reversed(self._open)))
        self._step_is_open = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._trainer.profiler is self:
            self._trainer.profiler = self.inner

    # Actions

    def _of(self, action: str) -> tuple[Callable[[], None] | None, Callable[[], None] | None]:
        found = self._actions.get(action)
        if found is None:
            found = self._actions[action] = self._find(action)
        return found

    def _find(self, action: str) -> tuple[Callable[[], None] | None, Callable[[], None] | None]:
        """What to do when an action starts and stops."""
        origin, _, hook = action.rpartition(".")
        if action in _PLAIN:
            return self._mark(_PLAIN[action])
        if hook == "train_dataloader_next":
            return self._mark("data_fetch", step=True)
        if hook in _STRATEGY and origin.startswith("[Strategy]"):
            return self._mark(_STRATEGY[hook])
        of_module, of_strategy = origin.startswith("[LightningModule]"), origin.startswith("[Strategy]")
        if hook == "on_train_batch_start":  # a loader that training_step draws from has had no fetch yet
            return self._open_step, None
        if hook == "on_before_backward" and of_module:  # of manual optimization, which is not told otherwise
            return None, lambda: self._enter("backward")
        if hook == "on_after_backward" and of_module and not self._trainer.lightning_module.automatic_optimization:
            return None, lambda: self._close("backward")
        if hook == "on_before_optimizer_step":
            return lambda: self._enter("optimizer"), None
        if hook == "optimizer_step" and of_module:  # a step that a loss scaler left out has called no hooks
            return None, lambda: self._close("optimizer")
        if hook == "on_validation_start":
            return self._begin_validation, None
        if hook == "on_validation_end" and of_strategy:
            return None, self._end_validation
        if hook == "on_train_batch_end" and of_module:
            return None, self._end_micro_batch
        return None, None

    def _mark(self, name: str, step: bool = False) -> tuple[Callable[[], None], Callable[[], None]]:
        def enter() -> None:
            if step:
                self._open_step()
            self._enter(name)

        return enter, lambda: self._close(name)

    # Steps

    def _open_step(self) -> None:
        step = self._trainer.global_step
        if self._step_is_open or step < self._first:
            return
        if not self._begun:
            self._begun = True
            self._begin()
        self.steps.append(step)
        self._step_is_open = True
        self._enter(f"ProfilerStep#{step}")

    def _end_micro_batch(self) -> None:
        step = self._trainer.global_step
        if not self._step_is_open or step <= self.steps[-1]:
            return
        while self._open:
            self._close(next(reversed(self._open)))
        self._step_is_open = False
        if step >= self._last:
            self._end()

    def _begin_validation(self) -> None:
        if self._begun and "validation" not in self._open:
            self._enter("validation")
            self._pause(True)

    def _end_validation(self) -> None:
        if "validation" in self._open:
            self._pause(False)
            self._close("validation")

    # The optimizer's own step: forward and backward run inside of it, as its closure

    def _before_step_call(self, *_: Any) -> None:
        # Opened before: it must also close outside, as the call has a mark of its own.
        self._inside_step_call = "optimizer" not in self._open

    def _after_step_call(self, *_: Any) -> None:
        if self._inside_step_call:
            self._close("optimizer")
        self._inside_step_call = False

    # Marks

    def _enter(self, name: str) -> None:
        if self._begun and name not in self._open:
            self._open[name] = record_function(name)
            self._open[name].__enter__()

    def _close(self, name: str) -> None:
        mark = self._open.pop(name, None)
        if mark is not None:
            mark.__exit__(None, None, None)
