"""One optimizer step: gradient, norm and weights on two ranks against one big batch, and what it waits for."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lit_llm import LitLLM
from lit_llm.training.lightning_loop import is_mended
from tests.distributed import run_ranks
from tests.training import MODEL

VOCAB, SEQ = 61, 12


def micro_batches(number: int, seed: int = 0, without_labels: int | None = None) -> list[dict[str, Tensor]]:
    """Batches of 2 rows whose labels are ignored at random, from none to nearly all; one of them has none at all."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(number):
        ids = torch.randint(VOCAB, (2, SEQ + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < (index % 5) / 5] = -100
        if index == without_labels:
            labels[:] = -100
        batches.append({"input_ids": ids[:, :-1], "labels": labels})
    return batches


class Steps(LitLLM):
    """A given optimizer, and a record of what each step was made of."""

    def __init__(self, optimizer_name: str = "sgd", sharded: bool = False, **options: Any) -> None:
        super().__init__(config=MODEL, vocab_size=VOCAB, seq_len=SEQ, seed=3, **options)
        self.optimizer_name, self.sharded = optimizer_name, sharded
        self.gradients: list[Tensor] = []
        self.norms: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-6, fused=self.optimizer_name == "fused")

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            if self.sharded:
                mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
                for block in self.transformer.layers:
                    fully_shard(block, mesh=mesh)
                fully_shard(self.transformer, mesh=mesh)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(flat(p.grad for p in self.parameters()))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.norms.append(float(self.trainer.callback_metrics["train/grad_norm"]))


def flat(tensors: Any) -> Tensor:
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([t.detach().double().flatten() for t in whole])


def trainer(folder: str, **options: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return L.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        **{**quiet, **options},
    )


def rank_run(
    folder: str, number: int, optimizer: str, clip: float | None, without_labels: int | None, out: str, sharded: bool
) -> dict[str, Any]:
    """Each of two ranks takes every other micro-batch; two make a step."""
    rank = int(os.environ["RANK"])
    mine = micro_batches(number, without_labels=without_labels)[rank::2]
    module = Steps(optimizer, sharded)
    strategy: Any = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sharded else "ddp"
    run = trainer(folder, devices=2, strategy=strategy, accumulate_grad_batches=2, max_epochs=1, gradient_clip_val=clip)
    run.fit(module, DataLoader(mine, batch_size=None))
    weights = flat(module.parameters())
    if rank == 0:
        torch.save({"gradients": module.gradients, "weights": weights}, out)
    return {"norms": module.norms}


def big_batch_run(number: int, optimizer: str, clip: float | None, without_labels: int | None) -> dict[str, Any]:
    """The same steps written down plainly: all logits of the whole global batch in one process."""
    module = Steps(optimizer)
    module.configure_model()
    model = module.transformer
    chosen = module.configure_optimizers()
    batches = micro_batches(number, without_labels=without_labels)
    result: dict[str, Any] = {"gradients": [], "norms": []}
    for start in range(0, number, 4):
        window = batches[start : start + 4]
        ids, labels = (torch.cat([b[name] for b in window]) for name in ("input_ids", "labels"))
        torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
        result["gradients"].append(flat(p.grad for p in model.parameters()))
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        chosen.step()
        chosen.zero_grad()
    return {**result, "weights": flat(model.parameters())}


CASES: list[tuple[int, str, float | None, int | None, bool]] = [
    (20, "sgd", 0.3, None, False),
    (20, "adamw", 0.3, 6, False),
    (22, "fused", None, 21, False),  # the last window holds one micro-batch a rank, and one of them has no label
    (22, "sgd", 0.3, None, False),
    (22, "fused", 0.3, 6, True),
]
NAMES = ("number", "optimizer", "clip", "without_labels", "sharded")


