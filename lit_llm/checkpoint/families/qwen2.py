"""Qwen2 and Qwen2-MoE (Yang et al. 2024): biases on queries, keys and values alone; windows layer by layer."""

from typing import Any

from lit_llm.checkpoint.families.experts import SPARSE_STEP, read_sparse_step, write_sparse_step
from lit_llm.checkpoint.families.family import RMS, SHARED, Family, Key
from lit_llm.checkpoint.families.layout import STACKED, Names
from lit_llm.checkpoint.families.windows import Windows, windows_of
from lit_llm.model import ModelConfig


def max_window_layers(config: ModelConfig) -> dict[str, Any]:
    """What readers without layer_types go by: the layers before it are full."""
    full = [window is None for window in windows_of(config)]
    return {"max_window_layers": full.index(False) if False in full else len(full)}


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    fields={**SHARED, **RMS},
    fixed={"attention_bias": True, "attention_output_bias": False},
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    windows=Windows(switch=True, layer_types=True, slides=lambda keys, layer: layer >= keys["max_window_layers"]),
    write_more=max_window_layers,
)

QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    fields={
        **SHARED,
        **RMS,
        **SPARSE_STEP,
        "attention_bias": "qkv_bias",
        # It always has one: without, nothing of this family comes back.
        "shared_expert_intermediate_size": Key(
            "shared_expert_intermediate_size", lambda width: width, lambda width: width or 0
        ),
        "num_experts": "num_experts",
    },
    fixed={"attention_output_bias": False},
    defaults={
        **QWEN2.defaults,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    windows=Windows(
        switch=True,
        layer_types=True,
        slides=lambda keys, layer: layer % 2 == 0 and layer < keys["max_window_layers"],
    ),
    read_more=read_sparse_step,
    write_more=write_sparse_step,
    other_names=(Names(experts=STACKED),),
)
