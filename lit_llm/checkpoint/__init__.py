"""Writing checkpoints, finding them on disk, and loading a model and its tokenizer from one.

What writes is handed on lazily: it needs Lightning, which those who only load a model shall not wait for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lit_llm.checkpoint.find import Found, find_checkpoint, list_checkpoints, read_checkpoint
from lit_llm.checkpoint.load import Opened, Weights, load_model, open_weights

if TYPE_CHECKING:
    from lit_llm.checkpoint.write import CheckpointWriteError, SafeCheckpointIO, snapshot, write_checkpoint

_WRITING = ("CheckpointWriteError", "SafeCheckpointIO", "snapshot", "write_checkpoint")

__all__ = [
    "CheckpointWriteError",
    "Found",
    "Opened",
    "SafeCheckpointIO",
    "Weights",
    "find_checkpoint",
    "list_checkpoints",
    "load_model",
    "open_weights",
    "read_checkpoint",
    "snapshot",
    "write_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _WRITING:
        raise AttributeError(f"module 'lit_llm.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module("lit_llm.checkpoint.write"), name)
