"""Phi-3 (Abdin et al. 2024): fused projections; a head may be rotated in part (Phi-4-mini)."""

from lit_llm.checkpoint.families.family import RMS, SHARED, Family

PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    fields={**SHARED, **RMS},
    constants={"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    head_dim="derived",
    windows="all",
    rope_types=("default",),
    partial_rotary=True,
    modules={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)
