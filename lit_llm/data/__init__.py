"""Text to batches: sources, tokenizer, preparation, token stores and the data module.

Names are handed on lazily: only ``TokenDataModule`` needs torch and Lightning. The function that prepares a store is
``lit_llm.data.prepare.prepare``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_llm.data.document import Conversation, Document
    from lit_llm.data.module import TokenDataModule
    from lit_llm.data.sources import iter_documents
    from lit_llm.data.store import TokenStore
    from lit_llm.data.tokenizer import Tokenizer, train_tokenizer
    from lit_llm.data.writer import StoreWriter

_HOMES = {
    "Conversation": "lit_llm.data.document",
    "Document": "lit_llm.data.document",
    "StoreWriter": "lit_llm.data.writer",
    "TokenDataModule": "lit_llm.data.module",
    "TokenStore": "lit_llm.data.store",
    "Tokenizer": "lit_llm.data.tokenizer",
    "iter_documents": "lit_llm.data.sources",
    "train_tokenizer": "lit_llm.data.tokenizer",
}

__all__ = [
    "Conversation",
    "Document",
    "StoreWriter",
    "TokenDataModule",
    "TokenStore",
    "Tokenizer",
    "iter_documents",
    "train_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lit_llm.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
