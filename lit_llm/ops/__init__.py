"""Functions on tensors: one meaning, several back ends."""

from __future__ import annotations

from lit_llm.ops.attention import attention
from lit_llm.ops.cross_entropy import linear_cross_entropy
from lit_llm.ops.documents import document_lengths
from lit_llm.ops.norms import layer_norm, rms_norm

__all__ = [
    "attention",
    "document_lengths",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
]
