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
        "hidden_dropout": "residual_dropout",
    },
    defaults={
        "rms_norm_eps": 1e-6,
        "attention_bias": True,
        "attention_out_bias": False,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
)
