"""Named shapes. The small ones are ours; the others are the published shapes of Llama 3 and 3.2."""

from __future__ import annotations

from typing import Any

_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
}
_LLAMA32_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _small(hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "1m": _small(hidden=96, layers=4, heads=4, kv_heads=2, vocab=4096, context=512),
    "3m": _small(hidden=192, layers=5, heads=6, kv_heads=2, vocab=4096, context=1024),
    "15m": _small(hidden=320, layers=6, heads=5, kv_heads=5, vocab=16384, context=1024),
    "125m": _small(hidden=768, layers=12, heads=12, kv_heads=4, vocab=32768, context=2048),
    "350m": _small(hidden=1024, layers=24, heads=16, kv_heads=8, vocab=32768, context=2048),
    "llama-3.2-1b": {
        **_LLAMA3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "max_position_embeddings": 131072,
        "rope_scaling": _LLAMA32_ROPE,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3-70b": {
        **_LLAMA3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