def rank_runs(folder: str) -> list[dict[str, Any]]:
    """All cases, one after the other: a start takes longer than all of them."""
    return [
        rank_run(folder, out=f"{folder}/{index}.pt", **dict(zip(NAMES, case, strict=True)))  # type: ignore[arg-type]
        for index, case in enumerate(CASES)
    ]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    """What both ranks found in each case, and the folder with rank 0's tensors."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks("tests.test_step:rank_runs", 2, folder=str(folder))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_two_ranks_of_ragged_micro_batches_equal_one_big_batch(two_ranks: Any, index: int) -> None:
    number, optimizer, clip, without_labels, _ = CASES[index]
    folder, results = two_ranks
    ranks = [cases[index] for cases in results]
    got, expected = torch.load(folder / f"{index}.pt"), big_batch_run(number, optimizer, clip, without_labels)
    assert len(got["gradients"]) == len(expected["gradients"]) == -(-number // 4)
    # AdamW's root makes more of the last bits of the steps before: its later gradients are those of other weights.
    later = 1e-6 if optimizer == "sgd" else 1e-5
    for step, (mine, theirs) in enumerate(zip(got["gradients"], expected["gradients"], strict=True)):
        assert float((mine - theirs).abs().max()) <= (later if step else 1e-6)
    for rank in ranks:
        np.testing.assert_allclose(rank["norms"], expected["norms"], rtol=later, atol=later)
    assert float((got["weights"] - expected["weights"]).abs().max()) <= 1e-6


# What a step waits for


class Counted(TorchDispatchMode):
    """Counts reads of a tensor's value on the host by whose code asked for them."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.counts[f"item {_asker()}"] += 1
        return func(*args, **(kwargs or {}))


def _asker() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("lightning.", "lit_llm.", "torchmetrics.")):
            return name
        frame = frame.f_back  # type: ignore[assignment]
    return "other"


_COLLECTIVES = (
    "broadcast",
    "all_reduce",
    "barrier",
    "all_gather",
    "reduce",
    "broadcast_object_list",
    "all_gather_object",
)


class Watch(L.Callback):
    """Counts between the starts of the fifth and the last micro-batch."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.seen = first, last, 0
        self.counts: Counter[str] = Counter()
        self.steps = 0
        self.kept: list[bool] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(any(p.grad is not None for p in module.parameters()))
        if self.seen == self.first:
            self.steps = -trainer.global_step
            self.originals = {name: getattr(dist, name) for name in _COLLECTIVES}
            for name, original in self.originals.items():
                setattr(dist, name, self._counting(name, original))
            self.mode = Counted(self.counts)
            self.mode.__enter__()
        if self.seen == self.last:
            self.mode.__exit__(None, None, None)
            self.steps += trainer.global_step
            for name, original in self.originals.items():
                setattr(dist, name, original)
        self.seen += 1

    def _counting(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return original(*args, **kwargs)

        return call


class PlainLightning(L.LightningModule):
    """What the loop does to a module that mends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.head(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Shown(LitLLM):
    """Logs a metric for the progress bar at every micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss.detach(), prog_bar=True)
        return loss


def watched(folder: str, plain: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp", "accumulate_grad_batches": 4, "max_steps": 6}
    if plain:
        module: L.LightningModule = PlainLightning()
        data: list[Any] = [torch.randn(2, 4) for _ in range(24)]
    else:
        module = Shown(config=MODEL, vocab_size=VOCAB, seq_len=SEQ)
        data = micro_batches(24)
    watch = Watch(first=4, last=20)
    run = trainer(folder, callbacks=[watch], **{**options, "gradient_clip_val": None if plain else 1.0})
    run.log_every_n_steps = 100
    run.fit(module, DataLoader(data, batch_size=None))
    return {"counts": dict(watch.counts), "steps": watch.steps, "kept": watch.kept[4:]}


def both_watched(folder: str) -> list[dict[str, Any]]:
    """A LitLLM's fit, then one that mends nothing."""
    return [watched(folder, plain=False), watched(folder, plain=True)]


@pytest.fixture(scope="module")
def watched_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both ranks counted."""
    return run_ranks("tests.test_step:both_watched", 2, folder=str(tmp_path_factory.mktemp("ranks")))


def test_nothing_of_lightnings_waits_between_steps(watched_ranks: Any) -> None:
    assert is_mended()
    for rank, _ in watched_ranks:
        assert rank["steps"] == 4
        assert not any(rank["kept"][::4]), "gradients are freed right after the step"
        counts = {name: number for name, number in rank["counts"].items() if not name.startswith("item lit_llm.ops.")}
        # Per optimizer step one reduction of the loss sum, the label tokens and what each rank reports. The loss on a
        # CPU looks at its labels (ops); nothing reads a value on the host elsewhere.
        assert counts == {"all_reduce": 4}


def test_lightning_still_needs_the_mending(watched_ranks: Any) -> None:
    """Fails once a version of Lightning no longer does these things: then lightning_loop.py can shrink."""
    for _, rank in watched_ranks:
        assert rank["counts"]["broadcast"] == 16
        assert rank["counts"]["item lightning.pytorch.loops.training_epoch_loop"] == 16
        assert sum(n for name, n in rank["counts"].items() if "logger_connector" in name or "apply_func" in name) >= 16
        assert all(rank["kept"][::4]), "gradients live until after the next forward"
