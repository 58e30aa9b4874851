"""Llama 1 to 3 (Touvron et al. 2023) and the many models of its shape."""

from lit_llm.checkpoint.families.family import RMS, SHARED, Family

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    fields={**SHARED, **RMS, "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    fixed={"attention_output_bias": lambda fields: fields.get("attention_bias", False)},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    head_dim="whole",
)
