"""The tokenizers library: loading, encoding and what its errors mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_llm.data.tokenizer_json import byte_measure
from lit_llm.errors import UserError

if TYPE_CHECKING:
    import tokenizers


def load_backend(text: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    if getattr(backend.model, "dropout", None) is not None:
        backend.model.dropout = None
    return backend


def part_control_tokens(backend: tokenizers.Tokenizer) -> None:
    """Keep control tokens that are typed in a text from being found as words or pieces of the vocabulary, by parting
    their first character from the others. A BPE makes its tokens by merges, and none of them that way, unless it takes
    whole words as they are."""
    from tokenizers import Regex, models, pre_tokenizers

    if isinstance(backend.model, models.BPE) and not backend.model.ignore_merges:
        return
    kept = [t.content for t in backend.get_added_tokens_decoder().values() if t.special and len(t.content) > 1]
    if kept:
        pattern = "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in kept)
        parting = pre_tokenizers.Split(Regex(pattern), "isolated")
        before = backend.pre_tokenizer
        backend.pre_tokenizer = parting if before is None else pre_tokenizers.Sequence([before, parting])


def special_ids(backend: tokenizers.Tokenizer) -> set[int]:
    return {i for i, token in backend.get_added_tokens_decoder().items() if token.special}


def encode_all(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, nothing added.

    Raises:
        UserError: a text with a lone surrogate, or one that the tokenizer has no ids for.
    """
    try:
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    except TypeError as error:
        raise text_error(texts) from error
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"the tokenizer cannot encode this text: {error}; give one that knows its words") from error


def text_error(texts: Sequence[str]) -> Exception:
    """Why the library takes one of ``texts`` for no text."""
    for text in texts:
        if not isinstance(text, str):
            return TypeError(f"a text must be a str, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return UserError(f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}): not valid Unicode")
    return TypeError("the tokenizers library refuses these texts")


def byte_lengths(content: dict[str, Any], backend: tokenizers.Tokenizer, vocab_size: int) -> np.ndarray:
    """UTF-8 bytes that each id stands for: (vocab_size,) int32, 0 for special tokens and unused ids."""
    lengths = np.zeros(vocab_size, dtype=np.int32)
    added = backend.get_added_tokens_decoder()
    measure = byte_measure(content)
    for token, i in backend.get_vocab(with_added_tokens=True).items():
        if i not in added:
            lengths[i] = measure(token)
        elif not added[i].special:
            lengths[i] = len(token.encode())
    return lengths
