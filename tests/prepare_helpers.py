"""What the tests of `lit-llm prepare` share."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from lit_llm.data import TokenStore, iter_documents

BOM = b"\xef\xbb\xbf"


def texts_of(store: TokenStore) -> list[str]:
    return [store.tokenizer.decode(store.document(i)) for i in range(len(store))]


def read(*inputs: Any, **options: Any) -> list[str]:
    return [document.text for document in iter_documents(inputs, **options)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def many_texts(count: int = 300) -> list[str]:
    rng = random.Random(0)
    return [f"{i}: " + "".join(rng.choices("abc é\n", k=rng.randint(1, 60))) for i in range(count)]
