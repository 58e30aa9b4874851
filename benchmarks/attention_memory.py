"""Peak memory of attention, forward and backward, as the sequence grows: linear, for every kind of mask.

    python benchmarks/attention_memory.py [--seqs 4096,16384] [--heads 1] [--kv_heads 1] [--head_dim 64] [--repeats 3]

Each measurement is a process of its own: the peak of its resident memory during one forward and backward pass, above
what it held just before (the inputs, torch itself). Linear growth is a factor of 4 from 4,096 to 16,384 tokens; a
(seq x seq) tensor would make it 16. Prints a table and writes it to benchmarks/results/attention_memory.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window 512": {"window": 512},
    "documents of 500": {"documents": 500},
    "documents of 2000, window 512": {"documents": 2000, "window": 512},
    "softcap 50": {"softcap": 50.0},
    "dropout 0.1": {"dropout": 0.1},
}
LIMIT = 4.5  # allowed growth of the peak over a fourfold sequence


def peak_above_baseline(case: str, seq: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, float]:
    """Run one pass in this process; its peak resident memory in MiB above the start, and its seconds."""
    import torch

    from lit_llm.ops import attention, document_lengths

    torch.manual_seed(0)
    torch.set_num_threads(1)

    def one_pass(seq: int) -> tuple[float, float]:
        q, k, v = (torch.randn(1, seq, h, head_dim, requires_grad=True) for h in (heads, kv_heads, kv_heads))
        grad = torch.randn(1, seq, heads, head_dim)
        options = dict(CASES[case])
        if (length := options.pop("documents", None)) is not None:
            ids = torch.arange(seq).div(length, rounding_mode="floor")[None]
            options["cu_seqlens"], options["max_seqlen"] = document_lengths(ids)
        ctypes.CDLL(None).malloc_trim(0)  # what is free inside the process would hide what is taken next
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before, start = _status("VmRSS"), time.perf_counter()
        attention(q, k, v, **options).backward(grad)
        return _status("VmHWM") - before, time.perf_counter() - start

    one_pass(512)  # loads the kernels and their buffers
    peak, seconds = one_pass(seq)
    return {"peak_mib": peak, "seconds": seconds}


def _status(field: str) -> float:
    """A size of this process in MiB, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def measure(case: str, seq: int, heads: int = 1, kv_heads: int = 1, head_dim: int = 64) -> dict[str, float]:
    """`peak_above_baseline` in a process of its own."""
    command = [sys.executable, __file__, "--one", case, "--seqs", str(seq), "--heads", str(heads)]
    command += ["--kv_heads", str(kv_heads), "--head_dim", str(head_dim)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", default="4096,16384", help="lengths, the last compared with the first")
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--kv_heads", type=int, default=1)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="processes per figure; the median counts")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    seqs = [int(seq) for seq in options.seqs.split(",")]
    sizes = {"heads": options.heads, "kv_heads": options.kv_heads, "head_dim": options.head_dim}
    if options.one:
        print(json.dumps(peak_above_baseline(options.one, seqs[0], **sizes)))
        return 0

    rows, failed = [], False
    print(f"{'case':32}" + "".join(f"{seq:>10} MiB{'s':>8}" for seq in seqs) + f"{'growth':>10}")
    for case in CASES:
        runs = {seq: [measure(case, seq, **sizes) for _ in range(options.repeats)] for seq in seqs}
        peaks = {seq: statistics.median(run["peak_mib"] for run in runs[seq]) for seq in seqs}
        seconds = {seq: min(run["seconds"] for run in runs[seq]) for seq in seqs}
        growth = peaks[seqs[-1]] / peaks[seqs[0]]
        allowed = LIMIT / 4 * seqs[-1] / seqs[0]
        failed = failed or growth > allowed
        rows.append({"case": case, "peak_mib": peaks, "seconds": seconds, "growth": growth, "allowed": allowed})
        print(f"{case:32}" + "".join(f"{peaks[seq]:14.1f}{seconds[seq]:8.2f}" for seq in seqs) + f"{growth:10.2f}")
    target = Path(__file__).parent / "results" / "attention_memory.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"sizes": sizes, "rows": rows}, indent=2))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
