"""What validate, test and predict need on several ranks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_llm.model import Transformer
from lit_llm.parallel.lockstep import Lockstep
from lit_llm.parallel.report import is_sharded, reshard
from lit_llm.parallel.strategy import MeshStrategy


class EvaluationLockstep(Callback):
    """Keeps the ranks of a sharded model together while they evaluate different amounts.

    LitLLM puts it before all other callbacks: it must have ended before anything else is exchanged over the ranks.
    """

    def __init__(self) -> None:
        self._lockstep: Lockstep | None = None

    @staticmethod
    def attach(trainer: Any) -> None:
        """Puts one into a Trainer that is setting up, in place of an earlier one."""
        others = [one for one in trainer.callbacks if not isinstance(one, EvaluationLockstep)]
        own = [EvaluationLockstep()] if isinstance(trainer.strategy, MeshStrategy) and trainer.strategy.shards else []
        trainer.callbacks = [*own, *others]

    def _start(self, trainer: Trainer, module: LightningModule) -> None:
        model, strategy = getattr(module, "model", None), trainer.strategy
        if (
            isinstance(model, Transformer)
            and isinstance(strategy, MeshStrategy)
            and strategy.sizes.shard > 1
            and any(is_sharded(p) for p in model.parameters())
        ):
            self._lockstep = Lockstep(model, strategy.shard_group)
            self._lockstep.start()

    def _finish(self) -> None:
        if self._lockstep is not None:
            self._lockstep.finish()
            self._lockstep = None

    def _end(self, module: LightningModule) -> None:
        self._finish()
        reshard(module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins."""
        self._start(trainer, pl_module)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Waits for the others already here if no batch is left: metrics of single steps are exchanged next."""
        numbers = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self._finish_after_last(numbers, batch_idx, dataloader_idx)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """As for validation."""
        self._finish_after_last(trainer.num_test_batches, batch_idx, dataloader_idx)

    def _finish_after_last(self, numbers: Any, batch_idx: int, dataloader_idx: int) -> None:
        numbers = numbers if isinstance(numbers, list) else [numbers]
        if dataloader_idx == len(numbers) - 1 and batch_idx + 1 == numbers[-1]:
            self._finish()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the others, and frees what is gathered."""
        self._end(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins."""
        self._start(trainer, pl_module)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the others, and frees what is gathered."""
        self._end(pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins."""
        self._start(trainer, pl_module)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the others, and frees what is gathered."""
        self._end(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves the model as it was."""
        if self._lockstep is not None:
            self._lockstep.stop()
            self._lockstep = None
