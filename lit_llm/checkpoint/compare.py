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
}
_SHAPES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "tie_word_embeddings", "norm_type", "use_qk_norm"),
    *("attention_bias", "attention_output_bias", "mlp_bias"),
}


def compare_configs(saved: Mapping[str, Any], present: ModelConfig) -> None:
    """Names what a model computes otherwise than the one whose checkpoint it is to take.

    Args:
        saved: the checkpoint's configuration.
        present: the model's.

    Raises:
        UserError: weights that don't fit.
    """
    here = present.to_dict()
    changed = [n for n in saved if n in here and n not in _FREE_FIELDS and saved[n] != here[n]]
    named = {n: f"{n} {saved[n]} there, {here[n]} here" for n in changed}
    misfits = [named[n] for n in changed if n in _SHAPES]
    if misfits:
        raise UserError(f"the checkpoint is of another model: {'; '.join(misfits)}; give its model.config")
    if changed:
        rank_zero_warn(f"the model computes otherwise than the checkpoint's: {'; '.join(named.values())}")
