"""The checkpoints of a run: the last ones and the best."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.errors import UserError


@dataclass(frozen=True)
class _Saved:
    """One file that this run, or the one it was resumed from, has written."""

    name: str
    step: int
    score: float | None


class RunCheckpoint(ModelCheckpoint):
    """Saves ``step-N.ckpt``, N the optimizer step, and keeps the last ones and the best.

    Saved is after each validation or, if given, every so many steps; where nothing is validated after each epoch; and
    always at the end of training, so that the newest file is the final state. A step that is validated is saved after
    that, so that its file knows its score.

    What another run wrote into the same folder is never removed, renamed or overwritten: a name that is taken gets -v1
    behind it. A file comes to its name by renaming, so that a killed save leaves nothing under a final name.

    Args:
        dirpath: folder of the files; None: ``checkpoints`` in the Trainer's default_root_dir.
        every_n_train_steps: optimizer steps between checkpoints; None: after each validation.
        keep_last: newest checkpoints to keep, at least 1; -1: all.
        save_top_k: best checkpoints to keep besides; 0: none.
        monitor: logged metric that tells which is best.
        mode: whether the best is the least or the greatest.
        save_on_exception: save when training ends by an error or Ctrl-C.
        save_weights_only: leave out what resuming needs.
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
    ) -> None:
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise UserError(f"checkpoint.every_n_train_steps must be at least 1 or null, got {every_n_train_steps}")
        if keep_last != -1 and keep_last < 1:
            raise UserError(f"checkpoint.keep_last must be at least 1, or -1 for all, got {keep_last}")
        if save_top_k < 0:
            raise UserError(f"checkpoint.save_top_k must be 0 or more, got {save_top_k}")
        super().__init__(
            dirpath=dirpath,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            every_n_train_steps=every_n_train_steps,
            save_on_exception=save_on_exception,
            save_weights_only=save_weights_only,
        )
        self.keep_last = keep_last
        self._saved: list[_Saved] = []
        self._save_after_validation = False
        self._resumed_here = False

    @property
    def state_key(self) -> str:
        """One key whatever the options, so that a resumed run finds its files under other ones too."""
        return type(self).__qualname__

    # When

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Settles the folder, and removes what killed saves have left in it."""
        folder = self.dirpath or os.path.join(trainer.default_root_dir, "checkpoints")
        self.dirpath = os.path.realpath(trainer.strategy.broadcast(folder))
        if stage == "fit" and trainer.is_global_zero:
            for path in Path(self.dirpath).glob(".*.partial"):
                path.unlink(missing_ok=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A resumed run has its present step on disk already."""
        self._last_global_step_saved = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves a step that is due or the last, or leaves it to the validation that follows."""
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
        """Saves the final state, if it is not saved yet."""
        if not self._should_skip_saving_checkpoint(trainer):
            self._save(trainer, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves if asked to."""
        if self._should_save_on_exception(trainer) and trainer.state.fn == TrainerFn.FITTING:
            self._save(trainer, None)

    # What

    def _save(self, trainer: Trainer, score: torch.Tensor | None) -> None:
        value = None if score is None or torch.isnan(score) else float(score)
        saved = _Saved(self._free_name(trainer), trainer.global_step, value)
        keep = self._kept([*self._saved, saved])
        gone = [old for old in self._saved if old not in keep]
        self._saved = keep
        self._tell(saved)  # before saving, as it is part of what is saved
        self._write(trainer, self._path(saved))
        for old in gone:
            if self._should_remove_checkpoint(trainer, self._path(old), self._path(saved)):
                self._remove_checkpoint(trainer, self._path(old))

    def _write(self, trainer: Trainer, path: str) -> None:
        folder, name = os.path.split(path)
        partial = os.path.join(folder, f".{name}.partial")
        trainer.save_checkpoint(partial, self.save_weights_only)
        if trainer.is_global_zero:
            os.replace(partial, path)
        trainer.strategy.barrier("RunCheckpoint")
        self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, path
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)

    def _kept(self, saved: list[_Saved]) -> list[_Saved]:
        last = saved if self.keep_last == -1 else saved[-self.keep_last :]
        best = self._ranked(saved)[: self.save_top_k]
        return [one for one in saved if one in last or one in best]

    def _ranked(self, saved: list[_Saved]) -> list[_Saved]:
        """Those with a score, the best first."""
        sign = 1 if self.mode == "min" else -1
        return sorted((one for one in saved if one.score is not None), key=lambda one: sign * (one.score or 0.0))

    def _tell(self, newest: _Saved) -> None:
        """Fills the attributes by which Lightning and its loggers know a ModelCheckpoint."""
        ranked = self._ranked(self._saved)
        self.last_model_path = self._path(newest)
        self.current_score = None if newest.score is None else torch.tensor(newest.score)
        self.best_k_models = {self._path(one): torch.tensor(one.score) for one in ranked[: self.save_top_k]}
        self.best_model_path = self._path(ranked[0]) if ranked else ""
        self.best_model_score = torch.tensor(ranked[0].score) if ranked else None

    def _path(self, saved: _Saved) -> str:
        return os.path.join(str(self.dirpath), saved.name)

    def _free_name(self, trainer: Trainer) -> str:
        stem, version = f"step-{trainer.global_step}", 0
        while True:
            name = f"{stem}-v{version}.ckpt" if version else f"{stem}.ckpt"
            if not self.file_exists(os.path.join(str(self.dirpath), name), trainer):
                return name
            version += 1

    # Across processes

    def state_dict(self) -> dict[str, Any]:
        """The files of this run, beside what ModelCheckpoint keeps."""
        files = [{"name": one.name, "step": one.step, "score": one.score} for one in self._saved]
        return {**super().state_dict(), "files": files}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Notes whether the run goes on in its own folder; called before the state is loaded."""
        path = trainer.ckpt_path
        self._resumed_here = path is not None and os.path.dirname(os.path.realpath(path)) == self.dirpath

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the earlier files over as this run's own if it was resumed from one of them, in their folder."""
        if self._resumed_here:
            saved = [_Saved(**one) for one in state_dict.get("files", [])]
            self._saved = [one for one in saved if os.path.exists(self._path(one))]
            if self._saved:
                self._tell(self._saved[-1])


def _is_final(trainer: Trainer) -> bool:
    return trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step


def _validates(trainer: Trainer) -> bool:
    batches = trainer.num_val_batches
    return any(batches) if isinstance(batches, list) else bool(batches)
