"""How many floating point operations training takes, by the field's convention."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_llm.model.transformer import Transformer


def flops_per_token(model: Transformer, seq_len: int, causal: bool = False) -> int:
    """Operations of forward and backward for a token of a row.

    6 for each parameter that the token meets (Kaplan et al. 2020, section 2.1): all but the embeddings and the experts
    that it is not sent to; a tied head is a matrix product and counts. Attention takes 12 x heads x head_dim x keys a
    layer (PaLM, Chowdhery et al. 2022, appendix B), where keys are the row's, or the window's if that is less.

    Args:
        model: whose configuration and parameters count.
        seq_len: tokens of a row.
        causal: whether attention counts the keys that causal queries see alone, (seq_len + 1) / 2 of a row on average.
    """
    config = model.config
    embeddings = model.embed_tokens.weight.numel()
    if config.tie_word_embeddings:
        embeddings = 0
    if model.embed_positions is not None:
        embeddings += model.embed_positions.weight.numel()
    keys = sum(_keys(config.window_of(layer), seq_len, causal) for layer in range(config.num_hidden_layers))
    attention = 12 * config.num_attention_heads * config.head_size * keys
    return round(6 * (model.num_parameters(active=True) - embeddings) + attention)


def _keys(window: int | None, seq_len: int, causal: bool) -> float:
    """That a query of a row meets on average."""
    width = seq_len if window is None else min(window, seq_len)
    if not causal:
        return width
    # The first `width` queries see 1 to width keys, all others width.
    return (width * (width + 1) / 2 + (seq_len - width) * width) / seq_len
