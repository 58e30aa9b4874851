"""Decoding a Transformer: sampling, the key-value cache's loop, streaming."""

from lit_llm.generation.config import GenerationConfig
from lit_llm.generation.decode import decode_one_token, generate, prefill
from lit_llm.generation.rows import GenerationResult
from lit_llm.generation.stream import stream

__all__ = ["GenerationConfig", "GenerationResult", "decode_one_token", "generate", "prefill", "stream"]
