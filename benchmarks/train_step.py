"""Tokens per second of a training step: transformers' Llama in a plain loop, our Transformer in the same loop, and
LitLLM under a Lightning Trainer; the same shape, data and fused AdamW, interleaved in one run, medians.

    python benchmarks/train_step.py [--sizes small,medium] [--rounds 5]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import machine, save, table

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab": 512, "hidden": 64, "layers": 2, "heads": 4, "kv": 2, "ffn": 128, "batch": 4, "seq": 64},
    "small": {"vocab": 8192, "hidden": 288, "layers": 6, "heads": 6, "kv": 6, "ffn": 768, "batch": 8, "seq": 256},
    "medium": {"vocab": 32000, "hidden": 768, "layers": 12, "heads": 12, "kv": 4, "ffn": 2048, "batch": 2, "seq": 512},
}
Run = Callable[[int], list[float]]


def fields(size: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": size["vocab"],
        "hidden_size": size["hidden"],
        "intermediate_size": size["ffn"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv"],
        "max_position_embeddings": size["seq"],
    }


def plain_loop(model: torch.nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], ids: Tensor) -> Run:
    """Forward, backward, clip, AdamW; gives the seconds of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run(steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            loss_of(ids[:, :-1], ids[:, 1:]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - start)
        return seconds

    return run


def transformers_llama(size: dict[str, Any], ids: Tensor) -> Run:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**fields(size), attn_implementation="sdpa", use_cache=False, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).train()

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        # shift_labels: the labels are shifted already, as ours are.
        return model(input_ids=inputs, labels=labels, shift_labels=labels.contiguous()).loss

    return plain_loop(model, loss_of, ids)


def ours(size: dict[str, Any], ids: Tensor) -> Run:
    from lit_llm import ModelConfig, Transformer

    model = Transformer(ModelConfig(**fields(size))).train()

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        loss_sum, count = model(inputs, labels=labels)
        return loss_sum / count

    return plain_loop(model, loss_of, ids)


def lightning_trainer(size: dict[str, Any], ids: Tensor) -> Run:
    import lightning as L

    from lit_llm import LitLLM

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, *args: Any) -> None:
            self.ends.append(time.perf_counter())

    lit = LitLLM(config=fields(size), optimizer={"lr": 1e-4})
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def run(steps: int) -> list[float]:
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            trainer = L.Trainer(
                accelerator="cpu",
                max_steps=steps + 1,  # the first step has no beginning to count from
                gradient_clip_val=1.0,
                callbacks=[clock],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            trainer.fit(lit, torch.utils.data.DataLoader([batch] * (steps + 1), batch_size=None))
        return [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)]

    return run


CONTENDERS = {
    "transformers, plain loop": transformers_llama,
    "lit-llm, plain loop": ours,
    "lit-llm, Trainer": lightning_trainer,
}


def main() -> None:
    """Prints the table and writes benchmarks/results/train_step.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="small,medium", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps of each contender in a round")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows, data = [], []
    for name in arguments.sizes.split(","):
        size = SIZES[name]
        torch.manual_seed(0)
        ids = torch.randint(0, size["vocab"], (size["batch"], size["seq"] + 1))
        runs = {contender: make(size, ids) for contender, make in CONTENDERS.items()}
        seconds: dict[str, list[float]] = {contender: [] for contender in runs}
        for run in runs.values():
            run(1)
        for _ in range(arguments.rounds):
            for contender, run in runs.items():
                seconds[contender] += run(arguments.steps)
        first = statistics.median(next(iter(seconds.values())))
        for contender, samples in seconds.items():
            median = statistics.median(samples)
            rate = size["batch"] * size["seq"] / median
            rows.append([name, contender, median * 1e3, rate, first / median])
            data.append({"size": name, "contender": contender, "seconds": samples, "tokens_per_second": rate})
    print(machine())
    print(table(["size", "contender", "ms/step", "tokens/s", "x transformers"], rows))
    print(f"written to {save('train_step', data)}")


if __name__ == "__main__":
    main()
