"""The tiny models of the tests of Hugging Face folders: families, variants, and config.json in both styles."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCAB, CONTEXT, WINDOW, ORIGINAL = 131, 64, 8, 16
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MHA = {"num_key_value_heads": None}
SWA = {"sliding_window": WINDOW}
# The last two of three layers slide.
QWEN_SWA = {**SWA, "use_sliding_window": True, "max_window_layers": 1}
GPT2_SHAPE = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}
FALCON_SHAPE = {name: SHAPE[name] for name in SHAPE if name not in ("intermediate_size", "num_key_value_heads")}
NEOX_SHAPE = {name: SHAPE[name] for name in SHAPE if name != "num_key_value_heads"}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 0.7, "attention_multiplier": 0.35}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": ORIGINAL}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
# With these, the ramp of a head of 16 under a small base begins and ends inside it.
YARN |= {"beta_fast": 1.0, "beta_slow": 0.1, "rope_theta": 100.0}
# Six frequencies: three quarters of a head of 16 are rotated.
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 3.5, 4.0],
    "partial_rotary_factor": 0.75,
}
MOE = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
QWEN_MOE = {**MOE, "num_experts": 4, "moe_intermediate_size": 40}


@dataclass(frozen=True)
class Variant:
    """A model of a family.

    Args:
        model_type, keys: of the configuration; they come on top of the shape.
        shape: of the family, in its own words.
        v4: keys that config.json has in the hub's style, beside the translated ones; None: it lacks them.
        rope: rope_parameters.
        windows: some layer slides.
        reach: beyond the families that were asked for.
    """

    model_type: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    v4: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] | None = None
    shape: Mapping[str, Any] = field(default_factory=lambda: SHAPE)
    reach: bool = False

    @property
    def windows(self) -> bool:
        return self.keys.get("sliding_window") is not None

    def config(self) -> Any:
        """transformers' configuration."""
        from transformers import AutoConfig

        rope = {} if self.rope is None else {"rope_parameters": json.loads(json.dumps(self.rope))}
        return AutoConfig.for_model(self.model_type, **{**self.shape, **IDS, **self.keys, **rope})

    def keys_v4(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """config.json's content in the words of transformers 4, without what equals the class's default."""
        default = _default_keys(self.model_type)
        old = {k: v for k, v in keys.items() if k in _NAMES or k not in default or v != default[k]}
        old |= {"torch_dtype": old.pop("dtype"), "transformers_version": "4.38.0", "use_cache": True}
        rope = old.pop("rope_parameters", None) or keys.get("rope_parameters")
        if rope is not None:
            scaling = dict(rope.get("full_attention", rope))
            if "sliding_attention" in rope and self.model_type == "gemma3_text":
                old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            old["rope_theta"] = scaling.pop("rope_theta")
            if "partial_rotary_factor" in scaling:
                old["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
            # Gemma 3's files have always said rope_type; the others' older ones say type.
            if scaling["rope_type"] in ("linear", "longrope") and "full_attention" not in rope:
                scaling["type"] = scaling.pop("rope_type")
            if scaling.get("type") == "longrope":
                scaling.pop("original_max_position_embeddings", None)
            old["rope_scaling"] = None if scaling.get("rope_type") == "default" else scaling
        if self.model_type in _DERIVED_HEAD and old.get("head_dim") == 16:
            del old["head_dim"]  # hidden_size / num_attention_heads
        for name, other in _RENAMED.get(self.model_type, {}).items():
            if name in old:
                old[other] = old.pop(name)
        old |= {**_V4.get(self.model_type, {}), **self.v4}
        return {k: v for k, v in old.items() if v is not _ABSENT}


@functools.cache
def _default_keys(model_type: str) -> dict[str, Any]:
    from transformers import AutoConfig

    return dict(AutoConfig.for_model(model_type).to_dict())


_ABSENT = object()
_NAMES = ("model_type", "architectures", "vocab_size", "dtype", *IDS)
# What the hub's files of a family have beside what transformers 5 knows, or lack.
_RENAMED = {
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "qwen2_moe": {"num_local_experts": "num_experts"},
}
_DERIVED_HEAD = ("llama", "mistral", "mixtral")
_UNUSED_WINDOW = {"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 1}
_V4: dict[str, dict[str, Any]] = {
    "gpt2": {"n_ctx": CONTEXT, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
    "qwen2": _UNUSED_WINDOW,
    "qwen3": _UNUSED_WINDOW,
    "qwen3_moe": _UNUSED_WINDOW,
    "gemma": {"hidden_act": "gelu"},  # it means tanh
    "gemma2": {"layer_types": _ABSENT, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
    "gemma3_text": {"layer_types": _ABSENT, "_sliding_window_pattern": _ABSENT, "sliding_window_pattern": 3},
    "starcoder2": {"norm_type": "layer_norm", "mlp_type": "default", "attention_softmax_in_fp32": True},
    "falcon": {"apply_residual_connection_post_layernorm": False, "ffn_hidden_size": _ABSENT},
    "smollm3": {"layer_types": _ABSENT, "max_window_layers": 28, "pretraining_tp": 2},
    "gpt_bigcode": {"inference_runner": 0, "validate_runner_input": True, "num_key_value_heads": _ABSENT},
}
_QWEN_V4 = {**QWEN_SWA, "layer_types": _ABSENT}
_NO_LIST = {"no_rope_layers": _ABSENT}
_DERIVED_KV = {"num_kv_heads": _ABSENT}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 30000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
OLMO3_ROPE = {"full_attention": {**YARN, "rope_theta": 500000.0}}
OLMO3_ROPE |= {"sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}
OLMO3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
FALCON_NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}


def _variants() -> dict[str, Variant]:
    theta, default = {"rope_type": "default", "rope_theta": 700.0}, {"rope_type": "default", "rope_theta": 10000.0}

    def partial(share: float) -> dict[str, Any]:
        return {**theta, "partial_rotary_factor": share}

    def gpt2(**keys: Any) -> Variant:
        return Variant("gpt2", keys, shape=GPT2_SHAPE)

    def falcon(v4: Mapping[str, Any] | None = None, rope: Mapping[str, Any] = default, **keys: Any) -> Variant:
        reach = not keys.get("parallel_attn", True)
        return Variant("falcon", keys, v4 or {}, rope, FALCON_SHAPE, reach)

    def llama(rope: Mapping[str, Any] = default, **keys: Any) -> Variant:
        return Variant("llama", keys, rope={"rope_theta": 10000.0, **rope})

    return {
        "gpt2": gpt2(),
        "gpt2_inverse": gpt2(scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False, n_inner=96),
        "gpt_neox_parallel": Variant("gpt_neox", rope=partial(0.25), shape=NEOX_SHAPE),
        "gpt_neox_sequential": Variant(
            "gpt_neox", {"use_parallel_residual": False}, rope=partial(0.5), shape=NEOX_SHAPE
        ),
        "llama_gqa": llama(theta, rms_norm_eps=0.01),
        "llama_mha": llama(**MHA),
        "llama_tied": llama(tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh"),
        "llama_headdim": llama(head_dim=24),
        "llama_bias": llama(attention_bias=True, mlp_bias=True),
        "llama_rope_llama3": llama(LLAMA3),
        "llama_rope_linear": llama(LINEAR),
        "llama_rope_yarn": llama(YARN),
        "mistral": Variant("mistral", {"sliding_window": None, "head_dim": 24}, rope=theta),
        "mistral_swa": Variant("mistral", SWA),
        "qwen2": Variant("qwen2", {"tie_word_embeddings": True}, rope=theta),
        "qwen2_swa": Variant("qwen2", QWEN_SWA, _QWEN_V4),
        "qwen3": Variant("qwen3", {"head_dim": 24}, rope=theta),
        "qwen3_swa": Variant("qwen3", {**QWEN_SWA, "head_dim": 16, "attention_bias": True}, _QWEN_V4),
        "gemma": Variant("gemma", {"head_dim": 24}),
        "gemma2": Variant(
            "gemma2",
            {"head_dim": 24, "query_pre_attn_scalar": 10, **SWA}
            | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
            rope=theta,
        ),
        "gemma3_text": Variant(
            "gemma3_text",
            {"head_dim": 24, "query_pre_attn_scalar": 10, **SWA, "num_hidden_layers": 4, "sliding_window_pattern": 3},
            rope=GEMMA3_ROPE,
        ),
        "phi": Variant("phi", MHA, rope=partial(0.5)),
        "phi_qk_layernorm": Variant("phi", {"qk_layernorm": True}, rope=partial(0.25)),
        "phi3": Variant("phi3", rope=theta),
        "phi3_longrope": Variant("phi3", {"original_max_position_embeddings": ORIGINAL}, rope=LONGROPE),
        "phi3_swa": Variant("phi3", SWA, rope=partial(0.75)),
        "olmo": Variant("olmo", rope=theta),
        "olmo_clip": Variant("olmo", {"clip_qkv": 0.7, "attention_bias": True, "tie_word_embeddings": True}),
        "olmo2": Variant("olmo2", rope=theta),
        "granite": Variant("granite", {**GRANITE, "tie_word_embeddings": True}, rope=theta),
        "granite_bias": Variant("granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
        "starcoder2": Variant("starcoder2", SWA, rope=theta),
        "starcoder2_plain": Variant("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
        "stablelm": Variant("stablelm", {"use_qkv_bias": True}, rope=partial(0.25)),
        "stablelm_parallel": Variant("stablelm", {"use_parallel_residual": True}, rope=partial(0.5)),
        "stablelm_qk_layernorm": Variant("stablelm", {"qk_layernorm": True}),
        "falcon_new": falcon(**FALCON_NEW),
        "falcon_new_one_norm": falcon(**FALCON_NEW, num_ln_in_parallel_attn=1, rope=theta, ffn_hidden_size=96, v4=_FFN),
        "falcon_mqa": falcon(_DERIVED_KV),
        "falcon_sequential": falcon(parallel_attn=False, multi_query=False, bias=True, tie_word_embeddings=False),
        "smollm3": Variant("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": False}, _NO_LIST),
        "smollm3_swa": Variant("smollm3", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, **SWA}, rope=theta),
        "mixtral": Variant("mixtral", {**MOE, "num_local_experts": 4}, rope=theta),
        "mixtral_swa": Variant("mixtral", {**MOE, "num_local_experts": 5, **SWA, "head_dim": 24}),
        "qwen3_moe": Variant("qwen3_moe", {**QWEN_MOE, "head_dim": 24}, rope=theta),
        "qwen3_moe_norm": Variant(
            "qwen3_moe", {**QWEN_MOE, "norm_topk_prob": True, "mlp_only_layers": [1], "attention_bias": True}
        ),
        "qwen3_moe_step": Variant(
            "qwen3_moe",
            {**QWEN_MOE, "decoder_sparse_step": 2, **SWA, "use_sliding_window": True},
            {"sliding_window": 8} | {"use_sliding_window": True},
        ),
        "seed_oss": Variant("seed_oss", {"head_dim": 24, "mlp_bias": True}, reach=True),
        "olmo3": Variant("olmo3", {**SWA, "layer_types": OLMO3_LAYERS}, rope=OLMO3_ROPE, reach=True),
        "olmoe": Variant("olmoe", {**MOE, "num_experts": 4, "clip_qkv": 0.7, "norm_topk_prob": True}, reach=True),
        "qwen2_moe": Variant("qwen2_moe", {**QWEN_MOE, "shared_expert_intermediate_size": 48}, reach=True),
        "granitemoe": Variant("granitemoe", {**GRANITE, **MOE, "num_local_experts": 4}, reach=True),
        "gpt_bigcode": Variant("gpt_bigcode", shape=GPT2_SHAPE, reach=True),
    }


_FFN = {"ffn_hidden_size": 96}
VARIANTS = _variants()
