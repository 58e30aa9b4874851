"""What RankMonitor costs: steps of two ddp ranks on a CPU with and without it, in turns.

    python -m benchmarks.rank_monitor --rounds 7

A round trains in each way once. Two figures: the median step of each, over all rounds, and the time inside the
monitor's own hooks, its collective and the stand-ins of the blocks' calls included, as a share of a step, which noise
moves less.
Figures go to benchmarks/results/rank_monitor.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.common import save, table
from benchmarks.steps import StepSeconds

_HOOKS = (
    "on_train_batch_start", "on_before_backward", "on_train_batch_end", "on_validation_start", "on_validation_end",
    "on_train_end",
)  # fmt: skip


def _own_time(monitor: Any) -> list[float]:
    """Makes a monitor's hooks add up their seconds in the list."""
    total = [0.0]
    for name in _HOOKS:
        call = getattr(monitor, name)

        def timed(*args: Any, _call: Any = call, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return _call(*args, **kwargs)
            finally:
                total[0] += time.perf_counter() - start

        setattr(monitor, name, timed)
    return total


def _train(folder: str, steps: int, every: int, monitored: bool) -> tuple[list[float], float]:
    from lit_llm import LitLLM
    from lit_llm.callbacks import RankMonitor

    shape = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6}
    lit = LitLLM(config={**shape, "num_key_value_heads": 6}, vocab_size=512, seq_len=128)
    ids = torch.randint(512, (4, 129), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}] * steps
    watch, monitor = StepSeconds(3), RankMonitor(every)
    own = _own_time(monitor)
    trainer = L.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=2, strategy="ddp", max_steps=steps, logger=False,
        callbacks=[*([monitor] if monitored else []), watch], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(lit, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return watch.seconds, own[0]


def worker(folder: str, rounds: int, steps: int, every: int) -> dict[str, Any]:
    """On each rank."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    own = 0.0
    for number in range(rounds):
        for monitored in (False, True) if number % 2 else (True, False):
            found, inside = _train(folder, steps, every, monitored)
            seconds[monitored] += found
            own += inside
    return {"with": statistics.median(seconds[True]), "without": statistics.median(seconds[False]),
            "own": own / rounds / steps}  # fmt: skip


def stand_in_seconds(calls: int = 20_000) -> float:
    """That a block's call takes longer while it is measured."""
    from lit_llm.callbacks.monitor_timing import ForwardTimer

    timer = ForwardTimer(torch.nn.Module(), torch.device("cpu"))
    timed = timer._timed(lambda: None)
    timer.begin(0)
    start = time.perf_counter()
    for _ in range(calls):
        timed()
    return (time.perf_counter() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark of the live monitor.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every_n_steps", type=int, default=20)
    arguments = parser.parse_args()
    from tests.distributed import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(
            "benchmarks.rank_monitor:worker", 2, folder=folder, rounds=arguments.rounds, steps=arguments.steps,
            every=arguments.every_n_steps, timeout=1800,
        )[0]  # fmt: skip
    layers, measured = 6, min(5, arguments.every_n_steps) / arguments.every_n_steps
    own = found["own"] + layers * measured * stand_in_seconds()
    found.update(own=own, own_share=own / found["without"], of_without=found["with"] / found["without"])
    share = f"{found['own_share']:.2%}"
    rows = [[1000 * found["without"], 1000 * found["with"], found["of_without"], 1000 * own, share]]
    print(table(("step, ms", "with monitor, ms", "of it", "inside the monitor, ms a step", "share of a step"), rows))
    print(f"written to {save('rank_monitor', {**vars(arguments), **found}).name}")


if __name__ == "__main__":
    main()
