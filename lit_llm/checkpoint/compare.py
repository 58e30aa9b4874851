"""Whether a checkpoint's weights fit a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.errors import UserError
from lit_llm.model import ModelConfig

# What may differ between a checkpoint and the model that it is loaded into: it changes neither shapes nor the function.
_FREE_FIELDS = {
    "max_position_embeddings",
    "attention_dropout",
    "initializer_range",
    "unpadded_vocab_size",
    "bos_token_id",
    "eos_token_id",
    "hidden_dropout",
    "embedding_dropout",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "model_type",
}
_SHAPES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "tie_word_embeddings", "norm_type", "use_qk_norm"),
    *("attention_bias", "attention_output_bias", "mlp_bias", "lm_head_bias", "qk_norm_bias", "qk_norm_scope"),
    *("norm_weight", "norm_bias", "norm_placement", "use_parallel_residual", "shared_norm", "mlp_type"),
    *("position_embedding", "num_experts", "moe_intermediate_size", "mlp_layer_types"),
    "shared_expert_intermediate_size",
}


def misfits(saved: Mapping[str, Any], present: ModelConfig) -> tuple[dict[str, tuple[Any, Any]], set[str]]:
    """What differs between two configurations, but for what may: field to both values; and which of them are shapes.

    Args:
        saved: a configuration's fields; what it lacks, as an older one does, has its default.
        present: the other one.
    """
    here = present.to_dict()
    known = ModelConfig(**{name: value for name, value in saved.items() if name in here}).to_dict()
    changed = {name: (known[name], here[name]) for name in here if _differs(name, known, here)}
    shapes = _SHAPES | ({"max_position_embeddings"} if present.position_embedding == "learned" else set())
    return changed, shapes & set(changed)


def compare_configs(saved: Mapping[str, Any], present: ModelConfig) -> None:
    """Names what a model computes otherwise than the one whose checkpoint it is to take.

    Args:
        saved: the checkpoint's configuration.
        present: the model's.

    Raises:
        UserError: weights that don't fit.
    """
    changed, shapes = misfits(saved, present)
    named = {name: f"{name} {there} there, {here} here" for name, (there, here) in changed.items()}
    if shapes:
        told = "; ".join(text for name, text in named.items() if name in shapes)
        raise UserError(f"the checkpoint is of another model: {told}; give its model.config")
    if changed:
        rank_zero_warn(f"the model computes otherwise than the checkpoint's: {'; '.join(named.values())}")


def _differs(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if name == "max_position_embeddings":  # of learned positions it is the size of a table
        return one[name] != other[name] and "learned" in (one["position_embedding"], other["position_embedding"])
    return name not in _FREE_FIELDS and one[name] != other[name]
