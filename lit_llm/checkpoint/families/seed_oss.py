"""Seed-OSS (ByteDance, 2025): Llama with the biases of the attention's input and output apart."""

from lit_llm.checkpoint.families.family import RMS, SHARED, Family

SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    fields={
        **SHARED,
        **RMS,
        "attention_bias": "attention_bias",
        "attention_output_bias": "attention_out_bias",
        "mlp_bias": "mlp_bias",
    },
    constants={"residual_dropout": 0.0},
)
