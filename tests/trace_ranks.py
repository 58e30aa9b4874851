"""Fits that record traces, in one process and on real ranks, and what their traces hold."""

from __future__ import annotations

import gzip
import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader

from lit_llm import LitLLM
from lit_llm.callbacks import TraceCapture
from lit_llm.parallel import MeshStrategy
from tests.test_step import SEQ, VOCAB, micro_batches, trainer
from tests.training import MODEL

SMALL = {**MODEL, "num_hidden_layers": 1}


class Plain(L.LightningModule):
    """A module that has no boundary between its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(SEQ, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(batch["input_ids"].float()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class At(Callback):
    """Does something once, in the middle of a step."""

    def __init__(self, step: int, what: Callable[[], Any], ranks: tuple[int, ...] = (0,)) -> None:
        self.step, self.what, self.ranks = step, what, ranks

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.global_rank in self.ranks:
            self.step = -1
            self.what()


def capture(**options: Any) -> TraceCapture:
    """A window of one step, soon."""
    return TraceCapture(**{"start": 0, "active": 1, "analyze": False, **options})


def fit(
    folder: str | Path,
    *callbacks: Callback,
    steps: int = 6,
    module: L.LightningModule | None = None,
    validate: bool = False,
    logger: Logger | None = None,
    resume: str | None = None,
    **options: Any,
) -> L.Trainer:
    """Trains a tiny model; gives its Trainer."""
    torch.manual_seed(0)
    run = trainer(str(folder), callbacks=list(callbacks), **{"max_steps": steps, **options})
    run.logger = logger
    data = [DataLoader(micro_batches(number), batch_size=None) for number in (64, 2)]
    run.fit(module or LitLLM(config=SMALL, vocab_size=VOCAB, seq_len=SEQ), *data[: 1 + validate], ckpt_path=resume)
    return run


def read(path: Path) -> dict[str, Any]:
    """A trace."""
    with gzip.open(path) as file:
        return json.load(file)


def annotations(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the host, by start."""
    events = trace["traceEvents"]
    found = [one for one in events if one["ph"] == "X" and one.get("cat") == "user_annotation"]
    return sorted(found, key=lambda one: one["ts"])


def names(trace: dict[str, Any]) -> set[str]:
    """Of all annotations."""
    return {one["name"] for one in annotations(trace)}


def steps_of(trace: dict[str, Any]) -> list[int]:
    """The numbers of the step marks, in their order."""
    marks = [one["name"] for one in annotations(trace)]
    return [int(name.partition("#")[2]) for name in marks if name.startswith("ProfilerStep#")]


def files(folder: str | Path) -> dict[str, list[int]]:
    """All files of a run's traces with the steps in them, by ``window/name``."""
    root = Path(folder, "traces")
    paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(path.relative_to(root)): steps_of(read(path)) for path in paths if path.name.endswith(".json.gz")}


def lies_in(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether an event lies within another."""
    return other["ts"] <= one["ts"] and one["ts"] + one["dur"] <= other["ts"] + other["dur"]


def both(window: str, steps: list[int]) -> dict[str, list[int]]:
    """What :func:`files` gives of a window on two ranks."""
    return {f"{window}/rank-0000{rank}.json.gz": steps for rank in (0, 1)}


# On two ranks


def rank_cases(folder: str) -> dict[str, Any]:
    """Fits under ddp, and one that is split, one after the other."""
    rank, found = int(os.environ["RANK"]), {}
    ddp = {"devices": 2, "strategy": "ddp"}

    fit(f"{folder}/twice", capture(active=2), **ddp, accumulate_grad_batches=2)
    fit(f"{folder}/twice", capture(active=2), **ddp)

    sentinel = Path(folder, "asked", "traces", "capture")
    sentinel.parent.mkdir(parents=True, exist_ok=True)
    ask = At(2, sentinel.touch)
    fit(f"{folder}/asked", ask, capture(start=None, active=2), **ddp, steps=9)
    found["sentinel_is_gone"] = rank != 0 or not sentinel.exists()

    before = signal.getsignal(signal.SIGUSR2)
    ask = At(3, lambda: os.kill(os.getpid(), signal.SIGUSR2), ranks=(1,))
    fit(f"{folder}/signalled", ask, capture(start=1), **ddp, steps=9)
    found["handler_is_back"] = signal.getsignal(signal.SIGUSR2) == before

    fit(f"{folder}/listed", capture(ranks=[1]), **ddp)
    fit(f"{folder}/split", capture(), strategy=MeshStrategy(shard=2), devices=2, steps=3)

    sentinel = Path(folder, "plain", "traces", "capture")
    sentinel.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(f"{folder}/plain", At(4, sentinel.touch), capture(), module=Plain(), **ddp, steps=7)
    found["plain"] = [str(one.message) for one in told if "a trace was asked for" in str(one.message)]
    return found


def rank_failure(folder: str) -> str:
    """Rank 1 fails amid a window."""

    def fail() -> None:
        raise ArithmeticError("rank 1 has had enough")

    try:
        fit(folder, At(3, fail, ranks=(1,)), capture(active=3), devices=2, strategy="ddp")
    except Exception as error:
        return f"{type(error).__name__}: {error} / {error.__cause__}"
    return "nothing"


class TermAt(At):
    """Ends the run by a signal to rank 0."""

    def __init__(self, step: int) -> None:
        super().__init__(step, lambda: os.kill(os.getpid(), signal.SIGTERM))
