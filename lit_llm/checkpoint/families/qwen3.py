"""Qwen3 and Qwen3-MoE (Yang et al. 2025): a norm over each query and key head; windows; experts."""

from lit_llm.checkpoint.families.experts import SPARSE_STEP, read_sparse_step, write_sparse_step
from lit_llm.checkpoint.families.family import RMS, SHARED, Family
from lit_llm.checkpoint.families.layout import STACKED, Names
from lit_llm.checkpoint.families.qwen2 import QWEN2, max_window_layers
from lit_llm.checkpoint.families.windows import Windows

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    fields={**SHARED, **RMS, "attention_bias": "attention_bias"},
    fixed={"use_qk_norm": True, "attention_output_bias": lambda fields: fields.get("attention_bias", False)},
    defaults={**QWEN2.defaults, "head_dim": 128},
    windows=QWEN2.windows,
    write_more=max_window_layers,
)

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    fields={**SHARED, **RMS, **SPARSE_STEP, "attention_bias": "attention_bias", "num_experts": "num_experts"},
    fixed=QWEN3.fixed,
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    windows=Windows(switch=True),
    read_more=read_sparse_step,
    write_more=write_sparse_step,
    other_names=(Names(experts=STACKED),),
)
