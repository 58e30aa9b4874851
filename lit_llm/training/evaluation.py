"""What validate, test and predict need on several ranks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.fsdp import FSDPModule

from lit_llm.model import Transformer
from lit_llm.parallel.lockstep import Lockstep
from lit_llm.parallel.report import is_sharded, reshard
from lit_llm.parallel.strategy import MeshStrategy
from lit_llm.training.lightning_loop import leave_signals, restore
from lit_llm.training.peers import AGAIN, PeerWatch


class EvaluationWatch(Callback):
    """Lets validate, test and predict end as a fit does: when a rank dies, and at SIGTERM.

    Args:
        timeout: seconds of silence after which a rank is gone.
    """

    def __init__(self, timeout: float) -> None:
        self._peers = PeerWatch(timeout, AGAIN)

    @staticmethod
    def attach(trainer: Any, timeout: float) -> None:
        """Puts one into a Trainer that is setting up, in place of an earlier one."""
        others = [one for one in trainer.callbacks if not isinstance(one, EvaluationWatch)]
        trainer.callbacks = [EvaluationWatch(timeout), *others]
        leave_signals(trainer)

    def _start(self, trainer: Trainer) -> None:
        self._peers.start(lambda: trainer.global_step, lambda: getattr(trainer.strategy.launcher, "procs", None) or [])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins."""
        self._start(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins."""
        self._start(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins."""
        self._start(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Finds out whether another rank is the cause."""
        self._peers.attach_to(exception)
        self._end(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends."""
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        self._peers.stop()
        restore(trainer)
        trainer.callbacks = [one for one in trainer.callbacks if one is not self]  # type: ignore[attr-defined]


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
        strategy = trainer.strategy
        if isinstance(strategy, MeshStrategy) and strategy.sizes.shard > 1:
            models = [part for part in module.modules() if isinstance(part, Transformer)]
            models = [model for model in models if any(is_sharded(p) for p in model.parameters())]
            if models:
                # What lies beside stays gathered, so that it asks nothing of a rank that is done.
                inside = {id(part) for model in models for part in model.modules()}
                for part in module.modules():
                    if isinstance(part, FSDPModule) and id(part) not in inside:
                        part.unshard()
                self._lockstep = Lockstep(models, strategy.shard_group)
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
