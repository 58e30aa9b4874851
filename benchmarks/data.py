"""Text to a store, and a store to batches: ours beside a plain tokenizers loop, a bare gather, LitGPT and litdata.

    python -m benchmarks.data                                    # ours, encode_batch, bare gather
    python -m benchmarks.data --peers PYTHON --rounds 3          # also LitGPT and litdata, of that interpreter
    python -m benchmarks.data --parts memory --memory_mb 1000    # peak memory of preparing one large text file

Every measurement is a process of its own, contenders take turns within a round, and the tables show medians.

prepare: the sources of Python's library as 16 text files, with a byte-level BPE of GPT-2's size that is trained on them
first; the whole process from start to a closed store, imports included. ``encode_batch`` reads the same files, gives
the documents to `tokenizers`, which uses all cores, and writes one uint16 file. MB/s are of the wall clock.

read: random batches of 8 rows of 1,024 tokens and their labels, from a file in memory. ``bare gather`` indexes a numpy
memory map and makes int64 tensors of (8, 1025), without labels; ours is the loader that the Trainer would get.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import common

WORK = Path(__file__).parent / "results" / "data"
BATCH, SEQ_LEN = 8, 1024
SEPARATOR = "\n\n\n"


# ------------------------------------------------------------------- material


def documents(megabytes: float) -> list[str]:
    """Sources of Python's library, site-packages left out, about so many megabytes of them."""
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or size > megabytes * 1e6:
            continue
        text = path.read_text(errors="ignore").replace(SEPARATOR, "\n\n")
        if text.strip():
            found.append(text)
            size += len(text.encode())
    return found


def make_material(vocab_size: int, megabytes: float) -> float:
    """Text files, a tokenizer and a packed file under WORK, once; the megabytes of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = documents(megabytes)
    folder = WORK / "texts"
    if not folder.exists():
        folder.mkdir(parents=True)
        share = -(-len(texts) // 16)
        for part in range(16):
            (folder / f"{part:02d}.txt").write_text(SEPARATOR.join(texts[part * share : (part + 1) * share]))
    path = WORK / "tokenizer" / "tokenizer.json"
    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        end = "<|endoftext|>"
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[end], initial_alphabet=alphabet)
        tokenizer.train_from_iterator(texts, trainer)
        path.parent.mkdir()
        tokenizer.save(str(path))
        config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": end, "eos_token": end}
        path.with_name("tokenizer_config.json").write_text(json.dumps(config))
        path.with_name("config.json").write_text("{}")
    if not (WORK / "packed.bin").exists():
        import numpy as np

        encoded = Tokenizer.from_file(str(path)).encode_batch_fast(texts)
        ids = np.concatenate([np.array([*e.ids, 0], np.uint16) for e in encoded])
        np.tile(ids, max(1, 16_000_000 // len(ids))).tofile(WORK / "packed.bin")
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e6


def make_store() -> Path:
    """The tokens of the packed file as a store, once."""
    import numpy as np

    from lit_llm.data.new_folder import new_folder
    from lit_llm.data.tokenizer import Tokenizer
    from lit_llm.data.writer import StoreWriter

    folder = WORK / "store"
    if not folder.exists():
        ids = np.fromfile(WORK / "packed.bin", np.uint16)
        ends = np.flatnonzero(ids == 0) + 1
        lengths = np.diff(ends, prepend=0)
        with new_folder(folder) as new:
            writer = StoreWriter(new, Tokenizer(WORK / "tokenizer"))
            writer.append("train", ids[: ends[-1]], lengths, lengths)
            writer.finish()
    return folder


# ------------------------------------------------------------------- one measurement


def encode_batch(output: Path) -> None:
    """What a short script does with the tokenizers library."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(WORK / "tokenizer" / "tokenizer.json"))
    output.mkdir()
    with open(output / "tokens.bin", "wb") as file:
        for path in sorted((WORK / "texts").glob("*.txt")):
            for encoding in tokenizer.encode_batch(path.read_text().split(SEPARATOR)):
                file.write(np.array([*encoding.ids, 0], dtype=np.uint16).tobytes())


