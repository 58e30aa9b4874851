"""Gemma 1, 2 and 3 (Gemma team 2024, 2025), text: gains 1 + w, scaled embeddings, soft caps, norms on both sides."""

import math
from typing import Any

from lit_llm.checkpoint.families.family import RMS, SHARED, Family, Key, activation
from lit_llm.checkpoint.families.rope import Rope
from lit_llm.checkpoint.families.windows import Windows
from lit_llm.model import ModelConfig


def _activation(name: str) -> str:
    """The first configurations say gelu and mean its approximation by tanh."""
    return "gelu_pytorch_tanh" if name == "gelu" else activation("").read(name)


def _write(config: ModelConfig) -> dict[str, Any]:
    """The number by whose root scores are divided; transformers insists on a whole one, so others don't come back."""
    return {"query_pre_attn_scalar": round(config.score_scale(0) ** -2)}


def _read(keys: Any) -> dict[str, Any]:
    return {"attention_multiplier": keys["query_pre_attn_scalar"] ** -0.5}


_FIXED: dict[str, Any] = {
    "norm_zero_centered": True,
    "embedding_multiplier": lambda fields: math.sqrt(fields["hidden_size"]),
    "attention_output_bias": lambda fields: fields.get("attention_bias", False),
}
_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "attention_bias": False,
    "max_position_embeddings": 8192,
}
_LATER: dict[str, str | Key] = {
    **SHARED,
    **RMS,
    "hidden_act": activation("hidden_activation"),
    "attention_bias": "attention_bias",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_LATER_DEFAULTS = {**_DEFAULTS, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}

GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    fields={
        **SHARED,
        **RMS,
        "hidden_act": Key("hidden_act", _activation, lambda name: name),
        "attention_bias": "attention_bias",
    },
    fixed=_FIXED,
    defaults={**_DEFAULTS, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 16},
    constants={"use_bidirectional_attention": None},
)

GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    fields=_LATER,
    fixed={**_FIXED, "norm_placement": "sandwich"},
    defaults={
        **_LATER_DEFAULTS,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    constants={"use_bidirectional_attention": None},
    windows=Windows(layer_types=True, slides=lambda keys, layer: layer % 2 == 0),
    read_more=_read,
    write_more=_write,
)

GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    # It has a key for a soft cap on scores still, which means nothing.
    fields={name: key for name, key in _LATER.items() if name != "attn_logit_softcapping"},
    fixed={**_FIXED, "norm_placement": "sandwich", "use_qk_norm": True},
    defaults={
        **_LATER_DEFAULTS,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    constants={"use_bidirectional_attention": False},
    rope=Rope(theta=1e6, local=10000.0, local_key="rope_local_base_freq"),
    windows=Windows(layer_types=True, slides=lambda keys, layer: (layer + 1) % keys["sliding_window_pattern"] != 0),
    read_more=_read,
    write_more=_write,
)
