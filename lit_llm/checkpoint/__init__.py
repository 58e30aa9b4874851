"""Finding checkpoints on disk, and loading a model and its tokenizer from one."""

from lit_llm.checkpoint.find import Found, find_checkpoint, list_checkpoints, read_checkpoint
from lit_llm.checkpoint.load import load_model

__all__ = ["Found", "find_checkpoint", "list_checkpoints", "load_model", "read_checkpoint"]
