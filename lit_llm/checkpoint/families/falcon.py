"""Falcon (Almazrouei et al. 2023): fused queries, keys and values; attention and MLP side by side, mostly."""

from collections.abc import Mapping
from typing import Any

from lit_llm.checkpoint.families.family import SHARED, Family, Key, activation
from lit_llm.checkpoint.families.layout import Names

Modules = Mapping[str, tuple[str, ...]]
_MODULES: Modules = {
    "self_attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.dense": ("self_attn.o_proj",),
    "mlp.dense_h_to_4h": ("mlp.up_proj",),
    "mlp.dense_4h_to_h": ("mlp.down_proj",),
}


def _family(norms: Modules, constants: Mapping[str, Any], parallel: bool, shared: bool) -> Family:
    """One of its shapes, told apart by ``constants``."""
    new = constants["new_decoder_architecture"]
    heads: dict[str, str | Key] = {"num_key_value_heads": "num_kv_heads"} if new else {}
    return Family(
        "falcon",
        "FalconForCausalLM",
        fields={
            **{name: key for name, key in SHARED.items() if name not in ("num_key_value_heads", "hidden_act")},
            **heads,
            "intermediate_size": "ffn_hidden_size",
            "hidden_act": activation("activation"),
            "rms_norm_eps": "layer_norm_epsilon",
            "attention_bias": "bias",
            "hidden_dropout": "hidden_dropout",
        },
        fixed={
            "norm_type": "layer_norm",
            "mlp_type": "plain",
            "mlp_bias": lambda fields: fields.get("attention_bias", False),
            "attention_output_bias": lambda fields: fields.get("attention_bias", False),
            "use_parallel_residual": parallel,
            "shared_norm": shared,
            **({"num_key_value_heads": 1} if constants.get("multi_query") else {}),
        },
        defaults={
            "activation": "gelu",
            "layer_norm_epsilon": 1e-5,
            "bias": False,
            "hidden_dropout": 0.0,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            **({"num_ln_in_parallel_attn": 2} if new else {}),
        },
        constants={"alibi": False, **constants},
        head_dim="derived",
        names=Names(
            "transformer.",
            "h",
            outer={"embed_tokens": "word_embeddings", "norm": "ln_f"},
            modules={**_MODULES, **norms},
            grouped=frozenset(("self_attention.query_key_value",)),
        ),
    )


_NEW = {"new_decoder_architecture": True}
_OLD = {"new_decoder_architecture": False}
_ONE: Modules = {"input_layernorm": ("input_layernorm",)}
_TWO: Modules = {"ln_attn": ("input_layernorm",), "ln_mlp": ("post_attention_layernorm",)}

FALCON = (
    _family(_ONE, {**_OLD, "multi_query": True, "parallel_attn": True}, parallel=True, shared=True),
    _family(_TWO, {**_NEW, "num_ln_in_parallel_attn": 2}, parallel=True, shared=False),
    _family(_ONE, {**_NEW, "num_ln_in_parallel_attn": 1}, parallel=True, shared=True),
    _family(_ONE, {**_OLD, "multi_query": False, "parallel_attn": True}, parallel=True, shared=True),
    _family(_ONE, {**_OLD, "multi_query": True, "parallel_attn": False}, parallel=False, shared=False),
    _family(_ONE, {**_OLD, "multi_query": False, "parallel_attn": False}, parallel=False, shared=False),
)
