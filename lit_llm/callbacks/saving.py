"""How the checkpoints of a run are written, named and removed; when they are is RunCheckpoint's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.callbacks.saved_files import KeepRule, Saved
from lit_llm.checkpoint.find import newest_checkpoint
from lit_llm.checkpoint.team import Team
from lit_llm.checkpoint.write import (
    BackgroundWrite,
    CheckpointWriteError,
    new_names_only,
    remove_partials,
    snapshot,
    write_safely,
)
from lit_llm.errors import UserError


@runtime_checkable
class SavesTogether(Protocol):
    """A strategy under which each rank writes its part, such as MeshStrategy."""

    def write_in_background(self, content: dict[str, Any], path: str) -> BackgroundWrite:
        """Begins to write out of copies; called by all ranks. What fails on one is the error on all."""
        ...

    def prepare_saving(self) -> None:
        """Called by all ranks before any save."""
        ...

    def all_come(self, seconds: float = 60) -> bool:
        """Whether all ranks call this within some seconds."""
        ...


@dataclass
class _Write:
    """A save that is not settled: all ranks hold one, those that write know how it goes."""

    saved: Saved
    saved_before: int  # the step
    silent: bool  # the caller tells of a failure
    error: BaseException | None = None
    thread: BackgroundWrite | None = None
    concluded: bool = False


class SavingCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that lives through failed writes, in the foreground or in the background.

    Args:
        rule: which files stay.
        async_save: write in the background.
        options: of ModelCheckpoint.
    """

    def __init__(self, rule: KeepRule, async_save: bool, **options: Any) -> None:
        super().__init__(**options)
        self.async_save = async_save
        self._rule = rule
        self._files: list[Saved] = []
        self._write: _Write | None = None  # the one in the background, or being settled
        self._failed_step: int | None = None
        self._rank_0_writes = False
        self._resumed_here = False

    @property
    def state_key(self) -> str:
        """One key whatever the options, so that a resumed run finds its files under other ones too."""
        return type(self).__qualname__

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Settles the folder, removes what killed saves have left in it, and sees that files are written safely."""
        strategy = trainer.strategy
        folder = self.dirpath or os.path.join(trainer.default_root_dir, "checkpoints")
        self.dirpath = os.path.realpath(strategy.broadcast(folder))
        write_safely(strategy)
        if stage != "fit":
            return
        self._rank_0_writes = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy))
        if self.async_save and not self._rank_0_writes and not isinstance(strategy, SavesTogether):
            raise UserError(
                "checkpoint.async_save works on one device, with ddp and with MeshStrategy, not with "
                f"{type(strategy).__name__}; leave it false"
            )
        if isinstance(strategy, SavesTogether):
            strategy.prepare_saving()
        if trainer.is_global_zero:
            remove_partials(self.dirpath)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """What ``ckpt_path="last"`` of a plain Trainer means: the newest file that can be read."""
        newest = newest_checkpoint(self.dirpath or os.path.join(trainer.default_root_dir, "checkpoints"))
        return set() if newest is None else {str(newest)}

    # Writing

    def _save_or_raise(self, trainer: Trainer) -> None:
        reason = self._save(trainer, None, foreground=True, silent=True)
        if reason is not None:
            raise CheckpointWriteError(reason)

    def _save(
        self,
        trainer: Trainer,
        score: torch.Tensor | None,
        *,
        foreground: bool = False,
        silent: bool = False,
        alone: bool = False,
    ) -> str | None:
        """Saves this step, after the one in the background has ended, and returns why it failed, if that is known.

        Args:
            trainer: of the run; all its ranks call this.
            score: of this step, if it was validated.
            foreground: write at once, also with async_save and where that has failed before.
            silent: the caller tells of a failure.
            alone: the other ranks don't call this.
        """
        step, value = trainer.global_step, None if score is None or torch.isnan(score) else float(score)
        self._settle(trainer, alone=alone)
        if self._failed_step == step and not foreground:
            return None  # its validation, epoch and run may end all at once: one attempt, and one in the end
        saved = Saved(self._free_name(trainer, alone), step, value)
        write = _Write(saved, self._last_global_step_saved, silent)
        self._files.append(saved)
        self._tell()  # before saving, as it is part of what is saved
        try:
            with trainer.profiler.profile("save_checkpoint"):  # type: ignore[attr-defined]
                content = trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only)
                if not self.async_save or foreground:
                    write.error = self._written(trainer, content, saved)
                elif not self._rank_0_writes:
                    assert isinstance(trainer.strategy, SavesTogether)
                    write.thread = trainer.strategy.write_in_background(content, self._path(saved))
                elif trainer.is_global_zero:
                    write.thread = self._written_in_background(trainer, snapshot(content), saved)
        except BaseException:
            self._forget(saved)
            raise
        self._write, self._last_global_step_saved = write, step
        return None if self.async_save and not foreground else self._settle(trainer, alone=alone)

    def _written(self, trainer: Trainer, content: dict[str, Any], saved: Saved) -> Exception | None:
        try:
            with new_names_only():  # another run in this folder may have taken the name since
                trainer.strategy.save_checkpoint(content, self._path(saved))
        except Exception as error:
            return error
        return None

    def _written_in_background(self, trainer: Trainer, content: dict[str, Any], saved: Saved) -> BackgroundWrite:
        io, path = trainer.strategy.checkpoint_io, self._path(saved)

        def write() -> None:
            with new_names_only():  # in this thread
                io.save_checkpoint(content, path)

        return BackgroundWrite(write)

    def _look_after_background(self, trainer: Trainer) -> None:
        """A rank finishes its write that has ended; what all ranks must agree on waits for the next save.

        Where all ranks write, each has ended when all have, with one error or none, so nothing is removed too early.
        """
        write = self._write
        if write is not None and write.thread is not None and write.thread.done:
            error = write.thread.wait()
            if error is None or isinstance(error, OSError):
                self._conclude(trainer, write, None if error is None else str(error))

    def _settle(self, trainer: Trainer, *, alone: bool = False) -> str | None:
        """Waits until the last write has ended, and returns why it failed, if it did; on all ranks unless alone."""
        write = self._write
        if write is None:
            return None
        error = write.error if write.thread is None else write.thread.wait()
        self._write = None
        try:
            if alone:
                reason = None if error is None else str(error)
            else:
                reason = _agreed(trainer, error) if self._rank_0_writes else _agreed_by_all(error)
        except BaseException:
            self._forget(write.saved)
            raise
        self._conclude(trainer, write, reason)
        if reason is None:
            self._last_checkpoint_saved = self._path(write.saved)
        else:
            self._last_global_step_saved, self._failed_step = write.saved_before, write.saved.step
        return reason

    def _conclude(self, trainer: Trainer, write: _Write, reason: str | None) -> None:
        """What follows a write, once: older files go and the loggers hear of it, or the user hears of the failure."""
        if write.concluded:
            return
        write.concluded = True
        if reason is not None:
            self._forget(write.saved)
            if not write.silent:
                good = self._files[-1].name if self._files else "none"
                rank_zero_warn(f"step {write.saved.step} is not saved; the last good checkpoint is {good}: {reason}")
            return
        old, self._files = self._files, self._rule.kept(self._files)
        for one in old:
            # Lightning would spare the one that the run was resumed from; a newer one is complete by now.
            if one not in self._files:
                try:
                    trainer.strategy.remove_checkpoint(self._path(one))
                except OSError as error:
                    rank_zero_warn(f"the old checkpoint {self._path(one)} can't be removed: {error}")
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)

    def _forget(self, saved: Saved) -> None:
        if saved in self._files:
            self._files.remove(saved)
            self._tell()

    def _tell(self) -> None:
        """Fills the attributes by which Lightning and its loggers know a ModelCheckpoint."""
        ranked = self._rule.ranked(self._files)
        newest = self._files[-1] if self._files else None
        self.last_model_path = "" if newest is None else self._path(newest)
        self.current_score = None if newest is None or newest.score is None else torch.tensor(newest.score)
        self.best_k_models = {self._path(one): torch.tensor(one.score) for one in ranked[: self.save_top_k]}
        self.best_model_path = self._path(ranked[0]) if ranked else ""
        self.best_model_score = torch.tensor(ranked[0].score) if ranked else None

    def _path(self, saved: Saved) -> str:
        return os.path.join(str(self.dirpath), saved.name)

    def _free_name(self, trainer: Trainer, alone: bool) -> str:
        stem, version = f"step-{trainer.global_step}", 0
        name = f"{stem}.ckpt"
        while trainer.is_global_zero and os.path.lexists(os.path.join(str(self.dirpath), name)):
            version += 1
            name = f"{stem}-v{version}.ckpt"
        return name if alone else trainer.strategy.broadcast(name)

    # Across processes

    def state_dict(self) -> dict[str, Any]:
        """The files of this run, beside what ModelCheckpoint keeps.

        Those among them that go once this one is complete: a kill in between leaves them to the next process.
        """
        files = [{"name": one.name, "step": one.step, "score": one.score} for one in self._files]
        return {**super().state_dict(), "files": files}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Notes whether the run goes on in its own folder; called before the state is loaded."""
        path = trainer.ckpt_path
        self._resumed_here = path is not None and os.path.dirname(os.path.realpath(path)) == self.dirpath

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the earlier files over as this run's own if it was resumed from one of them, in their folder."""
        if self._resumed_here:
            files = [Saved(**one) for one in state_dict.get("files", [])]
            self._files = [one for one in files if os.path.exists(self._path(one))]
            if self._files:
                self._tell()


def _agreed(trainer: Trainer, error: BaseException | None) -> str | None:
    """Tells all ranks why rank 0 could not write, if so; being one broadcast, it is the barrier after a write as well.

    Anything but an OSError is no state of the disk, and ends the run on every rank.
    """
    told = None if error is None else (isinstance(error, OSError), str(error))
    told = trainer.strategy.broadcast(told)
    if error is not None and (told is None or not isinstance(error, OSError)):
        raise error
    if told is not None and not told[0]:
        raise RuntimeError(f"rank 0 could not write a checkpoint: {told[1]}")
    return None if told is None else told[1]


def _agreed_by_all(error: BaseException | None) -> str | None:
    """The same where each rank writes its part: the first rank's error that has one."""
    told = Team().gather(None if error is None else (isinstance(error, OSError), str(error)))
    if error is not None and not isinstance(error, OSError):
        raise error
    failed = [(rank, *one) for rank, one in enumerate(told) if one is not None]
    for rank, of_the_disk, reason in failed:
        if not of_the_disk:
            raise RuntimeError(f"rank {rank} could not write a checkpoint: {reason}")
    return failed[0][2] if failed else None
