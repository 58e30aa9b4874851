"""Runs with the live monitor, in one process and on two ranks."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader

from lit_llm import LitLLM
from lit_llm.callbacks import RankMonitor, monitor
from lit_llm.model import Transformer
from lit_llm.parallel import MeshStrategy
from tests.test_step import SEQ, VOCAB, micro_batches
from tests.training import MODEL

SLEEP = 0.06
EVERY, STEPS = 4, 8


class Kept(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name = version = "kept"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(key.startswith("monitor/") for key in metrics):
            self.rows.append((step or 0, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Loader:
    """Batches that take their time."""

    def __init__(self, batches: list[Any], sleep: float) -> None:
        self.batches, self.sleep = batches, sleep

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        for batch in self.batches:
            time.sleep(self.sleep)
            yield batch


class Lit(LitLLM):
    """A block whose MLP takes its time."""

    def __init__(self, sleep: float = 0.0, **options: Any) -> None:
        super().__init__(config=MODEL, vocab_size=VOCAB, seq_len=SEQ, seed=3, **options)
        self.sleep = sleep
        self.slept = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.sleep:
            mlp: Any = self.transformer.layers[0].mlp
            mlp.register_forward_pre_hook(self._wait)

    @torch.compiler.disable
    def _wait(self, *_: Any) -> None:
        self.slept += 1
        time.sleep(self.sleep)


class Installed(Callback):
    """The steps in whose forward something is installed at the model."""

    def __init__(self) -> None:
        self.steps: dict[int, list[str]] = {}

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.steps[trainer.global_step] = things(module)


def things(module: Any) -> list[str]:
    """What a monitor can have put there: stand-ins and hooks."""
    layers = module.transformer.layers
    found = [f"call {i}" for i, block in enumerate(layers) if "timed" in str(block.__dict__.get("_compiled_call_impl"))]
    for part in module.modules():
        if hasattr(part, "_get_fsdp_state"):
            found += ["wait" for g in part._get_fsdp_state()._fsdp_param_groups for n in vars(g) if n == "unshard"]
    return found


def fit(
    folder: str,
    strategy: Any,
    *,
    data: float = 0.0,
    forward: float = 0.0,
    monitored: RankMonitor | None = None,
    steps: int = STEPS,
    accumulate: int = 1,
    validate: bool = False,
    others: tuple[Callback, ...] = (),
    **options: Any,
) -> tuple[Lit, Kept, list[str]]:
    """Trains; gives the module, what was logged and what was told."""
    torch._dynamo.reset()  # a block compiled for an earlier run would know nothing of this one's hooks
    said: list[str] = []
    monitor.rank_zero_warn = monitor.rank_zero_info = lambda text: said.append(text)  # type: ignore[assignment]
    kept = Kept()
    batches = micro_batches(steps * accumulate)
    loader: Any = Loader(batches, data)
    lit = Lit(forward, **options)
    trainer = L.Trainer(
        default_root_dir=folder, accelerator="cpu", strategy=strategy, max_steps=steps, logger=kept,
        callbacks=[*([monitored] if monitored else []), *others], enable_checkpointing=False, barebones=False,
        devices=2, accumulate_grad_batches=accumulate,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        num_sanity_val_steps=0, val_check_interval=3 if validate else None, check_val_every_n_epoch=None,
        limit_val_batches=2 if validate else 0,
    )  # fmt: skip
    held_out = DataLoader(batches, batch_size=None) if validate else None
    trainer.fit(lit, loader, held_out)
    return lit, kept, said


def in_ranks(rank: int, folder: str) -> dict[str, Any]:
    """All cases, in one start of the processes."""
    Transformer.compile_blocks = lambda self: [b.compile(backend="eager") for b in self.layers]  # type: ignore
    slow = SLEEP * (rank == 1)
    found: dict[str, Any] = {}

    def case(name: str, strategy: Any, **options: Any) -> Lit:
        lit, kept, said = fit(folder, strategy, monitored=RankMonitor(EVERY, min_ms=30), **options)
        found[name] = {"rows": kept.rows, "said": said, "slept": lit.slept, "left": things(lit)}
        return lit

    case("ddp, data", "ddp", data=slow)
    case("ddp, forward", "ddp", forward=slow, accumulate=2, activation_checkpointing="full")
    case("mesh, data", MeshStrategy(shard=2), data=slow, validate=True)
    case("mesh, forward, compiled", MeshStrategy(shard=2, prefetch=0), forward=slow, compile=True)
    case("ddp, equal", "ddp", data=SLEEP / 2, forward=SLEEP / 2)
    case("mesh, equal", MeshStrategy(shard=2), data=SLEEP / 2, forward=SLEEP / 2, compile=True)
    steps = Installed()
    fit(folder, MeshStrategy(shard=2), monitored=RankMonitor(7), others=(steps,), steps=14)
    found["installed"] = {step: len(there) for step, there in steps.steps.items()}
    counts = []
    for monitored in (None, RankMonitor(EVERY)):
        with counted() as counter:
            fit(folder, "ddp", monitored=monitored)
        counts.append(counter)
    counts[1].subtract(counts[0])
    found["collectives"] = {name: number for name, number in counts[1].items() if number}
    return found


SINGLE = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""What torch calls the gathering of one tensor: renamed in 2.13."""


class counted:
    """Counts the collectives that are asked for in Python."""

    NAMES = (
        *(SINGLE, "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier"),
        *(
            "broadcast",
            "broadcast_object_list",
            "gather",
            "gather_object",
            "reduce",
            "reduce_scatter_tensor",
            "scatter",
        ),
    )

    def __enter__(self) -> Counter[str]:
        counter: Counter[str] = Counter()
        self.before = {name: getattr(dist, name) for name in self.NAMES}
        for name, call in self.before.items():

            def counting(*args: Any, _name: str = name, _call: Any = call, **kwargs: Any) -> Any:
                counter[_name] += 1
                return _call(*args, **kwargs)

            setattr(dist, name, counting)
        return counter

    def __exit__(self, *_: Any) -> None:
        for name, call in self.before.items():
            setattr(dist, name, call)


def ranks_worker(folder: str) -> dict[str, Any]:
    return in_ranks(int(os.environ["RANK"]), folder)
