"""Ending a run before its last step, with its work saved."""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_llm.checkpoint.write import CheckpointWriteError
from lit_llm.errors import RunStopped
from lit_llm.training.lightning_loop import end_run
from lit_llm.training.signals import name_of, requeue


def end_by_signal(trainer: Any, rank: int, number: int, ended: bool = False) -> NoReturn:
    """Saves, says so, puts a SLURM job back into its queue if asked to, and ends; all ranks call it at the same step.

    Args:
        trainer: of the run.
        rank: that got the signal.
        number: of the signal.
        ended: whether training has come to its own end, so that its hooks are called already.

    Raises:
        CheckpointWriteError: it can't be saved.
        SIGTERMException: exit code 0; for SIGINT KeyboardInterrupt, which Lightning makes its exit of. Under ddp_spawn
            and ddp_fork, whose parent would wait for ever, RunStopped.
    """
    failure = None
    try:
        what = _where(_save_and_end(trainer, ended))
    except CheckpointWriteError as error:  # the one before is still there
        failure, what = error, str(error)
    told = f"stopped by {name_of(number)} (rank {rank}) after step {trainer.global_step}; {what}"
    if trainer.is_global_zero and (queued := requeue(trainer, number)) is not None:
        told += f"; {queued}"
    if failure is not None:
        raise CheckpointWriteError(told) from failure
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise RunStopped(told)
    rank_zero_info(told)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SIGTERMException(0)


def end_by_failure(trainer: Any, why: str, ended: bool = False) -> NoReturn:
    """Saves and ends; all ranks call it at the same step; arguments as of :func:`end_by_signal`.

    Raises:
        RunStopped: says why, and where the state is.
    """
    raise RunStopped(f"{why}; {_where(_save_and_end(trainer, ended))}")


def _save_and_end(trainer: Any, ended: bool) -> str | None:
    """Makes sure that this step is on disk, and ends training as its last step would; gives the file."""
    saved = _saved(trainer)  # before other callbacks can fail, as one that prints where nobody listens any more
    if not ended:
        end_run(trainer)
    return saved


def _saved(trainer: Any) -> str | None:
    callbacks = trainer.checkpoint_callbacks
    for one in callbacks:
        if hasattr(one, "save_now"):  # RunCheckpoint
            return one.save_now(trainer)
    for one in callbacks:
        whole = isinstance(one, ModelCheckpoint) and not one.save_weights_only
        if whole and one._last_global_step_saved == trainer.global_step:
            return one._last_checkpoint_saved or one.last_model_path or one.best_model_path
    if not callbacks or trainer.fast_dev_run:
        return None
    path = trainer.strategy.broadcast(_free_path(trainer))
    trainer.save_checkpoint(path)
    return path


def _free_path(trainer: Any) -> str:
    folder, version = os.path.join(trainer.default_root_dir, "checkpoints"), 0
    while True:
        name = f"step-{trainer.global_step}{f'-v{version}' if version else ''}.ckpt"
        if not os.path.exists(path := os.path.join(folder, name)):
            return path
        version += 1


def _where(saved: str | None) -> str:
    return "nothing was saved, as checkpoints are off" if saved is None else f"saved {saved}"
