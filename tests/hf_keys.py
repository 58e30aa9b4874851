"""Keys of config.json that change what a model computes, with another value for each; for tests/test_hf_perturb.py."""

from __future__ import annotations

from typing import Any

from tests.hf_variants import LINEAR, LLAMA3, VARIANTS, YARN

THETA = {"rope_parameters.rope_theta": 90.0}
PARTIAL = {"rope_parameters.partial_rotary_factor": 0.75}
GATED_ACTS = {"hidden_act": "gelu", "hidden_act=relu": "relu", "hidden_act=gelu_new": "gelu_new"}
PLAIN_ACTS = {"hidden_act": "gelu", "hidden_act=relu": "relu", "hidden_act=silu": "silu"}
RMS = {"rms_norm_eps": 0.3}
LAYER = {"layer_norm_eps": 0.3}
WINDOW = {"sliding_window": 5}
# Twice the heads of half the width: the same weights.
HEADS: dict[str, Any] = {"num_attention_heads": {"num_attention_heads": 8, "num_key_value_heads": 4}}
HEADS_AND_DIM = {"num_attention_heads": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}}
GRANITE = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"), 0.45)
MOE = {"num_experts_per_tok": 1}
ROPES = {
    "rope_parameters=linear": {"rope_parameters": {**LINEAR, "rope_theta": 10000.0}},
    "rope_parameters=llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}},
    "rope_parameters=yarn": {"rope_parameters": YARN},
}
QWEN = {**THETA, **GATED_ACTS, **RMS}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "activation_function": "gelu",
        "activation_function=relu": "relu",
        "layer_norm_epsilon": 0.3,
        "n_head": 8,
        "scale_attn_weights": False,
        "reorder_and_upcast_attn": True,
    },
    "gpt_neox": {**THETA, **PARTIAL, **LAYER, "hidden_act": "gelu_new", "hidden_act=relu": "relu"}
    | {"num_attention_heads": 2, **ROPES},
    "llama": {**THETA, **GATED_ACTS, **RMS, **HEADS_AND_DIM, **ROPES},
    "mistral": {**THETA, **GATED_ACTS, **RMS, **WINDOW, **HEADS_AND_DIM, **ROPES},
    "qwen2": {**QWEN, **HEADS},
    "qwen3": QWEN,
    "gemma": {**THETA, "hidden_act": "silu", "hidden_act=relu": "relu", **RMS, **ROPES},
    "gemma2": {
        **THETA,
        **RMS,
        **WINDOW,
        "hidden_activation": "silu",
        "query_pre_attn_scalar": 30,
        "attn_logit_softcapping": 1.0,
        "attn_logit_softcapping=null": None,
        "final_logit_softcapping": 1.5,
        "final_logit_softcapping=null": None,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "gemma3_text": {
        "rope_parameters.full_attention.rope_theta": 90.0,
        "rope_parameters.full_attention.factor": 2.0,
        "rope_parameters.sliding_attention.rope_theta": 90.0,
        "rope_parameters.full_attention": {"rope_type": "default", "rope_theta": 30000.0},
        **RMS,
        **WINDOW,
        "hidden_activation": "silu",
        "query_pre_attn_scalar": 30,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 1.5,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
    },
    "phi": {**THETA, **PARTIAL, **LAYER, **PLAIN_ACTS, **ROPES},
    "phi3": {**THETA, **GATED_ACTS, **RMS, **HEADS},
    "olmo": {**THETA, **GATED_ACTS, **HEADS, "clip_qkv": 0.3, **ROPES},
    "olmo2": {**THETA, **GATED_ACTS, **RMS, **HEADS, **ROPES},
    "granite": {**THETA, **GATED_ACTS, **RMS, **GRANITE, **HEADS, **ROPES},
    "starcoder2": {**THETA, **PLAIN_ACTS, "norm_epsilon": 0.3, **WINDOW, **HEADS},
    "stablelm": {**THETA, **PARTIAL, **LAYER, **GATED_ACTS},
    "falcon": {**THETA, "activation": "silu", "activation=relu": "relu", "layer_norm_epsilon": 0.3},
    "smollm3": {**THETA, **GATED_ACTS, **RMS, "no_rope_layers": [1, 1, 0], **HEADS},
    "mixtral": {**THETA, **GATED_ACTS, **RMS, **MOE, **WINDOW},
    "qwen3_moe": {**THETA, **GATED_ACTS, **RMS, **MOE},
    "seed_oss": {**THETA, **GATED_ACTS, **RMS},
    "olmo3": {
        "rope_parameters.full_attention.rope_theta": 90.0,
        "rope_parameters.full_attention.factor": 2.0,
        "rope_parameters.sliding_attention.rope_theta": 90.0,
        **GATED_ACTS,
        **RMS,
        **WINDOW,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    },
    "olmoe": {**THETA, **GATED_ACTS, **RMS, **MOE, "clip_qkv": 0.3, "norm_topk_prob": False},
    "qwen2_moe": {**THETA, **GATED_ACTS, **RMS, **MOE, "norm_topk_prob": True},
    "granitemoe": {**THETA, **GATED_ACTS, **RMS, **MOE, **GRANITE},
    "gpt_bigcode": {"activation_function": "gelu", "layer_norm_epsilon": 0.3, "scale_attn_weights": False},
}
YARN_KEYS = {
    f"rope_parameters.{key}": value
    for key, value in {
        "factor": 2.0,
        "beta_fast": 0.5,
        "beta_slow": 0.2,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
        "truncate": False,
    }.items()
}
YARN_KEYS |= {"rope_parameters.mscale": {"rope_parameters.mscale": 1.0, "rope_parameters.mscale_all_dim": 0.3}}
# Of a variant, beside its family's.
MORE: dict[str, dict[str, Any]] = {
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_neox_parallel": {"use_parallel_residual": False},
    "llama_mha": {"num_attention_heads": {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}},
    "llama_headdim": {"num_attention_heads": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 12}},
    "llama_rope_linear": {"rope_parameters.factor": 2.0},
    "llama_rope_llama3": {
        "rope_parameters.factor": 2.0,
        "rope_parameters.low_freq_factor": 2.0,
        "rope_parameters.high_freq_factor": 3.0,
        "rope_parameters.original_max_position_embeddings": 32,
    },
    "llama_rope_yarn": YARN_KEYS,
    "mistral": {"num_attention_heads": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 12}},
    "mistral_swa": {"sliding_window=null": None},
    "qwen2": ROPES,
    "qwen2_swa": {**WINDOW, "use_sliding_window": {"use_sliding_window": False, "layer_types": None}}
    | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    | {"max_window_layers": {"max_window_layers": 2, "layer_types": None}},
    "qwen3": ROPES,
    "qwen3_swa": {**WINDOW, "max_window_layers": {"max_window_layers": 2, "layer_types": None}},
    "phi3_longrope": {
        "rope_parameters.long_factor": [1.0, 1.2, 1.4, 2.0, 2.5, 3.0],
        "rope_parameters.short_factor": [1.0] * 6,
        "original_max_position_embeddings": 32,
        "max_position_embeddings": 96,
        "rope_parameters.attention_factor": 1.5,
        "rope_parameters.factor": 2.0,
    },
    "phi3_swa": {**WINDOW, "rope_parameters.partial_rotary_factor": 0.5},
    "olmo_clip": {"clip_qkv=null": None},
    "starcoder2": {"sliding_window=null": None},
    "falcon_new": {"num_attention_heads": {"num_attention_heads": 8, "num_kv_heads": 4}},
    "smollm3": {"no_rope_layer_interval": {"no_rope_layer_interval": 3, "no_rope_layers": None}},
    "smollm3_swa": {**WINDOW, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    | {"use_sliding_window": {"use_sliding_window": False, "layer_types": None}},
    "mixtral_swa": {"sliding_window=null": None},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_moe_norm": {"norm_topk_prob": False},
    "qwen3_moe_step": {**WINDOW, "use_sliding_window": False},
}

