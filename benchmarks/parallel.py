"""A training step on 2 processes: LitLLM under ddp and MeshStrategy, bare torch loops, and Lightning's own strategy.

All train the same Transformer on the same data with the same AdamW, four micro-batches a step and clipping by norm,
over gloo with one thread each; fresh in each round, rounds interleaved, medians. Then what benchmarks.saving measures.

    python -m benchmarks.parallel [--rounds 5] [--steps 2] [--saving_rounds 5]

Without torchrun's environment it starts its 2 processes itself.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from benchmarks.common import machine, save, table
from benchmarks.saving import Saves
from lit_llm import LitLLM, ModelConfig, Transformer
from lit_llm.optim import OptimizerConfig, build_optimizer
from lit_llm.parallel import DataParallelStrategy, MeshStrategy, local_bytes

RANKS, MICRO, ROWS, SEQ, VOCAB = 2, 4, 2, 64, 4096
MODEL = {"vocab_size": VOCAB, "hidden_size": 256, "num_hidden_layers": 6, "max_position_embeddings": SEQ}
SAVED = {"vocab_size": 8192, "hidden_size": 384, "num_hidden_layers": 4, "max_position_embeddings": SEQ}
ADAMW = {"lr": 1e-3}
CLIP = 1.0
Batch = dict[str, Tensor]


def batches(number: int) -> list[Batch]:
    """This process's micro-batches; no two processes have the same."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randint(0, VOCAB, (number, ROWS, SEQ + 1), generator=generator)
    return [{"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()} for ids in rows]


class Counts(TorchDispatchMode):
    """Collectives, by whoever starts them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # so that what a DTensor's operator sends comes here as well
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Watch:
    """Seconds of each step after the first; with ``count`` what the last step communicates and what is held."""

    def __init__(self, steps: int, count: bool) -> None:
        self.steps, self.count = steps, count
        self.ends: list[float] = []
        self.mode: Any = None
        self.held: dict[str, float] = {}

    def micro_batch_begins(self, number: int) -> None:
        if self.count and number == (self.steps - 1) * MICRO:
            self.mode = Counts()
            self.mode.__enter__()

    def micro_batch_ends(self, number: int, model: Any, optimizer: Any) -> None:
        if self.count and number == self.steps * MICRO - 2:
            self.held["waiting"] = local_bytes(_gradients(model))
        if (number + 1) % MICRO:
            return
        self.ends.append(time.perf_counter())
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
            states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
            self.held["parameters"] = local_bytes(model.parameters())
            self.held["optimizer"] = local_bytes(states)
            parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
            self.held["weights"] = float(sum(p.detach().double().square().sum() for p in parts))

    @property
    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


def _gradients(model: Any) -> list[Tensor]:
    """What has been added up so far, split or whole."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for part in model.modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:
                for one in group.fsdp_params:
                    whole = one.unsharded_accumulated_grad
                    if whole is None and hasattr(one, "_unsharded_param"):
                        whole = one._unsharded_param.grad
                    found += [] if whole is None else [whole]
    return found


def split(model: Any, mesh: Any = None) -> Any:
    """As torch's tutorial does: each block, then the root."""
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    return fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)


def bare_loop(wrap: Callable[[Any], Any]) -> Callable[[Watch], None]:
    """Forward, backward, clip, AdamW, and no communication before the last micro-batch."""

    def run(watch: Watch) -> None:
        model = wrap(Transformer(ModelConfig(**MODEL)).train())
        optimizer = build_optimizer(model, OptimizerConfig(**ADAMW))
        for number, batch in enumerate(batches(watch.steps * MICRO)):
            watch.micro_batch_begins(number)
            last = (number + 1) % MICRO == 0
            waits: Any = contextlib.nullcontext()
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            elif not last:
                waits = model.no_sync()
            with waits:
                loss, count = model(batch["input_ids"], labels=batch["labels"])
                (loss / count / MICRO).backward()
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            watch.micro_batch_ends(number, model, optimizer)

    return run


class Hooks(L.Callback):
    """Brings a Watch into a Trainer."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.watch.micro_batch_begins(batch_idx)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.watch.micro_batch_ends(batch_idx, module.model, trainer.optimizers[0])


class Plain(L.LightningModule):
    """What a user of Lightning's ModelParallelStrategy writes."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = split(Transformer(ModelConfig(**MODEL)), self.device_mesh["data_parallel"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, count = self.model(batch["input_ids"], labels=batch["labels"])
        return loss / count

    def configure_optimizers(self) -> Any:
        return build_optimizer(self.model, OptimizerConfig(**ADAMW))


def lit(config: dict[str, Any]) -> LitLLM:
    return LitLLM(config=config, seed=0, optimizer=ADAMW, schedule={"name": "constant", "warmup_steps": 0})


def trainer(strategy: Any, folder: str, steps: int, callback: L.Callback) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_steps=steps,
        accumulate_grad_batches=MICRO,
        gradient_clip_val=CLIP,
        callbacks=[callback],
        default_root_dir=folder,
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fitted(strategy: Callable[[], Any], module: Callable[[], Any]) -> Callable[[Watch], None]:
    def run(watch: Watch) -> None:
        with tempfile.TemporaryDirectory() as folder:
            fit = trainer(strategy(), folder, watch.steps, Hooks(watch))
            fit.fit(module(), DataLoader(batches(watch.steps * MICRO), batch_size=None))

    return run


def ours(**options: Any) -> Callable[[Watch], None]:
    return fitted(lambda: MeshStrategy(**options), lambda: lit(MODEL))


BARE_REPLICAS, BARE_SHARDS = "bare loop, DistributedDataParallel", "bare loop, fully_shard"
REPLICAS = (BARE_REPLICAS, "LitLLM, ddp", "LitLLM, replicate 2")
CONTENDERS: dict[str, Callable[[Watch], None]] = {
    BARE_REPLICAS: bare_loop(lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True)),
    "LitLLM, ddp": fitted(lambda: DataParallelStrategy(), lambda: lit(MODEL)),
    BARE_SHARDS: bare_loop(split),
    "LitLLM, shard 2": ours(shard=2),
    "LitLLM, shard 2, prefetch 0": ours(shard=2, prefetch=0),
    "LitLLM, shard 2, reshard_after_forward false": ours(shard=2, reshard_after_forward=False),
    "LitLLM, shard 2, reduce_every_micro_batch": ours(shard=2, reduce_every_micro_batch=True),
    "LitLLM, replicate 2": ours(replicate=2, shard=1),
    "Lightning's ModelParallelStrategy": fitted(
        lambda: ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1), Plain
    ),
}
COLLECTIVES = {
    "reduce-scatters": ("_reduce_scatter_base_",),
    "all-gathers": ("_allgather_base_",),
    "all-reduces": ("allreduce_", "all_reduce"),
}


