"""Granite 3 (Granite team 2024): Llama with multipliers; with experts."""

from typing import Any

from lit_llm.checkpoint.families.family import RMS, SHARED, Family, Key
from lit_llm.checkpoint.families.layout import Names

_FIELDS: dict[str, str | Key] = {
    **SHARED,
    **RMS,
    "attention_bias": "attention_bias",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logits_scaling",
}
_FIXED: dict[str, Any] = {"attention_output_bias": lambda fields: fields.get("attention_bias", False)}
_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "attention_multiplier": 1.0,
}


def _write(config: Any) -> dict[str, Any]:
    return {"attention_multiplier": config.score_scale(0)}


def _read(keys: Any) -> dict[str, Any]:
    return {"attention_multiplier": keys["attention_multiplier"]}


GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    fields={**_FIELDS, "mlp_bias": "mlp_bias"},
    fixed=_FIXED,
    defaults=_DEFAULTS,
    head_dim="whole",
    read_more=_read,
    write_more=_write,
)

GRANITE_MOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    fields={
        **_FIELDS,
        "num_experts": "num_local_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "router_aux_loss_coef": "router_aux_loss_coef",
    },
    fixed=_FIXED,
    defaults={**_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
    head_dim="derived",
    names=Names(
        modules={"block_sparse_moe.router.layer": ("mlp.gate",)},
        experts=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
    read_more=_read,
    write_more=lambda config: {**_write(config), "intermediate_size": config.expert_size},
)
