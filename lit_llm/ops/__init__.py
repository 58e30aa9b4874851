"""Functions on tensors: one meaning, several back ends."""

from __future__ import annotations

from lit_llm.ops.cross_entropy import linear_cross_entropy

__all__ = [
    "linear_cross_entropy",
]