def steps(rounds: int, number: int) -> list[dict[str, Any]]:
    """Times, bytes and collectives of each contender, as rank 0 sees them."""
    found: dict[str, dict[str, Any]] = {}
    for name, run in CONTENDERS.items():  # also warms up
        run(watch := Watch(2, count=True))
        found[name] = {"contender": name, "seconds": [], "collectives": dict(watch.mode.calls), **watch.held}
    for _ in range(rounds):
        for name, run in CONTENDERS.items():
            gc.collect()
            dist.barrier()
            run(watch := Watch(1 + number, count=False))
            found[name]["seconds"] += watch.seconds
    [first, *others] = [one["weights"] for one in found.values()]
    assert all(abs(one / first - 1) < 1e-5 for one in others), f"not the same training: {first}, {others}"
    return list(found.values())


def checkpoints(rounds: int) -> dict[str, Any]:
    saves, module = Saves(rounds), lit(SAVED)
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        trainer(MeshStrategy(shard=RANKS), shared[0], 1, saves).fit(module, DataLoader(batches(MICRO), batch_size=None))
        dist.barrier()
    return {"parameters": sum(p.numel() for p in module.parameters()), "seconds": saves.seconds}


def show(data: dict[str, Any]) -> None:
    seconds, mib = {one["contender"]: one["seconds"] for one in data["steps"]}, 2**20
    rows = []
    for one in data["steps"]:
        mine, calls = one["seconds"], one["collectives"]
        median = statistics.median(mine)
        # Steps of one round against each other, as the machine's load changes between rounds.
        peer = seconds[BARE_REPLICAS if one["contender"] in REPLICAS else BARE_SHARDS]
        ratio = statistics.median(a / b for a, b in zip(mine, peer, strict=True))
        tokens = RANKS * MICRO * ROWS * SEQ / median
        spread = f"{min(mine) * 1e3:.0f}-{max(mine) * 1e3:.0f}"
        held = (2 * one["parameters"] + one["optimizer"]) / mib
        moved = [sum(calls.get(name, 0) for name in names) for names in COLLECTIVES.values()]
        name, waiting = one["contender"], one["waiting"] / mib
        rows.append([name, median * 1e3, spread, ratio, tokens, held, waiting, *moved])
    headers = [
        "",
        "ms/step",
        "range",
        "x bare loop",
        "tokens/s",
        "MiB held",
        "MiB of gradients in between",
        *COLLECTIVES,
    ]
    print(table(headers, rows))
    print(f"\n{data['checkpoints']['parameters']:,} parameters with AdamW's state:")
    timed = [[name, statistics.median(s), min(s), max(s)] for name, s in data["checkpoints"]["seconds"].items()]
    print(table(["", "s", "least", "most"], timed))


def main() -> None:
    """Prints the tables and writes benchmarks/results/parallel.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each contender in a round")
    parser.add_argument("--saving_rounds", type=int, default=5)
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS), "-m"]
        own = "benchmarks.parallel"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        raise SystemExit(subprocess.run([sys.executable, *launch, own, *sys.argv[1:]], env=environment).returncode)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data: dict[str, Any] = {"load_before": os.getloadavg(), "steps": steps(arguments.rounds, arguments.steps)}
    data["checkpoints"] = checkpoints(arguments.saving_rounds)
    data["load_after"] = os.getloadavg()
    if dist.get_rank() == 0:
        print(machine())
        show(data)
        print(f"written to {save('parallel', data)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
