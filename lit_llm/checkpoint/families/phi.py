"""Phi-1 to Phi-2 (Li et al. 2023): one norm for attention and MLP, which stand side by side; a bias on the logits."""

from lit_llm.checkpoint.families.family import SHARED, Family, activation
from lit_llm.checkpoint.families.layout import Names
from lit_llm.checkpoint.families.rope import Rope

PHI = Family(
    "phi",
    "PhiForCausalLM",
    fields={
        **SHARED,
        "hidden_act": activation("hidden_act", "gelu_new"),
        "rms_norm_eps": "layer_norm_eps",
        "use_qk_norm": "qk_layernorm",
        "hidden_dropout": "resid_pdrop",
        "embedding_dropout": "embd_pdrop",
    },
    fixed={
        "norm_type": "layer_norm",
        "use_parallel_residual": True,
        "shared_norm": True,
        "mlp_type": "plain",
        "mlp_bias": True,
        "attention_bias": True,
        "attention_output_bias": True,
        "lm_head_bias": True,
    },
    defaults={
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "qk_layernorm": False,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "max_position_embeddings": 2048,
    },
    head_dim="derived",
    rope=Rope(partial=0.5),
    names=Names(
        outer={"norm": "final_layernorm"},
        modules={
            "self_attn.dense": ("self_attn.o_proj",),
            "self_attn.q_layernorm": ("self_attn.q_norm",),
            "self_attn.k_layernorm": ("self_attn.k_norm",),
            "mlp.fc1": ("mlp.up_proj",),
            "mlp.fc2": ("mlp.down_proj",),
        },
    ),
)
