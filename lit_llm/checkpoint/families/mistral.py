"""Mistral 7B (Jiang et al. 2023): Llama without biases, with a window on every layer or on none."""

from lit_llm.checkpoint.families.family import RMS, SHARED, Family

MISTRAL = Family("mistral", "MistralForCausalLM", fields={**SHARED, **RMS}, windows="all")
