"""StarCoder2 (Lozhkov et al. 2024): layer norms, a plain MLP, and a window on every layer or on none."""

from lit_llm.checkpoint.families.family import SHARED, Family
from lit_llm.checkpoint.families.layout import Names
from lit_llm.checkpoint.families.windows import Windows

STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    fields={
        **SHARED,
        "rms_norm_eps": "norm_epsilon",
        "attention_bias": "use_bias",
        "hidden_dropout": "residual_dropout",
        "embedding_dropout": "embedding_dropout",
    },
    fixed={
        "norm_type": "layer_norm",
        "mlp_type": "plain",
        "mlp_bias": lambda fields: fields.get("attention_bias", False),
        "attention_output_bias": lambda fields: fields.get("attention_bias", False),
    },
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "initializer_range": 0.018042,
    },
    head_dim="derived",
    windows=Windows(),
    names=Names(modules={"mlp.c_fc": ("mlp.up_proj",), "mlp.c_proj": ("mlp.down_proj",)}),
)
