"""Small data that many tests share."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

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
