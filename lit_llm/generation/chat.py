"""What differs when a conversation is continued."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lit_llm.data.conversation import turn_end_ids
from lit_llm.generation.config import GenerationConfig

if TYPE_CHECKING:
    from lit_llm.data.tokenizer import Tokenizer
    from lit_llm.model.config import ModelConfig


def until_turn_ends(config: GenerationConfig, model: ModelConfig, tokenizer: Tokenizer) -> GenerationConfig:
    """``config`` for prompts of which some are conversations: a completion ends at the model's EOS and at the control
    tokens that end a turn by the tokenizer's chat template. A given ``eos_token_id`` stays as it is."""
    if config.eos_token_id is not None:
        return config
    own = model.eos_token_id
    eos = [] if own is None else [own] if isinstance(own, int) else list(own)
    return dataclasses.replace(config, eos_token_id=[*eos, *(i for i in turn_end_ids(tokenizer) if i not in eos)])
