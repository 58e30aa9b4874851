"""Qwen2 (Yang et al. 2024): biases on queries, keys and values alone; windows layer by layer."""

from lit_llm.checkpoint.families.family import RMS, SHARED, Family

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    fields={**SHARED, **RMS},
    fixed={"attention_bias": True, "attention_output_bias": False},
    windows="layers",
)
