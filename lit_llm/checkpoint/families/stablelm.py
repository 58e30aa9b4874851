"""StableLM (Bellagente et al. 2024): layer norms, and heads rotated in part."""

from lit_llm.checkpoint.families.family import SHARED, Family

STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    fields={**SHARED, "rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
    fixed={"norm_type": "layer_norm", "attention_output_bias": False},
    constants={"qk_layernorm": False, "use_parallel_residual": False, "hidden_dropout": 0.0},
    head_dim="derived",
    partial_rotary=True,
)
