"""Text of one completion as it comes."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from torch import Tensor

from lit_llm.errors import UserError
from lit_llm.generation.config import GenerationConfig
from lit_llm.generation.decode import DecodingLoop, decoding_mode
from lit_llm.generation.rows import GenerationResult, Row
from lit_llm.generation.text import TextTokenizer
from lit_llm.model import Transformer


def stream(
    model: Transformer,
    prompt_ids: Sequence[int] | Tensor,
    generation_config: GenerationConfig | None = None,
    tokenizer: TextTokenizer | None = None,
    *,
    sample_number: int = 0,
    chunk_size: int | None = None,
) -> Generator[str, None, GenerationResult]:
    """Completes one prompt, piece by piece.

    The pieces join to the ``text`` that :func:`generate` gives for the same arguments: ``tokenizer.decode`` of all new
    ids without the EOS id, cut before a stop text. None is empty, none ends inside a character, and no part of a stop
    text is ever shown. Between pieces the model is as it was found, also when the caller stops listening.

    Args:
        prompt_ids: ids, a list or a tensor (seq,). An empty prompt starts from the model's BOS id.
        generation_config: None: the defaults, which are greedy.
        tokenizer: makes the text.
        sample_number, chunk_size: as in :func:`generate`.

    Returns:
        An iterator over pieces; its return value (of ``yield from``) is the :class:`GenerationResult`.

    Raises:
        UserError: as :func:`generate`, at the call.
    """
    if tokenizer is None:
        raise UserError("stream needs a tokenizer to make text; give tokenizer=, or use generate for ids")
    config = generation_config or GenerationConfig()
    row = Row(model.config, prompt_ids, config, tokenizer, sample_number, "the prompt")
    return _pieces(model, row, DecodingLoop(model, [row], config, chunk_size))


def _pieces(model: Transformer, row: Row, loop: DecodingLoop) -> Generator[str, None, GenerationResult]:
    more = True
    while more:
        with decoding_mode(model):
            more = loop.step()
        if row.piece:
            yield row.piece
    return row.result()
