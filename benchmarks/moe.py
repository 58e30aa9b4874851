"""Time of a mixture of experts, forward and backward, beside transformers' Mixtral block with the same weights.

    python -m benchmarks.moe                                  # 8 experts, top 2, hidden 512, 4096 tokens
    python -m benchmarks.moe --tokens 2048 --threads 2 --rounds 9

"eager" is transformers' loop over experts, "grouped_mm" its grouped product; all compute float32. Contenders take turns
within a round, and the table shows medians over the rounds; "cpu s" is processor time over all threads, steadier than
the clock on a busy machine, and "of eager" the median of each round's quotient of it. Results and all gradients must
agree to 1e-5 of their largest number. The rows go to benchmarks/results/moe.json as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks.common import save, table

CONTENDERS = ("ours", "eager", "grouped_mm")


def blocks(hidden: int, width: int, experts: int, chosen: int) -> dict[str, Any]:
    """The contenders, with equal weights."""
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    from lit_llm import ModelConfig
    from lit_llm.model.moe import MoE

    torch.manual_seed(0)
    routed = {"num_experts": experts, "num_experts_per_tok": chosen}
    made: dict[str, Any] = {
        "ours": MoE(ModelConfig(vocab_size=1, hidden_size=hidden, intermediate_size=width, **routed))
    }
    for name in CONTENDERS[1:]:
        options = MixtralConfig(
            hidden_size=hidden, intermediate_size=width, num_local_experts=experts, num_experts_per_tok=chosen
        )
        options._experts_implementation = name
        made[name] = MixtralSparseMoeBlock(options)
        made[name].load_state_dict(made["ours"].state_dict())
    return made


def step(block: Any, x: Any, upstream: Any) -> tuple[tuple[float, float], list[Any]]:
    """Wall and processor seconds of a forward and backward pass; the result and the gradients."""
    block.zero_grad()
    leaf = x.clone().requires_grad_()
    start, start_processor = time.perf_counter(), time.process_time()
    out = block(leaf)
    out.backward(upstream)
    seconds = time.perf_counter() - start, time.process_time() - start_processor
    return seconds, [out.detach(), leaf.grad, *(parameter.grad for parameter in block.parameters())]


def disagreement(mine: list[Any], theirs: list[Any]) -> float:
    """The largest difference of a tensor, of its largest number."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, theirs, strict=True))


def run(tokens: int, hidden: int, width: int, experts: int, chosen: int, threads: int, rounds: int) -> list[dict]:
    """A row for each contender."""
    import torch

    torch.set_num_threads(threads)
    contenders = blocks(hidden, width, experts, chosen)
    x, upstream = (torch.randn(4, tokens // 4, hidden) for _ in range(2))
    found = {name: step(block, x, upstream)[1] for name, block in contenders.items()}  # warms up as well
    errors = {name: disagreement(tensors, found["eager"]) for name, tensors in found.items()}
    assert max(errors.values()) <= 1e-5, errors
    del found
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, block in contenders.items():
            seconds[name].append(step(block, x, upstream)[0])
    rows = []
    for name, times in seconds.items():
        wall, processor = (statistics.median(column) for column in zip(*times, strict=True))
        quotient = statistics.median(a[1] / b[1] for a, b in zip(times, seconds["eager"], strict=True))
        figures = {"seconds": wall, "processor_seconds": processor, "of_eager": quotient, "disagreement": errors[name]}
        rows.append({"contender": name, **figures})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark of the mixture of experts.")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024, help="of an expert")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--chosen", type=int, default=2, help="experts of a token")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = vars(parser.parse_args())
    rows = run(**arguments)
    print(table(["", "seconds", "cpu s", "of eager"], [list(row.values())[:4] for row in rows]))
    print(f"written to {save('moe', {'arguments': arguments, 'rows': rows})}")


if __name__ == "__main__":
    main()