# (variant, change): transformers computes it and we refuse it, naming the key.
REFUSED = {("gpt_bigcode", "scale_attn_weights")}
# (variant, change): transformers' logits stay as they are, and ours with them.
SAME = {
    ("gpt2", "reorder_and_upcast_attn"),  # a matter of rounding
    ("gpt2_inverse", "reorder_and_upcast_attn"),
    ("llama_tied", "hidden_act=gelu_new"),  # another name of its own
    ("llama_rope_llama3", "rope_parameters=llama3"),
    ("llama_rope_linear", "rope_parameters=linear"),
    ("llama_rope_yarn", "rope_parameters=yarn"),
    ("gemma3_text", "attn_logit_softcapping"),  # which Gemma 3 has no more: it is in the file and means nothing
}
# (variant, change) under which the weights do not fit.
_UNFIT = {("phi3_longrope", "num_attention_heads")}


def changes(name: str) -> dict[str, dict[str, Any]]:
    """Of a variant: a change's name to the keys and values that it consists of; dots lead into mappings."""
    both = {**FAMILIES[VARIANTS[name].model_type], **MORE.get(name, {})}
    if VARIANTS[name].windows:
        both.pop("num_attention_heads", None)
    named: dict[str, dict[str, Any]] = {}
    for label, value in both.items():
        if (name, label) in _UNFIT:
            continue
        key = label.split("=")[0]
        compound = isinstance(value, dict) and key != "rope_parameters.full_attention"
        named[label] = value if compound else {key: value}
    return named
