"""What TraceCapture costs: steps of a small model on a CPU without it, with it outside of a window, and inside one.

    python -m benchmarks.trace_capture --rounds 7

A round trains in each of the three ways, in turns; the figures are medians over all steps of all rounds. What the end
of a window costs (the profiler's stop and the writing) is told apart, and the file's size a step.
Figures go to benchmarks/results/trace_capture.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.common import save, table
from benchmarks.steps import StepSeconds

WAYS = ("without", "outside", "inside")
_FIRST = 6  # steps that warm up


def train(way: str, steps: int, hidden_size: int, folder: str) -> dict[str, Any]:
    """Trains in one of :data:`WAYS`; gives the seconds of its steps, and for ``inside`` what the window's end took."""
    from lit_llm import LitLLM
    from lit_llm.callbacks import TraceCapture

    shape = {"hidden_size": hidden_size, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    lit = LitLLM(config={**shape, "intermediate_size": 4 * hidden_size}, vocab_size=512, seq_len=128)
    ids = torch.randint(512, (4, 129), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}] * (steps + 2)
    watch, callbacks = StepSeconds(_FIRST), []
    if way != "without":
        start = _FIRST - 1 if way == "inside" else None
        callbacks = [TraceCapture(start=start, active=steps - _FIRST, analyze=False)]
    trainer = L.Trainer(
        default_root_dir=folder, accelerator="cpu", max_steps=steps + 2, logger=False, callbacks=[*callbacks, watch],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(lit, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    found: dict[str, Any] = {"seconds": watch.seconds}
    if way == "inside":
        # The hook after which the window ends comes before the writing: the next step's time holds it.
        *recorded, ending, after = watch.seconds
        found = {"seconds": recorded, "ending": ending + after - 2 * statistics.median(recorded)}
        found["bytes"] = sum(file.stat().st_size for file in Path(folder).rglob("*.json.gz"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark of trace capture.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden_size", type=int, default=128)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    endings, sizes = [], []
    for number in range(arguments.rounds + 1):
        for way in WAYS if number % 2 else WAYS[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                found = train(way, arguments.steps, arguments.hidden_size, folder)
            if not number:  # the first round warms up
                continue
            seconds[way] += found["seconds"]
            if way == "inside":
                endings.append(found["ending"])
                sizes.append(found["bytes"] / len(found["seconds"]))
    steps = {way: statistics.median(values) for way, values in seconds.items()}
    rows = []
    for way, value in steps.items():
        spread = statistics.quantiles(seconds[way], n=4)
        quartiles = f"{1000 * spread[0]:.2f} to {1000 * spread[2]:.2f}"
        rows.append([way, 1000 * value, quartiles, value / steps["without"], len(seconds[way])])
    print(table(("way", "step, ms", "quartiles, ms", "of without", "steps"), rows))
    ending, size = statistics.median(endings), statistics.median(sizes)
    print(
        f"the end of a window of {arguments.steps - _FIRST} steps: {ending:.2f} s; {size / 1000:.0f} kB of file a step"
    )
    figures = {**vars(arguments), "step_seconds": steps, "ending_seconds": ending, "file_bytes_a_step": size}
    print(f"written to {save('trace_capture', figures).name}")


if __name__ == "__main__":
    main()
