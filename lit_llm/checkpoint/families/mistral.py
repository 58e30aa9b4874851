"""Mistral 7B and Mixtral (Jiang et al. 2023, 2024): Llama with a window on every layer or on none; with experts."""

from typing import Any

from lit_llm.checkpoint.families.family import RMS, SHARED, Family
from lit_llm.checkpoint.families.layout import STACKED, Names
from lit_llm.checkpoint.families.rope import Rope
from lit_llm.checkpoint.families.windows import Windows

_DEFAULTS: dict[str, Any] = {"num_key_value_heads": 8, "max_position_embeddings": 131072}

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    fields={**SHARED, **RMS},
    defaults={**_DEFAULTS, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    windows=Windows(),
)

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    fields={
        **SHARED,
        **RMS,
        "num_experts": "num_local_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "router_aux_loss_coef": "router_aux_loss_coef",
    },
    defaults={
        **_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    constants={"router_jitter_noise": 0.0},
    rope=Rope(theta=1e6),
    windows=Windows(),
    names=Names(
        modules={"block_sparse_moe.gate": ("mlp.gate",)},
        experts=tuple(f"block_sparse_moe.experts.{{e}}.{w}.weight" for w in ("w1", "w3", "w2")),
    ),
    # Ours falls back on the width of the MLP, theirs has that key alone.
    write_more=lambda config: {"intermediate_size": config.expert_size},
    other_names=(Names(experts=STACKED),),
)
