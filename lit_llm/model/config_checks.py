"""Whether the fields of a ModelConfig fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lit_llm.errors import UserError
from lit_llm.ops.rope import rope_frequencies

if TYPE_CHECKING:
    from lit_llm.model.config import ModelConfig

_ABOVE_ZERO = (
    *("intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_theta"),
    *("rms_norm_eps", "initializer_range", "logits_scaling", "embedding_multiplier", "residual_multiplier"),
)
_ABOVE_ZERO_OR_NULL = (
    *("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "unpadded_vocab_size", "clip_qkv"),
    *("rope_local_base_freq", "attention_multiplier", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "shared_expert_intermediate_size",
)
_DROPOUTS = ("attention_dropout", "hidden_dropout", "embedding_dropout")


def check_config(config: ModelConfig, choices: Mapping[str, Sequence[str]]) -> None:
    """Refuses what no Transformer can be built from.

    Args:
        config: filled.
        choices: field to its known values.

    Raises:
        UserError: one line that names the fields.
    """
    for name in _ABOVE_ZERO:
        if getattr(config, name) <= 0:
            raise UserError(f"model.config.{name} must be above 0, got {getattr(config, name)}")
    for name in _ABOVE_ZERO_OR_NULL:
        if getattr(config, name) is not None and getattr(config, name) <= 0:
            raise UserError(f"model.config.{name} must be above 0 or null, got {getattr(config, name)}")
    for name in _DROPOUTS:
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"model.config.{name} must be in [0, 1), got {getattr(config, name)}")
    for name, known in choices.items():
        if getattr(config, name) not in known:
            raise UserError(f"model.config.{name} {getattr(config, name)!r} is unknown; known are {', '.join(known)}")
    _check_attention(config)
    _check_norms(config)
    _check_experts(config)
    if config.unpadded_vocab_size is not None and config.unpadded_vocab_size > config.vocab_size:
        raise UserError(
            f"model.config.unpadded_vocab_size {config.unpadded_vocab_size} is above vocab_size {config.vocab_size}"
        )


def check_layers(name: str, values: Sequence[Any] | None, layers: int, known: Sequence[Any]) -> None:
    """Refuses a list that should have one of the known values for each layer."""
    if values is None:
        return
    if len(values) != layers:
        raise UserError(
            f"model.config.{name} has {len(values)} entries for num_hidden_layers {layers}; give one per layer"
        )
    unknown = sorted({str(value) for value in values if value not in known})
    if unknown:
        raise UserError(f"model.config.{name}: {unknown[0]!r} is unknown; known are {', '.join(map(str, known))}")


def _check_attention(config: ModelConfig) -> None:
    if config.num_attention_heads % config.kv_heads:
        raise UserError(
            f"model.config.num_attention_heads {config.num_attention_heads} does not divide by num_key_value_heads "
            f"{config.num_key_value_heads}; each key-value head serves a whole number of query heads"
        )
    if not 0 < config.partial_rotary_factor <= 1 or config.rotary_dim % 2 or config.rotary_dim == 0:
        raise UserError(
            f"model.config: head_dim {config.head_dim} x partial_rotary_factor {config.partial_rotary_factor} rotates "
            f"{config.rotary_dim} dimensions of a head; it must be an even number above 0 and at most head_dim"
        )
    check_layers("layer_types", config.layer_types, config.num_hidden_layers, ("full_attention", "sliding_attention"))
    if config.layer_types is not None and "sliding_attention" in config.layer_types and config.sliding_window is None:
        raise UserError("model.config.layer_types has sliding_attention; give sliding_window as well")
    check_layers("no_rope_layers", config.no_rope_layers, config.num_hidden_layers, (0, 1))
    if config.position_embedding == "rotary":
        rope_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings)
        return
    for name in ("rope_scaling", "rope_local_base_freq", "no_rope_layers"):
        if getattr(config, name) is not None:
            raise UserError(f"model.config.{name} is for rotary positions; leave it out where they are learned")


def _check_norms(config: ModelConfig) -> None:
    if config.use_parallel_residual and config.norm_placement != "pre":
        raise UserError(
            f"model.config.norm_placement {config.norm_placement} does not go with use_parallel_residual, whose norms "
            "come before attention and MLP; use pre"
        )
    if config.shared_norm and not config.use_parallel_residual:
        raise UserError("model.config.shared_norm is for blocks with use_parallel_residual; set that as well")
    if config.norm_zero_centered and (config.norm_type != "rms_norm" or not config.norm_weight):
        raise UserError("model.config.norm_zero_centered is for rms_norm with a weight; leave it out")
    if config.lm_head_bias and config.tie_word_embeddings:
        raise UserError("model.config.lm_head_bias needs a head of its own; set tie_word_embeddings to false")


def _check_experts(config: ModelConfig) -> None:
    if config.num_experts is None:
        for name in ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"):
            if getattr(config, name) is not None:
                raise UserError(f"model.config.{name} is for a mixture of experts; give num_experts as well")
        if "sparse" in (config.mlp_layer_types or ()):
            raise UserError("model.config.mlp_layer_types has sparse layers; give num_experts as well")
    else:
        if config.num_experts_per_tok is None:
            raise UserError(f"model.config.num_experts_per_tok is missing beside num_experts {config.num_experts}")
        if config.num_experts_per_tok > config.num_experts:
            raise UserError(
                f"model.config.num_experts_per_tok must be between 1 and num_experts {config.num_experts}, got "
                f"{config.num_experts_per_tok}"
            )
        if config.mlp_type != "gated" or config.mlp_bias:
            raise UserError("model.config.num_experts: experts are gated, without biases; leave mlp_type, mlp_bias out")
    check_layers("mlp_layer_types", config.mlp_layer_types, config.num_hidden_layers, ("dense", "sparse"))
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        if getattr(config, name) < 0:
            raise UserError(f"model.config.{name} must be at least 0, got {getattr(config, name)}")
