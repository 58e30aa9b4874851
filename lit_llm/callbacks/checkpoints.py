"""The checkpoints of a run: the last ones, the best and those of round steps."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.callbacks.saved_files import KeepRule
from lit_llm.callbacks.saving import SavesTogether, SavingCheckpoint
from lit_llm.errors import UserError


class RunCheckpoint(SavingCheckpoint):
    """Saves ``step-N.ckpt``, N the optimizer step, and keeps the last ones, the best and those of round steps.

    Saved is after each validation or, if given, every so many steps; where nothing is validated after each epoch; and
    always at the end of training, so that the newest file is the final state. A step that is validated is saved after
    that, so that its file knows its score.

    What another run wrote into the same folder is never removed, renamed or overwritten: a name that is taken gets -v1
    behind it. A file comes to its name when it is complete, so that a killed save leaves nothing under a final name,
    and only then older ones are removed.

    A save that fails, as on a full disk, is told in one line; training goes on, and the next save that is due tries
    again. Only when the final state can't be saved is it an error, of the kind CheckpointWriteError and on all ranks.

    Args:
        dirpath: folder of the files; None: ``checkpoints`` in the Trainer's default_root_dir.
        every_n_train_steps: optimizer steps between checkpoints; None: after each validation.
        keep_last: newest checkpoints to keep, at least 1; -1: all.
        save_top_k: best checkpoints to keep besides; 0: none.
        monitor: logged metric that tells which is best.
        mode: whether the best is the least or the greatest.
        save_on_exception: save when training ends by an error; signals and Ctrl-C always save.
        save_weights_only: leave out what resuming needs.
        keep_every_n_steps: checkpoints whose step is a multiple are kept besides; None: none.
        async_save: write in the background, while training goes on; takes a copy of the checkpoint in CPU memory. A
            save waits for the one before. For one device, ddp and MeshStrategy.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        every_n_train_steps: int | None = None,
        keep_last: int = 2,
        save_top_k: int = 1,
        monitor: str = "val/loss",
        mode: Literal["min", "max"] = "min",
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        keep_every_n_steps: int | None = None,
        async_save: bool = False,
    ) -> None:
        for name, every in (("every_n_train_steps", every_n_train_steps), ("keep_every_n_steps", keep_every_n_steps)):
            if every is not None and every < 1:
                raise UserError(f"checkpoint.{name} must be at least 1 or null, got {every}")
        if keep_last != -1 and keep_last < 1:
            raise UserError(f"checkpoint.keep_last must be at least 1, or -1 for all, got {keep_last}")
        if save_top_k < 0:
            raise UserError(f"checkpoint.save_top_k must be 0 or more, got {save_top_k}")
        super().__init__(
            KeepRule(keep_last, save_top_k, mode, keep_every_n_steps),
            async_save,
            dirpath=dirpath,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            every_n_train_steps=every_n_train_steps,
            save_on_exception=save_on_exception,
            save_weights_only=save_weights_only,
        )
        self._save_after_validation = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A resumed run has its present step on disk already."""
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = str(trainer.ckpt_path or self._last_checkpoint_saved)
        self._failed_step = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves a step that is due or the last, or leaves it to the validation that follows."""
        self._look_after_background(trainer)
        due = self._every_n_train_steps > 0 and trainer.global_step % self._every_n_train_steps == 0
        if not (due or _is_final(trainer)) or self._should_skip_saving_checkpoint(trainer):
            return
        loop = trainer.fit_loop
        assert loop._data_fetcher is not None
        if loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            self._save_after_validation = True
        else:
            self._save(trainer, None)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves with the score at hand."""
        wanted = self._every_n_train_steps == 0 or self._save_after_validation or _is_final(trainer)
        self._save_after_validation = False
        if wanted and not self._should_skip_saving_checkpoint(trainer):
            score = trainer.callback_metrics.get(str(self.monitor))
            if score is None and self.save_top_k > 0:
                logged = ", ".join(sorted(trainer.callback_metrics)) or "none"
                rank_zero_warn(
                    f"checkpoint.monitor {self.monitor} is not logged, so none is the best; logged: {logged}"
                )
            self._save(trainer, score)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves where nothing is validated, and after the last epoch."""
        without_validation = self._every_n_train_steps == 0 and not _validates(trainer)
        last = trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs
        if (without_validation or last) and not self._should_skip_saving_checkpoint(trainer):
            self._save(trainer, None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the final state, if it is not saved yet; waits for the background.

        Raises:
            CheckpointWriteError: it can't be saved; on all ranks.
        """
        self._settle(trainer)
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_or_raise(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Waits for the background, and saves if asked to.

        The other ranks may train on or be gone. So where rank 0 writes the whole it does that without them, and where
        each writes its part nothing is saved unless all come within a minute.
        """
        self._settle(trainer, alone=True)
        wanted = self._should_save_on_exception(trainer) and self._failed_step != trainer.global_step
        if not wanted or trainer.state.fn != TrainerFn.FITTING:
            return
        if isinstance(trainer.strategy, SavesTogether) and not trainer.strategy.all_come():
            rank_zero_warn(f"step {trainer.global_step} is not saved: each rank would write its part, and not all do")
        elif trainer.is_global_zero or not self._rank_0_writes:
            self._save(trainer, None, foreground=True, alone=self._rank_0_writes)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Waits for the background."""
        self._settle(trainer, alone=True)

    def save_now(self, trainer: Trainer) -> str | None:
        """Saves this very step, unless it is saved already, and returns when the file is there. All ranks call it.

        Other callbacks may call it in their own hooks during training; this callback then has nothing left to save at
        that step, and the file knows no score.

        Returns:
            The file's path; None where there is nothing to save: before the first step, with fast_dev_run, outside
            of fit.

        Raises:
            CheckpointWriteError: it can't be saved; on all ranks.
        """
        self._settle(trainer)
        if self._last_global_step_saved == trainer.global_step and self._last_checkpoint_saved:
            return self._last_checkpoint_saved
        if self._should_skip_saving_checkpoint(trainer):
            return None
        self._save_or_raise(trainer)
        return self._last_checkpoint_saved


def _is_final(trainer: Trainer) -> bool:
    return trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step


def _validates(trainer: Trainer) -> bool:
    batches = trainer.num_val_batches
    return any(batches) if isinstance(batches, list) else bool(batches)
