"""The Transformer, in plain torch."""

from lit_llm.model.cache import KVCache
from lit_llm.model.config import ModelConfig
from lit_llm.model.transformer import Transformer

__all__ = ["KVCache", "ModelConfig", "Transformer"]
