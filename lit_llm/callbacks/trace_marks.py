"""What a recorded step is made of: marks in the trace, put there by listening to Lightning's own profiler calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.profilers import Profiler
from torch.profiler import record_function

# Lightning calls `trainer.profiler` around each hook and fetch: `[Strategy]DDPStrategy.backward`, `[Callback]....`.
_STRATEGY = {"batch_to_device": "batch_to_device", "training_step": "forward", "backward": "backward"}
_PLAIN = {"optimizer_step": "optimizer", "save_checkpoint": "checkpoint"}  # of manual optimization; of the Trainer


class Listening(Profiler):
    """Stands before a Trainer's profiler and hands everything on, attributes and copying as well.

    What listens comes outside of the inner one's measuring, which so does not count it.

    Args:
        inner: the Trainer's.
        before: called with each action that is about to start.
        after: called with each one that has stopped.
    """

    def __init__(self, inner: Profiler, before: Callable[[str], None], after: Callable[[str], None]) -> None:
        self.__dict__.update(
            _inner=inner, _before=before, _after=after
        )  # the base's own attributes are the inner one's

    def start(self, action_name: str) -> None:
        """Of an action."""
        self._before(action_name)
        self._inner.start(action_name)

    def stop(self, action_name: str) -> None:
        """Of an action."""
        self._inner.stop(action_name)
        self._after(action_name)

    @contextmanager
    def profile(self, action_name: str) -> Iterator[Any]:
        """Of an action; the inner one's, which need not call its own ``start``."""
        self._before(action_name)
        try:
            with self._inner.profile(action_name) as given:
                yield given
        finally:
            self._after(action_name)

    def summary(self) -> str:
        """The inner one's."""
        return self._inner.summary()

    def describe(self) -> None:
        """The inner one's."""
        self._inner.describe()

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """The inner one's."""
        self._inner.setup(*args, **kwargs)

    def teardown(self, stage: str | None) -> None:
        """The inner one's."""
        self._inner.teardown(stage)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __reduce__(self) -> Any:
        """A copy of what holds a Trainer, as of a LightningModule, gets one of the inner one."""
        return _itself, (self._inner,)

    def __del__(self) -> None:
        """Nothing: the inner one goes on."""


def _itself(one: Any) -> Any:
    return one


class StepMarks:
    """Listens to the Trainer's profiler during a window, and marks the trace.

    ``ProfilerStep#N`` is open from the first data fetch of a step to the end of its last ``on_train_batch_end``, those
    of all callbacks and the module included; in it ``data_fetch``, ``batch_to_device``, ``forward``, ``backward``,
    ``optimizer`` (from behind the closure to the end of the optimizer's own step) and ``checkpoint``. What lies
    between two steps is outside: epoch turns and ``validation``. A step that an epoch's end has cut off, as of a batch
    that ``on_train_batch_start`` skips, begins anew in the next epoch, and its first mark is one of :attr:`dropped`.

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
        self.steps: list[int] = []
        """That are recorded; the last one may still be open."""
        self.dropped: list[str] = []
        """Names of marks of steps that have begun anew, under another name of the same number."""
        self._trainer, self._first, self._last = trainer, first, last
        self._begin, self._end, self._pause = begin, end, pause
        self._begun = self._step_is_open = self._inside_step_call = False
        self._name = ""  # of the latest step's mark
        self._listening: Listening | None = None
        self._open: dict[str, Any] = {}  # in the order of opening
        self._actions: dict[str, tuple[Callable[[], None] | None, Callable[[], None] | None]] = {}
        self._hooks: list[Any] = []

    # In and out

    def install(self) -> None:
        """Takes its place in the Trainer and at its optimizers."""
        self._listening = self._trainer.profiler = Listening(self._trainer.profiler, self._on_start, self._on_stop)
        for optimizer in self._trainer.optimizers:  # lambdas, as copying a bound method copies its object
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._before_step_call()))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._after_step_call()))

    def remove(self) -> None:
        """Closes what is open, and leaves everything as it was."""
        self._end_validation()
        self._close_step()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        listening, self._listening = self._listening, None
        if listening is not None and self._trainer.profiler is listening:
            self._trainer.profiler = listening._inner

    @property
    def last_is_partial(self) -> bool:
        """Whether the latest step has begun and has not been taken."""
        return bool(self.steps) and self._trainer.global_step <= self.steps[-1]

    # Actions

    def _on_start(self, action: str) -> None:
        if self._listening is not None and (do := self._of(action)[0]) is not None:
            do()

    def _on_stop(self, action: str) -> None:
        if self._listening is not None and (do := self._of(action)[1]) is not None:
            do()

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
        if hook == "on_train_epoch_end":  # a step goes on only where one of its batches was skipped
            return self._close_step, None
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
        if self.steps and self.steps[-1] == step:  # anew: the same number, and told from the first one
            self.dropped.append(self._name)
            self._name = self._name.replace("#", "#0")
        else:
            self.steps.append(step)
            self._name = f"ProfilerStep#{step}"
        self._step_is_open = True
        self._enter(self._name)

    def _close_step(self) -> None:
        if self._step_is_open:
            while self._open:
                self._close(next(reversed(self._open)))
        self._step_is_open = False

    def _end_micro_batch(self) -> None:
        step = self._trainer.global_step
        if not self._step_is_open or step <= self.steps[-1]:
            return
        self._close_step()
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

    def _before_step_call(self) -> None:
        # Opened before: it must also close outside, as the call has a mark of its own.
        self._inside_step_call = "optimizer" not in self._open

    def _after_step_call(self) -> None:
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
