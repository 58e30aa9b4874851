"""Loaders and samplers between the order of the rows and Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from lit_llm.data.mixed_rows import MixedRows
from lit_llm.data.order import EvalOrder, PositionSource, TrainOrder
from lit_llm.data.prompts import Prompt
from lit_llm.data.rows import PackedRows, TokenRows

Rows = TokenRows | PackedRows | MixedRows


def to_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    """Arrays as tensors that share their memory; torch's own conversion takes as long as the gathering of the rows."""
    return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in batch.items()}


class TokenLoader(DataLoader):
    """A DataLoader that Lightning may call resumable: its position is a function of the optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""


class _BatchSampler(DistributedSampler, SequentialSampler):
    """A sampler whose items are whole micro-batches.

    Lightning leaves a DistributedSampler in place under ddp, and a SequentialSampler when it overfits a few batches.
    """

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("subclasses say what comes")


class TrainSampler(_BatchSampler):
    """This rank's micro-batches, from the step on that comes next."""

    def __init__(self, rows: Rows, order: TrainOrder, next_position: PositionSource, endless: Any) -> None:
        super().__init__(rows, order.num_replicas, order.rank, shuffle=False)  # type: ignore[arg-type]
        self.order, self._next_position, self._endless = order, next_position, endless

    def __iter__(self) -> Iterator[Any]:
        step, begun = self._next_position()
        return self.order.epoch_from(step, endless=self._endless(), begun=begun)

    def __len__(self) -> int:
        return self.order.micro_batches_per_epoch


class EvalSampler(_BatchSampler):
    """This rank's evaluation batches."""

    def __init__(self, rows: Rows, order: EvalOrder) -> None:
        super().__init__(rows, order.num_replicas, order.rank, shuffle=False)  # type: ignore[arg-type]
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class PromptBatches:
    """The prompts of one rank, dealt in turn, in batches; a rank that gets none has one empty batch.

    Lightning calls no hook of a rank without batches, and the others would wait for it.
    """

    def __init__(self, prompts: list[Prompt], batch_size: int, rank: int = 0, num_replicas: int = 1) -> None:
        mine = list(enumerate(prompts))[rank::num_replicas]
        self._batches = [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)] or [[]]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, list[Any]]]:
        for batch in self._batches:
            yield {"index": [index for index, _ in batch], "prompt": [prompt for _, prompt in batch]}
