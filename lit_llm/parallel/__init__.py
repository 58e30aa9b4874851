"""Device meshes, sharding, activation checkpointing, and the Lightning strategies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lit_llm.parallel.activation_checkpointing import checkpoint_activations
from lit_llm.parallel.mesh import MeshSizes, build_mesh, resolve_sizes
from lit_llm.parallel.parallelize import Sharding, parallelize, shard
from lit_llm.parallel.report import local_bytes

if TYPE_CHECKING:
    from lit_llm.parallel.ddp import DataParallelStrategy
    from lit_llm.parallel.strategy import MeshStrategy

_STRATEGIES = {"MeshStrategy": "strategy", "DataParallelStrategy": "ddp"}  # need Lightning, which is slow to import

__all__ = [
    "DataParallelStrategy",
    "MeshSizes",
    "MeshStrategy",
    "Sharding",
    "build_mesh",
    "checkpoint_activations",
    "local_bytes",
    "parallelize",
    "resolve_sizes",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name not in _STRATEGIES:
        raise AttributeError(f"module 'lit_llm.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lit_llm.parallel.{_STRATEGIES[name]}"), name)
