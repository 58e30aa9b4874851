"""Experts in the words of the Qwen families: which layers are sparse, and how wide an expert is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_llm.checkpoint.families.family import Key
from lit_llm.model import ModelConfig

SPARSE_STEP: dict[str, str | Key] = {
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
    "router_aux_loss_coef": "router_aux_loss_coef",
}


def read_sparse_step(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Every ``decoder_sparse_step``-th layer is sparse, but for those of ``mlp_only_layers``."""
    step, dense = keys.get("decoder_sparse_step", 1), keys.get("mlp_only_layers") or []
    # transformers 5 writes it under Mixtral's name too.
    number = keys.get("num_local_experts", keys.get("num_experts"))
    if not number:  # what is said of experts there speaks of none
        return dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"))
    sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(keys["num_hidden_layers"])]
    types = None if all(sparse) else tuple("sparse" if one else "dense" for one in sparse)
    return {"num_experts": number, "mlp_layer_types": types}


def write_sparse_step(config: ModelConfig) -> dict[str, Any]:
    """The keys, which say it layer by layer."""
    dense = [layer for layer in range(config.num_hidden_layers) if not config.is_sparse(layer)]
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "moe_intermediate_size": config.expert_size,
        "num_experts": config.num_experts or 0,
    }
