"""Llama 1 to 3 (Touvron et al. 2023) and the many models of its shape."""

from lit_llm.checkpoint.families.family import RMS, SHARED, Family

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    fields={**SHARED, **RMS, "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    same={"attention_output_bias": "attention_bias"},
    head_dim="whole",
)
