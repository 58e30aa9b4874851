"""GPT-2 (Radford et al. 2019) and GPT-BigCode (Allal et al. 2023), where all queries share one key."""

from typing import Any

from lit_llm.checkpoint.families.family import Family, Key, activation
from lit_llm.checkpoint.families.layout import Names

_FIELDS: dict[str, str | Key] = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": activation("activation_function"),
    "rms_norm_eps": "layer_norm_epsilon",
    "attention_dropout": "attn_pdrop",
    "hidden_dropout": "resid_pdrop",
    "embedding_dropout": "embd_pdrop",
    "initializer_range": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
}
_FIXED: dict[str, Any] = {
    "norm_type": "layer_norm",
    "position_embedding": "learned",
    "mlp_type": "plain",
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
}
_DEFAULTS: dict[str, Any] = {
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-5,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "tie_word_embeddings": True,
}
_OUTER = {"embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"}
_MODULES = {
    "ln_1": ("input_layernorm",),
    "ln_2": ("post_attention_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": ("self_attn.o_proj",),
    "mlp.c_fc": ("mlp.up_proj",),
    "mlp.c_proj": ("mlp.down_proj",),
}

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    fields={
        **_FIELDS,
        "hidden_act": activation("activation_function", "gelu_new"),
        "scale_attn_by_inverse_layer_idx": "scale_attn_by_inverse_layer_idx",
    },
    fixed=_FIXED,
    defaults={**_DEFAULTS, "activation_function": "gelu_new", "scale_attn_by_inverse_layer_idx": False},
    constants={"add_cross_attention": False},
    head_dim="derived",
    rope=None,
    names=Names(
        "transformer.",
        "h",
        outer=_OUTER,
        modules=_MODULES,
        transposed=frozenset(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    ),
    # Otherwise the scores are taken as they are.
    read_more=lambda keys: {} if keys.get("scale_attn_weights", True) else {"attention_multiplier": 1.0},
    write_more=lambda config: {"scale_attn_weights": config.attention_multiplier != 1.0},
)

GPT_BIGCODE = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    fields=_FIELDS,
    fixed=_FIXED,
    defaults={**_DEFAULTS, "activation_function": "gelu_pytorch_tanh"},
    constants={"add_cross_attention": False, "multi_query": True, "scale_attn_weights": True},
    head_dim="derived",
    rope=None,
    names=Names("transformer.", "h", outer=_OUTER, modules=_MODULES),
    read_more=lambda keys: {"num_key_value_heads": 1},
)
