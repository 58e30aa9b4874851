"""Small data that many tests share."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as where the tests run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported: these models are too small for threads, and children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of 60 short made-up documents, with a train and a val split; the folder's path."""
    from lit_llm.data.prepare import prepare

    folder = tmp_path_factory.mktemp("data")
    write_texts(folder / "texts", documents=60)
    prepare([str(folder / "texts")], str(folder / "store"), vocab_size=300, val_fraction=0.2, workers=1, progress=False)
    return str(folder / "store")


def write_texts(folder: Path, documents: int, seed: int = 0) -> None:
    """Documents of 5 to 60 words that a small model can learn something from."""
    rng = random.Random(seed)
    words = ["alpha", "beta", "gamma", "delta", "one", "two", "three", "é", "数学"]
    folder.mkdir(parents=True)
    for number in range(documents):
        text = " ".join(rng.choice(words) for _ in range(rng.randint(5, 60)))
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")


@pytest.fixture
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts BOS first; every byte is a token."""
    from tests.data_helpers import llama3_style, write_tokenizer

    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), llama3_style())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if sys.platform != "linux" or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "x", folder]).returncode:
        pytest.skip("mounting a small tmpfs needs root on Linux")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE, which the fast engine knows."""
    from lit_llm.data import train_tokenizer
    from tests.prepare_helpers import many_texts

    folder = tmp_path_factory.mktemp("trained")
    train_tokenizer(many_texts(40), 400).save(folder)
    return folder


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Leaves nothing behind that would tell what comes next to be one of several processes."""
    before, rank = dict(os.environ), getattr(_rank_zero(), "rank", None)
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
    if _rank_zero() is not None:
        _rank_zero().rank = rank or 0


def _rank_zero() -> Any:
    """What Lightning's messages and loggers ask for the rank, if it has been imported."""
    return getattr(sys.modules.get("lightning_utilities.core.rank_zero"), "rank_zero_only", None)
