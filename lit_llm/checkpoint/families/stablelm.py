"""StableLM and StableLM 2 (Bellagente et al. 2024): layer norms, heads rotated in part, parallel residuals."""

from lit_llm.checkpoint.families.family import SHARED, Family
from lit_llm.checkpoint.families.layout import Names
from lit_llm.checkpoint.families.rope import Rope


def _family(parallel: bool) -> Family:
    return Family(
        "stablelm",
        "StableLmForCausalLM",
        fields={
            **SHARED,
            "rms_norm_eps": "layer_norm_eps",
            "attention_bias": "use_qkv_bias",
            "use_qk_norm": "qk_layernorm",
            "hidden_dropout": "hidden_dropout",
        },
        fixed={
            "norm_type": "layer_norm",
            "attention_output_bias": False,
            "use_parallel_residual": parallel,
            "shared_norm": parallel,
            "qk_norm_scope": "each_head",
            "qk_norm_bias": False,
        },
        defaults={
            "layer_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
            "hidden_dropout": 0.0,
            "max_position_embeddings": 4096,
        },
        constants={"use_parallel_residual": parallel},
        head_dim="derived",
        rope=Rope(partial=0.25),
        names=Names(stacks={f"self_attn.{one}_norm": f"self_attn.{one}_layernorm.norms.{{h}}" for one in ("q", "k")}),
    )


STABLELM = (_family(parallel=False), _family(parallel=True))
