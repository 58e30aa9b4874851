"""Tokens per second of greedy decoding: lit_llm's `generate` against transformers' Llama with the same weights.

Contenders: `plain loop`, transformers' model called token by token with a DynamicCache and argmax; `generate`, its own
method; and ours. All in one process, taking turns round by round, so that a busy machine slows all of them. The ratios
are medians over the rounds. A second table shows what a token costs as the past grows.

    python benchmarks/decode.py [--sizes xs,s,m] [--batches 1,8] [--rounds 7] [--threads N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import save, table
from lit_llm import GenerationConfig, ModelConfig, Transformer, generate
from lit_llm.generation import decode_one_token, prefill

SIZES: dict[str, dict[str, Any]] = {
    "xs": {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4},
    "s": {"vocab_size": 8192, "hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6},
    "m": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12},
}
HEADS = {"xs": 4, "s": 6, "m": 12}


def make_models(size: str, context: int) -> tuple[Transformer, Any]:
    """Ours and theirs, with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {**SIZES[size], "num_attention_heads": HEADS[size], "num_key_value_heads": HEADS[size]}
    shape |= {"max_position_embeddings": context, "rms_norm_eps": 1e-5}
    ours = Transformer(ModelConfig(**shape)).eval()
    theirs = LlamaForCausalLM(LlamaConfig(**shape)).eval()
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
        "ratio_to_plain_loop": _ratio(seconds["plain loop"], seconds["ours"]),
        "ratio_to_generate": _ratio(seconds["generate"], seconds["ours"]),
        "same_tokens": bool(all(torch.equal(tokens["ours"], other) for other in tokens.values())),
    }


def _ratio(theirs: list[float], ours: list[float]) -> float:
    """Of neighbours in time, which a busy machine slows alike; the median over the rounds."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


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
    parser.add_argument("--sizes", default="xs,s", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pasts", default="128,512,2048", help="for the cost of a token; empty: leave it out")
    parser.add_argument("--threads", type=int, help="of torch; as it chooses if not given")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    sizes = options.sizes.split(",")
    print(f"Greedy decoding on the CPU, float32, {options.prompt} + {options.new} tokens, medians of {options.rounds}:")
    rows = [
        compare(size, batch, options.prompt, options.new, options.rounds)
        for size in sizes
        for batch in map(int, options.batches.split(","))
    ]
    names = list(rows[0]["tokens_per_second"])
    cells = [
        [row["size"], row["batch"], *row["tokens_per_second"].values()]
        + [f"{row[f'ratio_to_{name}']:.2f}" for name in ("plain_loop", "generate")]
        + ["yes" if row["same_tokens"] else "no"]
        for row in rows
    ]
    print(
        table(["size", "batch", *(f"{name} tokens/s" for name in names), "x loop", "x generate", "same tokens"], cells)
    )
    growth = []
    if options.pasts:
        print(f"\nMilliseconds per token, size {sizes[-1]}, batch 1, behind a past of so many tokens:")
        growth = cost_per_token(sizes[-1], 1, [int(past) for past in options.pasts.split(",")], 16, options.rounds)
        cells = [[row["past"], row["ours"] * 1e3, row["plain loop"] * 1e3] for row in growth]
        print(table(["past", "ours", "plain loop"], cells))
    print(f"\nWrote {save('decode', {'compare': rows, 'cost_per_token': growth})}")


if __name__ == "__main__":
    main()
