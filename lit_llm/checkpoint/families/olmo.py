"""OLMo 1 to 3 and OLMoE (Groeneveld et al. 2024; OLMo team 2025; Muennighoff et al. 2024)."""

from typing import Any

from lit_llm.checkpoint.families.family import RMS, SHARED, Family, Key
from lit_llm.checkpoint.families.layout import STACKED, Names
from lit_llm.checkpoint.families.rope import Rope
from lit_llm.checkpoint.families.windows import Windows

_FIELDS: dict[str, str | Key] = {**SHARED, "attention_bias": "attention_bias"}
_FIXED: dict[str, Any] = {"attention_output_bias": lambda fields: fields.get("attention_bias", False)}
_QK_NORM: dict[str, Any] = {"use_qk_norm": True, "qk_norm_scope": "layer"}
_DEFAULTS: dict[str, Any] = {"attention_bias": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}

OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    fields={**_FIELDS, "clip_qkv": "clip_qkv"},
    fixed={**_FIXED, "norm_type": "layer_norm", "norm_weight": False, "rms_norm_eps": 1e-5},
    defaults=_DEFAULTS,
    head_dim="derived",
)

OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    fields={**_FIELDS, **RMS},
    fixed={**_FIXED, **_QK_NORM, "norm_placement": "post"},
    defaults=_DEFAULTS,
    head_dim="derived",
)

OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    fields={**_FIELDS, **RMS},
    fixed={**_FIXED, **_QK_NORM, "norm_placement": "post"},
    defaults={**_DEFAULTS, "sliding_window": 4096},
    head_dim="derived",
    rope=Rope(theta=500000.0, local=500000.0),
    windows=Windows(layer_types=True, slides=lambda keys, layer: (layer + 1) % 4 != 0),
)

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    fields={
        **_FIELDS,
        **RMS,
        "clip_qkv": "clip_qkv",
        "num_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "norm_topk_prob": "norm_topk_prob",
        "router_aux_loss_coef": "router_aux_loss_coef",
    },
    fixed={**_FIXED, **_QK_NORM},
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
    },
    head_dim="derived",
    # Ours falls back on the width of the MLP, theirs has that key alone.
    write_more=lambda config: {"intermediate_size": config.expert_size},
    other_names=(Names(experts=STACKED),),
)