def litgpt(output: Path) -> None:
    """What litgpt.data.TextFiles does; run by the peers' interpreter."""
    from functools import partial

    from litdata import optimize
    from litdata.streaming import TokensLoader
    from litgpt.data.text_files import tokenize
    from litgpt.tokenizer import Tokenizer

    optimize(
        fn=partial(tokenize, tokenizer=Tokenizer(WORK / "tokenizer")),
        inputs=sorted(map(str, (WORK / "texts").glob("*.txt"))),
        output_dir=str(output),
        num_workers=os.cpu_count(),
        chunk_bytes="50MB",
        item_loader=TokensLoader(block_size=SEQ_LEN + 1),
    )


def packed_rows(index: int) -> Iterator[Any]:
    """An eighth of the packed file, for litdata."""
    import numpy as np
    import torch

    ids = np.fromfile(WORK / "packed.bin", np.uint16)
    yield torch.from_numpy(ids[index * len(ids) // 8 : (index + 1) * len(ids) // 8].astype(np.int32))


def gather_batches() -> Iterator[Any]:
    """A numpy memory map and an index array."""
    import numpy as np
    import torch

    ids = np.memmap(WORK / "packed.bin", dtype=np.uint16, mode="r")
    random = np.random.default_rng(0)
    offsets = np.arange(SEQ_LEN + 1)
    while True:
        starts = random.integers(0, len(ids) - SEQ_LEN - 1, BATCH)
        yield torch.from_numpy(ids[starts[:, None] + offsets].astype(np.int64))


def our_batches(isolate: bool, packing: str = "contiguous") -> Iterator[Any]:
    """The loader that a Trainer gets from the DataModule, num_workers 0."""
    import lightning as L

    from lit_llm import LitLLM, TokenDataModule

    data = TokenDataModule(
        str(make_store()),
        SEQ_LEN,
        BATCH,
        BATCH,
        isolate_documents=isolate,
        packing=packing,  # type: ignore[arg-type]
    )
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_steps=1)
    trainer.strategy.connect(LitLLM())
    data.trainer = trainer
    data.setup("fit")
    while True:
        yield from data.train_dataloader()


def litdata_batches() -> Iterator[Any]:
    """litdata's StreamingDataset over blocks of the same tokens; run by the peers' interpreter."""
    from litdata import optimize
    from litdata.streaming import StreamingDataLoader, StreamingDataset, TokensLoader

    folder = WORK / "litdata"
    loader = TokensLoader(block_size=SEQ_LEN + 1)
    if not folder.exists():
        optimize(
            fn=packed_rows,
            inputs=list(range(8)),
            output_dir=str(folder),
            num_workers=1,
            chunk_bytes="50MB",
            item_loader=loader,
        )
    data = StreamingDataset(input_dir=str(folder), item_loader=TokensLoader(block_size=SEQ_LEN + 1), shuffle=True)
    while True:
        yield from StreamingDataLoader(data, batch_size=BATCH, num_workers=0, drop_last=True)


READERS: dict[str, Callable[[], Iterator[Any]]] = {
    "bare gather": gather_batches,
    "lit-llm": lambda: our_batches(False),
    "lit-llm, document_ids": lambda: our_batches(True),
    "lit-llm, best_fit": lambda: our_batches(True, "best_fit"),
    "litdata": litdata_batches,
}


def measure_reading(name: str, batches: int) -> float:
    """Microseconds of a batch, the best of five runs in a process that does nothing else."""
    import torch

    torch.set_num_threads(1)
    iterator = READERS[name]()
    for _ in range(20):
        next(iterator)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(batches):
            next(iterator)
        times.append((time.perf_counter() - begin) / batches * 1e6)
    return min(times)


# ------------------------------------------------------------------- tables


def run(command: list[str]) -> tuple[float, float, str]:
    """Wall and processor seconds of a command, and its output; a failure ends the benchmark with its last lines."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def prepare_table(rounds: int, megabytes: float, peers: str | None) -> list[dict[str, Any]]:
    """Contenders take turns; medians."""
    worker = ["-m", "benchmarks.data", "--one"]
    lit_llm = [sys.executable, "-m", "lit_llm", "prepare", str(WORK / "texts"), "--tokenizer", str(WORK / "tokenizer")]
    contenders = {"lit-llm prepare": [*lit_llm, "--val_fraction", "0", "--output"]}
    contenders["tokenizers encode_batch"] = [sys.executable, *worker, "prepare:encode_batch"]
    if peers:
        contenders["litgpt TextFiles"] = [peers, *worker, "prepare:litgpt"]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, command in contenders.items():
            output = WORK / "prepared"
            shutil.rmtree(output, ignore_errors=True)
            times[name].append(run([*command, str(output)])[:2])
    first = statistics.median(wall for wall, _ in times["lit-llm prepare"])
    rows = []
    for name, taken in times.items():
        wall, cpu = (statistics.median(t[i] for t in taken) for i in (0, 1))
        rows.append({"way": name, "s": wall, "cpu s": cpu, "MB/s": megabytes / wall, "ours is": wall / first})
    return rows


def read_table(rounds: int, batches: int, peers: str | None) -> list[dict[str, Any]]:
    """Contenders take turns; medians."""
    make_store()
    names = [name for name in READERS if peers or name != "litdata"]
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            python = peers if name == "litdata" else sys.executable
            assert python is not None
            output = run([python, "-m", "benchmarks.data", "--one", f"read:{name}", "--batches", str(batches)])[2]
            times[name].append(float(output.split()[-1]))
    bare = statistics.median(times["bare gather"])
    rows = []
    for name, taken in times.items():
        us = statistics.median(taken)
        rows.append({"loader": name, "us/batch": us, "Mtokens/s": BATCH * SEQ_LEN / us, "of bare gather": bare / us})
    return rows


def memory_table(megabytes: int) -> list[dict[str, Any]]:
    """Peak memory of preparing one text file, over all processes."""
    import psutil

    path = WORK / "large.txt"
    text = "\n".join(documents(12)).encode()
    with open(path, "wb") as file:
        for _ in range(max(1, megabytes * 1_000_000 // len(text))):
            file.write(text)
    command = [sys.executable, "-m", "lit_llm", "prepare", str(path), "--tokenizer", str(WORK / "tokenizer")]
    begin = time.perf_counter()
    shutil.rmtree(WORK / "prepared", ignore_errors=True)
    process = psutil.Popen([*command, "--output", str(WORK / "prepared")], stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        total = 0
        for one in [process, *process.children(recursive=True)]:
            try:
                total += one.memory_full_info().pss  # what processes share counts once
            except psutil.Error:
                continue
        peak = max(peak, total)
        time.sleep(0.05)
    wall, size = time.perf_counter() - begin, path.stat().st_size
    path.unlink()
    return [{"file MB": size / 1e6, "peak MB": peak / 1e6, "s": wall, "MB/s": size / 1e6 / wall}]


def main() -> None:
    """Measures what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="prepare,read")
    parser.add_argument("--peers", help="an interpreter that has litgpt and litdata")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--megabytes", type=float, default=12)
    parser.add_argument("--memory_mb", type=int, default=1000)
    parser.add_argument("--vocab_size", type=int, default=50257)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("output", nargs="?", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, name = args.one.split(":")
        if kind == "read":
            print(measure_reading(name, args.batches))
        else:
            {"encode_batch": encode_batch, "litgpt": litgpt}[name](args.output)
        return
    megabytes = make_material(args.vocab_size, args.megabytes)
    data = {}
    for part in args.parts.split(","):
        if part == "prepare":
            data[part] = prepare_table(args.rounds, megabytes, args.peers)
        elif part == "read":
            data[part] = read_table(args.rounds, args.batches, args.peers)
        else:
            data[part] = memory_table(args.memory_mb)
        print(f"\n{part}\n\n" + common.table(list(data[part][0]), [list(row.values()) for row in data[part]]))
    print(f"\n{common.save('data', data)}")


if __name__ == "__main__":
    main()
