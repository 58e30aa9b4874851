"""The table of dtypes against what two real ranks use."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lit_llm import LitLLM
from lit_llm.parallel import DataParallelStrategy, MeshStrategy
from lit_llm.parallel.dtypes import DDP, HYBRID, REPLICAS, SHARDS, SINGLE, TABLE, Dtypes, as_markdown
from tests.distributed import run_ranks
from tests.test_ddp import Wire
from tests.test_step import SEQ, VOCAB, micro_batches, trainer
from tests.training import MODEL


class Products(TorchDispatchMode):
    """Dtypes of the operands of matrix products."""

    def __init__(self, found: set[torch.dtype]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear"):
            self.found.update(one.dtype for one in args if isinstance(one, Tensor))
        return func(*args, **(kwargs or {}))


class Looks(L.Callback):
    """Notes dtypes where they are used."""

    def __init__(self) -> None:
        self.found: dict[str, set[Any]] = {field.name: set() for field in dataclasses.fields(Dtypes)[2:]}
        self.shards = False

    def on_train_start(self, trainer: Any, module: Any) -> None:
        found, block = self.found, module.transformer.layers[1]
        stored = dict(block.named_parameters())
        self.shards = any(hasattr(p, "to_local") for p in stored.values())

        def before(_: Any, args: Any) -> None:
            found["rotary"] |= {table.dtype for table in args[1].rope}
            if self.shards:
                found["gathered"] |= {p.dtype for p in block.parameters() if not hasattr(p, "to_local")}
            self.mode = Products(found["compute"])
            self.mode.__enter__()

        # Both hooks come after those of fully_shard, and the products of what it does are not seen.
        block.self_attn.register_forward_pre_hook(lambda _, args: before(_, (None, args[-1])))
        block.self_attn.register_forward_hook(lambda *_: self.mode.__exit__(None, None, None))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.found["gradients"] |= {p.grad.dtype for group in optimizer.param_groups for p in group["params"]}

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.found["loss"].add(loss.dtype)
        self.wire = Wire()
        self.wire.__enter__()

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.wire.__exit__(None, None, None)
        self.found["reduction"] |= {dtype for dtype, _ in self.wire.sent}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found["parameters"] |= {p.dtype for p in module.parameters()}
        if trainer.global_step == 0:
            return
        self.found["loss"].add(trainer.callback_metrics["train/loss"].dtype)
        for state in trainer.optimizers[0].state.values():
            self.found["optimizer"] |= {value.dtype for name, value in state.items() if name != "step"}

    def row(self) -> dict[str, str]:
        names = {name: sorted(str(one).removeprefix("torch.") for one in seen) for name, seen in self.found.items()}
        return {name: " and ".join(seen) or "-" for name, seen in names.items()}


def strategies(ranks: int) -> dict[str, Any]:
    shards = ranks // 2
    return {
        SINGLE: "auto",
        DDP: "ddp",
        REPLICAS: DataParallelStrategy(),
        SHARDS: MeshStrategy(shard=ranks),
        HYBRID: MeshStrategy(replicate=2, shard=shards),
    }


def table(folder: str, ranks: int, hybrid_only: bool = False) -> list[dict[str, str]]:
    """The rows as found; the single device's are for :func:`single`."""
    rows = [row for row in TABLE if row.strategy != SINGLE and (row.strategy == HYBRID or not hybrid_only)]
    return [looked(folder, row, ranks) for row in rows]


def looked(folder: str, row: Dtypes, ranks: int) -> dict[str, str]:
    """Two steps of two micro-batches."""
    module = LitLLM(config=MODEL, vocab_size=VOCAB, seq_len=SEQ, schedule={"total_steps": 9})
    looks = Looks()
    # For a CPU Lightning makes bf16-mixed of 16-mixed. With the usual first scale the first steps overflow.
    half: dict[str, Any] = {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=128.0))}
    run = trainer(
        folder,
        devices=ranks,
        strategy=strategies(max(ranks, 2))[row.strategy],
        max_steps=2,
        accumulate_grad_batches=2,
        callbacks=[looks],
        **(half if row.precision == "16-mixed" else {"precision": row.precision}),
    )
    run.fit(module, DataLoader(micro_batches(4), batch_size=None))
    assert run.precision == row.precision
    assert not list(module.buffers())
    return {"precision": row.precision, "strategy": row.strategy, **looks.row()}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, str]]]:
    """What both ranks found."""
    return run_ranks("tests.test_dtypes:table", 2, folder=str(tmp_path_factory.mktemp("dtypes")), ranks=2)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.precision}, {row.strategy}")
def test_the_table_is_what_ranks_use(two_ranks: Any, row: Dtypes, tmp_path: Any) -> None:
    if row.strategy == SINGLE:
        assert looked(str(tmp_path), row, 1) == dataclasses.asdict(row)
        return
    for rank in two_ranks:
        [found] = [one for one in rank if (one["precision"], one["strategy"]) == (row.precision, row.strategy)]
        assert found == dataclasses.asdict(row)


@pytest.mark.slow
def test_two_by_two_ranks_use_the_same(tmp_path: Any) -> None:
    expected = [dataclasses.asdict(row) for row in TABLE if row.strategy == HYBRID]
    assert len(expected) == 3
    for found in run_ranks("tests.test_dtypes:table", 4, folder=str(tmp_path), ranks=4, hybrid_only=True):
        assert found == expected


def test_the_table_has_each_pair_once_and_shows_all() -> None:
    pairs = [(row.precision, row.strategy) for row in TABLE]
    assert len(set(pairs)) == len(pairs) == 18
    lines = as_markdown().splitlines()
    assert len(lines) == 20
    assert {line.count("|") for line in lines} == {11}
    assert all(row.reduction == "float32" for row in TABLE if row.strategy != SINGLE), "DESIGN: gradients reduce in it"
