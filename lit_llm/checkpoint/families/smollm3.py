"""SmolLM3 (Hugging Face, 2025), with every layer rotated: Llama with windows layer by layer."""

from lit_llm.checkpoint.families.family import RMS, SHARED, Family

SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    fields={**SHARED, **RMS, "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    same={"attention_output_bias": "attention_bias"},
    constants_by_layer={"no_rope_layers": 1},
    windows="layers",
)
