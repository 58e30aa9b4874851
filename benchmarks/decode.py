"""Tokens per second of greedy decoding: lit_llm's `generate` against transformers' Llama with the same weights.

Contenders: `plain loop`, transformers' model called token by token with a DynamicCache and argmax; `generate`, its own
method; and ours. All in one process, taking turns round by round, so that a busy machine slows all of them; medians of
the rounds are compared. A second table shows what a token costs as the past grows.

    python benchmarks/decode.py [--sizes xs,s,m] [--rounds 7] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_llm import GenerationConfig, ModelConfig, Transformer, generate
from lit_llm.generation import decode_one_token, prefill

SIZES: dict[str, dict[str, int]] = {
    "xs": {
        "vocab_size": 4096,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 352,
    },
    "s": {
        "vocab_size": 8192,
        "hidden_size": 288,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "intermediate_size": 768,
    },
    "m": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
    },
}


def make_models(size: str, context: int) -> tuple[Transformer, Any]:
    """Ours and theirs, with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = Transformer(ModelConfig(**SIZES[size], max_position_embeddings=context)).eval()
    theirs = LlamaForCausalLM(
        LlamaConfig(
            **SIZES[size],
            num_key_value_heads=ours.config.kv_heads,
            max_position_embeddings=context,
            rms_norm_eps=ours.config.rms_norm_eps,
        )
    ).eval()
    weights = ours.state_dict()
    theirs.load_state_dict({k if k.startswith("lm_head") else f"model.{k}": v for k, v in weights.items()})
    return ours, theirs


@torch.inference_mode()
def plain_loop(model: Any, ids: Tensor, new: int) -> Tensor:
    """The loop one would write with transformers: its model, its cache, argmax."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    tokens = [logits[:, -1].argmax(-1)]
    for _ in range(new - 1):
        logits = model(tokens[-1][:, None], past_key_values=cache).logits
        tokens.append(logits[:, -1].argmax(-1))
    return torch.stack(tokens, 1)


def contenders(size: str, batch: int, prompt: int, new: int) -> dict[str, Callable[[], Tensor]]:
    """The same work for each; they return the tokens (batch, new)."""
    ours, theirs = make_models(size, prompt + new)
    ids = torch.randint(SIZES[size]["vocab_size"], (batch, prompt), generator=torch.Generator().manual_seed(0))
    config = GenerationConfig(max_new_tokens=new, eos_token_id=[])
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return {
        "ours": lambda: torch.tensor([result.tokens for result in generate(ours, ids, config)]),
        "plain loop": lambda: plain_loop(theirs, ids, new),
        "generate": lambda: theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, prompt:],
    }


def compare(size: str, batch: int, prompt: int, new: int, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    calls = contenders(size, batch, prompt, new)
    tokens = {name: call() for name, call in calls.items()}  # also the warm-up
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        names = list(calls)
        for name in names[number % 3 :] + names[: number % 3]:
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "size": size,
        "batch": batch,
        "prompt": prompt,
        "new": new,
        "tokens_per_second": {name: batch * new / value for name, value in medians.items()},
        "ratio_to_plain_loop": medians["plain loop"] / medians["ours"],
        "ratio_to_generate": medians["generate"] / medians["ours"],
        "same_tokens": bool(all(torch.equal(tokens["ours"], other) for other in tokens.values())),
    }


def cost_per_token(size: str, batch: int, pasts: list[int], steps: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of one decode step behind pasts of different lengths, ours and the plain loop's, medians."""
    from transformers import DynamicCache

    ours, theirs = make_models(size, max(pasts) + rounds * steps + steps)
    rows = []
    for past in pasts:
        ids = torch.randint(SIZES[size]["vocab_size"], (batch, past), generator=torch.Generator().manual_seed(0))
        cache = ours.new_cache(batch, ours.config.max_position_embeddings)
        prefill(ours, ids, [past] * batch, cache)
        other = DynamicCache(config=theirs.config)
        token = ids[:, -1]
        times: dict[str, list[float]] = {"ours": [], "plain loop": []}
        with torch.inference_mode():
            theirs(ids, past_key_values=other, logits_to_keep=1)
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(steps):
                decode_one_token(ours, token, cache)
            middle = time.perf_counter()
            with torch.inference_mode():
                for _ in range(steps):
                    theirs(token[:, None], past_key_values=other)
            times["ours"].append((middle - start) / steps)
            times["plain loop"].append((time.perf_counter() - middle) / steps)
        rows.append({"past": past, **{name: statistics.median(values) for name, values in times.items()}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="xs,s")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pasts", default="128,512,2048")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: as it chooses")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "decode.json")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, float32 on CPU"
    )
    print(f"{'size':>4} {'batch':>5} | {'ours':>8} {'plain loop':>10} {'generate':>8} tokens/s | ours is x the others")
    rows = []
    for size in options.sizes.split(","):
        for batch in map(int, options.batches.split(",")):
            row = compare(size, batch, options.prompt, options.new, options.rounds)
            rows.append(row)
            speed = row["tokens_per_second"]
            print(
                f"{size:>4} {batch:>5} | {speed['ours']:8.0f} {speed['plain loop']:10.0f} {speed['generate']:8.0f}"
                f" {'':8} | {row['ratio_to_plain_loop']:.2f} {row['ratio_to_generate']:.2f}"
                f"{'' if row['same_tokens'] else '  (tokens differ)'}"
            )
    growth = []
    pasts = [int(past) for past in options.pasts.split(",") if past]
    if pasts:
        size = options.sizes.split(",")[-1]
        print(f"\nmilliseconds per token of size {size}, batch 1, behind a past of so many tokens")
        growth = cost_per_token(size, 1, pasts, 16, options.rounds)
        for row in growth:
            print(f"{row['past']:>6} | ours {row['ours'] * 1e3:.2f}, plain loop {row['plain loop'] * 1e3:.2f}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"compare": rows, "cost_per_token": growth}, indent=1))


if __name__ == "__main__":
    main()
