"""GPT-NeoX (Black et al. 2022) and Pythia: parallel residuals or sequential ones; heads rotated in part."""

from lit_llm.checkpoint.families.family import SHARED, Family
from lit_llm.checkpoint.families.layout import Names
from lit_llm.checkpoint.families.rope import Rope


def _names(head: str) -> Names:
    return Names(
        "gpt_neox.",
        outer={"embed_tokens": "embed_in", "norm": "final_layer_norm"},
        head=head,
        modules={
            "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention.dense": ("self_attn.o_proj",),
            "mlp.dense_h_to_4h": ("mlp.up_proj",),
            "mlp.dense_4h_to_h": ("mlp.down_proj",),
        },
        grouped=frozenset(("attention.query_key_value",)),
    )


GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    fields={
        **{name: key for name, key in SHARED.items() if name != "num_key_value_heads"},
        "rms_norm_eps": "layer_norm_eps",
        "use_parallel_residual": "use_parallel_residual",
        "attention_bias": "attention_bias",
        "hidden_dropout": "hidden_dropout",
    },
    fixed={
        "norm_type": "layer_norm",
        "mlp_type": "plain",
        "mlp_bias": True,
        "attention_output_bias": lambda fields: fields.get("attention_bias", False),
    },
    defaults={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "attention_bias": True,
        "hidden_dropout": 0.0,
        "max_position_embeddings": 2048,
    },
    head_dim="derived",
    rope=Rope(theta_key="rotary_emb_base", partial=0.25, partial_key="rotary_pct"),
    names=_names("embed_out"),
    other_names=(_names("lm_head"),),
    # Which drops the embeddings as well.
    read_more=lambda keys: {"embedding_dropout": keys["hidden_dropout"]},
)
