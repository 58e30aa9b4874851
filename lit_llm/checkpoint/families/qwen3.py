"""Qwen3 (Yang et al. 2025): a norm over each query and key head; windows layer by layer."""

from lit_llm.checkpoint.families.family import RMS, SHARED, Family

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    fields={**SHARED, **RMS, "attention_bias": "attention_bias"},
    fixed={"use_qk_norm": True},
    same={"attention_output_bias": "attention_bias"},
    windows="layers",
)
