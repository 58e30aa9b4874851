"""Time and peak memory of the head's loss, forward and backward: all logits, ours in chunks, torch's in chunks.

    python benchmarks/loss.py                       # every size below, 1 and 2 threads
    python benchmarks/loss.py --sizes 2048x288x8192 --threads 2 --rounds 5

Each measurement is a process of its own, contenders take turns within a round, and the table shows medians over the
rounds. "cpu s" is processor time over all threads, steadier than the clock on a busy machine; "memory" is the peak of
the resident set above the inputs and the gradients, and "of logits" that as a share of the full float32 logits. Linux
only. The rows go to benchmarks/results/loss.json as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = ["4096x768x128256", "2048x768x32000", "2048x288x32000", "2048x768x8192", "2048x288x8192"]
CONTENDERS = ["full", "chunked", "torch"]
RESULTS = Path(__file__).parent / "results" / "loss.json"
MIB = 2**20
WIDTHS = (18, 7, 9, 8, 7, 8, 10, 9)


def resident_bytes(kind: str) -> int:
    """This process's resident set now ("VmRSS") or at its peak ("VmHWM"; getrusage's would start at the parent's)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))


def measure(contender: str, size: str, threads: int, chunk_size: int | None, repeats: int) -> dict[str, float]:
    """Wall and processor seconds of a forward and backward pass (medians of ``repeats``), bytes of the first's peak."""
    import torch
    import torch.nn.functional as F

    from lit_llm.ops import linear_cross_entropy

    torch.set_num_threads(threads)
    torch.manual_seed(0)

    def full(hidden: Any, weight: Any, labels: Any) -> Any:
        return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")

    def chunked(hidden: Any, weight: Any, labels: Any) -> Any:
        return linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size, backend="chunked")[0]

    def torch_chunked(hidden: Any, weight: Any, labels: Any) -> Any:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_size)
        return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)

    loss_function: Callable[..., Any] = {"full": full, "chunked": chunked, "torch": torch_chunked}[contender]

    def inputs(tokens: int, hidden_size: int, vocab_size: int) -> tuple[Any, Any, Any]:
        hidden = torch.randn(tokens, hidden_size, requires_grad=True)
        weight = (torch.randn(vocab_size, hidden_size) * 0.02).requires_grad_()
        return hidden, weight, torch.randint(vocab_size, (tokens,))

    def step(hidden: Any, weight: Any, labels: Any) -> tuple[float, float]:
        hidden.grad = weight.grad = None
        start, start_processor = time.perf_counter(), time.process_time()
        (loss_function(hidden, weight, labels) / len(labels)).backward()
        return time.perf_counter() - start, time.process_time() - start_processor

    step(*inputs(8, 64, 512))  # loads the libraries
    hidden, weight, labels = inputs(*map(int, size.split("x")))
    before = resident_bytes("VmRSS")
    times = [step(hidden, weight, labels)]
    memory = resident_bytes("VmHWM") - before - hidden.nbytes - weight.nbytes
    times += [step(hidden, weight, labels) for _ in range(repeats)]
    wall, processor = (statistics.median(column) for column in zip(*times[-max(repeats, 1) :], strict=True))
    return {"seconds": wall, "processor_seconds": processor, "bytes": memory}


def in_process(**arguments: Any) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def run(sizes: list[str], threads: list[int], contenders: list[str], rounds: int, chunk_size: int | None) -> list[dict]:
    rows = []
    columns = ("size", "threads", "contender", "seconds", "of full", "cpu s", "memory MiB", "of logits")
    print(" ".join(f"{name:>{width}}" for name, width in zip(columns, WIDTHS, strict=True)))
    for size in sizes:
        tokens, _, vocab_size = map(int, size.split("x"))
        for count in threads:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
            for _ in range(rounds):
                for name in contenders:
                    repeats = 0 if tokens * vocab_size > 2**28 else 3
                    arguments = {"contender": name, "size": size, "threads": count, "repeats": repeats}
                    found[name].append(in_process(**arguments, chunk_size=chunk_size))
            medians = {
                name: {
                    key: statistics.median(r[key] for r in results) for key in ("seconds", "processor_seconds", "bytes")
                }
                for name, results in found.items()
            }
            for name, median in medians.items():
                of_full = median["seconds"] / medians["full"]["seconds"] if "full" in medians else float("nan")
                of_logits = median["bytes"] / (4 * tokens * vocab_size)
                print(
                    f"{size:>18} {count:>7} {name:>9} {median['seconds']:>8.3f} {of_full:>7.2f} "
                    f"{median['processor_seconds']:>8.3f} {median['bytes'] / MIB:>10.1f} {of_logits:>9.1%}",
                    flush=True,
                )
                rows.append({"size": size, "threads": count, "contender": name, "rounds": rounds, **median})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark of the head's loss.")
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="tokens x hidden x vocabulary, as 2048x288x8192")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk_size", type=int, default=None, help="for the chunked ones; default: their own choice")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(**json.loads(arguments.worker))))
        return
    rows = run(arguments.sizes, arguments.threads, arguments.contenders, arguments.rounds, arguments.chunk_size)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"written to {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")


if __name__ == "__main__":
    main()
