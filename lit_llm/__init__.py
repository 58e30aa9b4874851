"""lit-llm: train, shard, profile and run language models with PyTorch Lightning.

Names are handed on lazily, so that ``import lit_llm`` imports neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_llm.data import TokenDataModule, Tokenizer, TokenStore
    from lit_llm.generation import GenerationConfig, GenerationResult, generate, stream
    from lit_llm.model import KVCache, ModelConfig, Transformer
    from lit_llm.module import LitLLM

__version__ = "0.1.0"

_HOMES = {
    "GenerationConfig": "lit_llm.generation",
    "GenerationResult": "lit_llm.generation",
    "KVCache": "lit_llm.model",
    "LitLLM": "lit_llm.module",
    "ModelConfig": "lit_llm.model",
    "TokenDataModule": "lit_llm.data",
    "TokenStore": "lit_llm.data",
    "Tokenizer": "lit_llm.data",
    "Transformer": "lit_llm.model",
    "generate": "lit_llm.generation",
    "stream": "lit_llm.generation",
}

__all__ = [
    "GenerationConfig",
    "GenerationResult",
    "KVCache",
    "LitLLM",
    "ModelConfig",
    "TokenDataModule",
    "TokenStore",
    "Tokenizer",
    "Transformer",
    "__version__",
    "generate",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lit_llm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
