"""Seconds to save and to load a model that is split over processes: a folder, one file, and what torch itself takes.

The folder and the file are a run's whole checkpoint, flushed to the disk and checked; torch's are the same tensors, and
neither. The part of benchmarks.parallel that deals with checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class Saves(L.Callback):
    """Saves and loads after the first step, interleaved."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.seconds: dict[str, list[float]] = {}

    def _time(self, name: str, action: Callable[[], Any]) -> Any:
        dist.barrier()
        start = time.perf_counter()
        result = action()
        dist.barrier()  # done when all are
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1 and not self.seconds:
            for _ in range(self.rounds):
                self._round(trainer, module, Path(trainer.default_root_dir))

    def _round(self, trainer: Any, module: Any, root: Path) -> None:
        strategy, dump = trainer.strategy, trainer._checkpoint_connector.dump_checkpoint
        for name, folder in (("folder", True), ("one file", False)):
            strategy._save_distributed_checkpoint = folder
            path = root / f"{name}.ckpt"
            self._time(f"{name}, save", lambda path=path: strategy.save_checkpoint(dump(), path))
            self._time(f"{name}, load", lambda path=path: self._load(strategy, path))
            start = time.perf_counter()
            fresh = root / f"{name}-{len(self.seconds[f'{name}, save'])}.ckpt"  # which never replaces
            write = self._time(
                f"{name}, async_save: blocked",
                lambda fresh=fresh: strategy.write_in_background(dump(), fresh),
            )
            error = write.wait()
            assert error is None, error
            dist.barrier()
            self.seconds.setdefault(f"{name}, async_save: written", []).append(time.perf_counter() - start)
        self._peers(trainer, module, root)

    def _load(self, strategy: Any, path: Path) -> None:
        content = strategy.load_checkpoint(path)
        strategy.load_model_state_dict(content)
        strategy.load_optimizer_state_dict(content)

    def _peers(self, trainer: Any, module: Any, root: Path) -> None:
        state = {name: value.detach() for name, value in module.state_dict().items()}
        for number, values in trainer.optimizers[0].state_dict()["state"].items():
            state |= {f"{number}.{key}": value for key, value in values.items() if value.ndim}
        bare = root / "bare"
        self._time("torch: dcp.save of the same tensors", lambda: dcp.save(state, checkpoint_id=bare))
        self._time("torch: dcp.load", lambda: dcp.load(state, checkpoint_id=bare))
        whole = {name: value.full_tensor() for name, value in state.items()}
        if dist.get_rank() == 0:
            self._alone("torch: torch.save of whole tensors, one process", lambda: torch.save(whole, root / "bare.pt"))
            self._alone("torch: torch.load", lambda: torch.load(root / "bare.pt"))
        dist.barrier()

    def _alone(self, name: str, action: Callable[[], Any]) -> None:
        start = time.perf_counter()
        action()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
