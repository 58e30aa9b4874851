"""Seconds and memory to load a Hugging Face folder of a 1B model: whole, beside transformers, and split over 2 ranks.

    python -m benchmarks.pretrained [--layers 16] [--rounds 1]

A random Llama of float32 is written by our own writer into a temporary folder, in files of at most 1 GB, and loaded in
float32 by fresh processes. "peak" is the most memory that was resident (ru_maxrss) less what it was after the imports,
so that files that are mapped into memory count as well; each weight is read once within the time, since transformers
only maps the files. "x file" is the peak over the size of the files. "cold" is a load after the files have left the
page cache. The rows go to benchmarks/results/pretrained.json as well.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

RANKS = 2
MODEL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}
WHOLE, THEIRS, SPLIT = "Transformer.from_pretrained", "transformers", "LitLLM, MeshStrategy(shard=2)"
# What must hold: peak memory over the size of the files, and seconds.
BOUNDS = {WHOLE: (1.3, 20.0), SPLIT: (0.75, None)}


def peak() -> int:
    """Bytes of this process that were resident at once, at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(load: Callable[[], Any]) -> dict[str, Any]:
    before, start = peak(), time.perf_counter()
    model = load()
    for parameter in model.parameters():
        getattr(parameter, "to_local", lambda p=parameter: p)().detach().sum()
    seconds = time.perf_counter() - start
    result = {"seconds": seconds, "peak": peak() - before, "imports": before}
    return {**result, "parameters": sum(p.numel() for p in model.parameters())}


def write(folder: str, layers: int) -> None:
    from lit_llm import ModelConfig, Transformer

    Transformer(ModelConfig(**MODEL, num_hidden_layers=layers)).save_pretrained(folder, max_shard_size="1GB")


def load_ours(folder: str) -> dict[str, Any]:
    import lit_llm.checkpoint.hf_folder
    from lit_llm import Transformer

    assert lit_llm.checkpoint.hf_folder
    return measured(lambda: Transformer.from_pretrained(folder))


def load_theirs(folder: str) -> dict[str, Any]:
    import torch
    from transformers import LlamaForCausalLM

    return measured(lambda: LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))


def load_split(folder: str) -> dict[str, Any]:
    """One rank of a run that begins with the folder and takes no step."""
    import logging
    import warnings

    import lightning as L
    from torch.utils.data import DataLoader

    from lit_llm import LitLLM
    from lit_llm.optim import ScheduleConfig
    from lit_llm.parallel import MeshStrategy, local_bytes

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=MeshStrategy(shard=RANKS),
        max_steps=0,
        **dict.fromkeys(off, False),  # type: ignore[arg-type]
    )
    lit = LitLLM(pretrained=folder, schedule=ScheduleConfig("constant", warmup_steps=0))

    def load() -> LitLLM:
        trainer.fit(lit, DataLoader(cast(Any, [0])))
        return lit

    result = measured(load)
    return {**result, "held": local_bytes(lit.parameters()), "rank": trainer.global_rank}


LOADS: dict[str, Callable[[str], dict[str, Any]]] = {WHOLE: load_ours, THEIRS: load_theirs, SPLIT: load_split}


def child(words: list[str], ranks: int = 0) -> list[dict[str, Any]]:
    """Results of fresh processes that were told this."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks else []
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, *launch, "-m", "benchmarks.pretrained", *words, "--results", results]
        threads = {"OMP_NUM_THREADS": "1"} if ranks else {}
        done = subprocess.run(command, env={**os.environ, **threads}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        return [json.loads(path.read_text()) for path in sorted(Path(results).iterdir())]


def forget(files: list[Path]) -> None:
    """Takes files out of the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(folder: str, rounds: int) -> dict[str, Any]:
    files = sorted(Path(folder).glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    loads: list[dict[str, Any]] = []
    for _ in range(rounds):
        for cold in (True, False):
            for name in LOADS:
                if cold:
                    forget(files)
                found = child(["--load", name, "--folder", folder], RANKS if name == SPLIT else 0)
                loads += [{"load": name, "cold": cold, **one} for one in found]
    return {"file_bytes": size, "files": len(files), "loads": loads}


def show(data: dict[str, Any]) -> bool:
    """Prints the table; whether all bounds are kept."""
    from benchmarks.common import table

    size, rows, kept = data["file_bytes"], [], True
    print(f"{data['loads'][0]['parameters']:,} parameters, {size / 1e9:.2f} GB in {data['files']} files\n")
    for one in data["loads"]:
        ratio = one["peak"] / size
        most, seconds = BOUNDS.get(one["load"], (None, None))
        fits = (most is None or ratio <= most) and (seconds is None or one["seconds"] < seconds)
        kept = kept and fits
        asked = "" if most is None else f"<= {most}" + (f", < {seconds:.0f} s" if seconds else "")
        name = one["load"] + (f", rank {one['rank']}" if "rank" in one else "")
        gigabytes = [f"{one[key] / 1e9:.2f}" for key in ("peak", "imports")]
        cache = "cold" if one["cold"] else "warm"
        rows.append([name, cache, f"{one['seconds']:.1f}", *gigabytes, f"{ratio:.2f}", asked, "" if fits else "MISSED"])
    print(table(["", "files", "s", "peak GB", "imports GB", "x file", "must be", ""], rows))
    return kept


def main() -> None:
    """Prints the table and writes benchmarks/results/pretrained.json; exit code 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="16 make 1.1B parameters")
    parser.add_argument("--rounds", type=int, default=1)
    for name in ("--load", "--folder", "--results"):  # of child processes
        parser.add_argument(name, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.results is not None:
        result: dict[str, Any] = {}
        if told.load is None:
            write(told.folder, told.layers)
        else:
            result = LOADS[told.load](told.folder)
        Path(told.results, f"{result.get('rank', 0)}.json").write_text(json.dumps(result))
        return
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as place:
        folder = str(Path(place, "model"))
        child(["--folder", folder, "--layers", str(told.layers)])
        data = {"load_before": load_before, **run(folder, told.rounds), "load_after": os.getloadavg()}
    kept = show(data)
    from benchmarks.common import machine, save  # torch comes here; a child's memory begins with its parent's

    print(machine())
    print(f"written to {save('pretrained', data)}")
    if not kept:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
