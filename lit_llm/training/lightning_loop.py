"""Lightning's fit loop, mended from outside for one run. Everything that leans on its private parts is here.

What Lightning 2.6 does and this undoes, each for the objects of one Trainer:

- with more than one rank, a broadcast and ``.item()`` at every micro-batch, to see whether rank 0 got SIGTERM; its
  handler broadcasts on its own and hangs when only one rank got the signal;
- ``.item()`` on every progress-bar metric at every micro-batch;
- gradients live until after the next forward, at the peak of the activations.

A test for each fails once upstream no longer needs it. With another version of Lightning the first two are left as they
are, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_llm.training.host import HostRead

MENDED = ("2.6",)


def is_mended(version: str = lightning.__version__) -> bool:
    """Whether this is a Lightning whose loop is known."""
    return any(version == known or version.startswith(f"{known}.") for known in MENDED)


def mend(trainer: Any, install_signals: Callable[[Any], None]) -> None:
    """Mends the loop of a Trainer that is about to fit.

    Args:
        trainer: whose fit has set up its strategy and not yet begun to run.
        install_signals: takes the signals over, given the Trainer, once Lightning has noted the handlers before.
    """
    if not is_mended():
        rank_zero_warn(
            f"lightning {lightning.__version__} is none of those whose loop is known ({', '.join(MENDED)}.x): it may "
            "synchronise at every micro-batch, and hang at SIGTERM to one rank"
        )
        return
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing
    trainer._signal_connector.register_signal_handlers = _Registration(trainer, install_signals)
    if type(trainer._logger_connector) is _LoggerConnector:
        trainer._logger_connector.__class__ = QuietLoggerConnector
        trainer._logger_connector.__dict__["_shown"] = {}


def leave_signals(trainer: Any) -> None:
    """Leaves signals as they are while the Trainer evaluates: its own handler only notes SIGTERM, and nobody asks."""
    if is_mended():
        trainer._signal_connector.register_signal_handlers = _nothing


def restore(trainer: Any) -> None:
    """Leaves the Trainer to modules that know nothing of this; the quiet bar metrics may stay."""
    trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
    trainer._signal_connector.__dict__.pop("register_signal_handlers", None)


def free_gradients(optimizer: torch.optim.Optimizer, args: Any = None, kwargs: Any = None) -> None:
    """Drops the gradients right after the step that used them: a post hook of the optimizer's step."""
    optimizer.zero_grad(set_to_none=True)


def end_run(trainer: Any) -> None:
    """Ends training in the last hook of a micro-batch: logs the step, and calls the hooks of the end."""
    connector = trainer._logger_connector
    connector.on_batch_end()
    connector.update_train_step_metrics()
    trainer.fit_loop.on_run_end()


def _nothing() -> None:
    pass


class _Registration:
    """Lightning's own registration of signals, and ours on top of it."""

    def __init__(self, trainer: Any, install: Callable[[Any], None]) -> None:
        self.trainer, self.install = trainer, install

    def __call__(self) -> None:
        connector = self.trainer._signal_connector
        type(connector).register_signal_handlers(connector)
        self.install(self.trainer)


class QuietLoggerConnector(_LoggerConnector):
    """Leaves progress-bar metrics on their device until a bar asks for them, and then gives what has arrived."""

    _shown: dict[str, tuple[HostRead, float | None]]

    @property
    def metrics(self) -> Any:
        """As Lightning's; the values for the bar are tensors."""
        results, on_step = self.trainer._results, self._first_loop_iter is not None
        assert results is not None
        found: dict[str, dict[str, Any]] = {"callback": {}, "log": {}, "pbar": {}}
        for _, result in results.valid_items():
            value = results._get_cache(result, on_step)
            if not isinstance(value, Tensor):
                continue
            name, forked = results._forked_name(result, on_step)
            meta = result.meta
            if meta.logger:
                found["log"][forked] = value
            if results.training or (meta.on_epoch and not on_step):
                found["callback"][name] = found["callback"][forked] = value
            if meta.prog_bar:
                found["pbar"][forked] = value
        return found

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """Numbers for a bar: on a GPU those of the time it asked before, so that nothing waits."""
        if self.trainer._results:
            self._progress_bar_metrics.update(self.metrics["pbar"])
        numbers = {name: self._number(name, value) for name, value in self._progress_bar_metrics.items()}
        return {name: number for name, number in numbers.items() if number is not None}

    def _number(self, name: str, value: Any) -> Any:
        """What is known of a metric; None where nothing has arrived yet."""
        if not isinstance(value, Tensor) or value.numel() != 1:
            return value
        read, shown = self._shown.get(name) or (HostRead(), None)
        read.put(value.reshape(1), None)
        if (arrived := read.take()) is not None:
            shown = arrived[0][0]
        self._shown[name] = (read, shown)
        return shown
