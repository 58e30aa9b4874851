"""Phi-3 (Abdin et al. 2024): fused projections, long contexts by LongRoPE; heads rotated in part (Phi-4-mini)."""

from lit_llm.checkpoint.families.family import RMS, SHARED, Family
from lit_llm.checkpoint.families.layout import Names
from lit_llm.checkpoint.families.rope import Rope
from lit_llm.checkpoint.families.windows import Windows

PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    fields={**SHARED, **RMS, "hidden_dropout": "resid_pdrop"},  # embd_pdrop is applied nowhere
    defaults={"rms_norm_eps": 1e-5, "resid_pdrop": 0.0, "max_position_embeddings": 4096},
    head_dim="derived",
    # The first models' words for it.
    rope=Rope(partial=1.0, types=("default", "longrope"), other_names={"su": "longrope", "yarn": "longrope"}),
    windows=Windows(),
    names=Names(
        modules={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        }
    ),
)
