"""A tokenizer learned from texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from lit_llm.data.tokenizer_json import CONFIG_FILE, TOKENIZER_FILE
from lit_llm.errors import UserError

if TYPE_CHECKING:
    from lit_llm.data.tokenizer import Tokenizer

EOS_TOKEN = "<|endoftext|>"
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")

_LONG_WORD = re.compile(r"\S{1000}")


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 8192, *, min_frequency: int = 2, chat: bool = False
) -> Tokenizer:
    """A byte-level BPE (Sennrich et al. 2016 over bytes, with GPT-2's way of cutting text into words) learned on texts.

    Any Unicode text can be encoded and comes back unchanged. EOS is ``<|endoftext|>``, id 0; no BOS. With ``chat`` the
    tokens ``<|im_start|>`` (1) and ``<|im_end|>`` (2) are there too, EOS is ``<|im_end|>``, padding ``<|endoftext|>``,
    and the template is ChatML. The result depends on the texts alone. A corpus with too few pairs that occur
    ``min_frequency`` times gives fewer ids.

    Raises:
        UserError: ``vocab_size`` below 257 (256 bytes and EOS; 259 with ``chat``) or beyond a million.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from lit_llm.data.tokenizer import Tokenizer  # which hands this function on

    special = [EOS_TOKEN, *CHAT_TOKENS] if chat else [EOS_TOKEN]
    check_vocab_size(vocab_size, chat=chat)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_batched(map(_cut_long_words, texts)), trainer)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS_TOKEN}
    config |= {"add_bos_token": False, "clean_up_tokenization_spaces": False}
    if chat:
        from lit_llm.data.chat import CHATML

        config |= {"eos_token": CHAT_TOKENS[1], "pad_token": EOS_TOKEN, "chat_template": CHATML}
    return Tokenizer.from_files(
        {TOKENIZER_FILE: backend.to_str(pretty=True), CONFIG_FILE: json.dumps(config, indent=2)}
    )


def _cut_long_words(text: str) -> str:
    """Breaks words of over 1,000 characters, such as encoded data: to learn from one takes the square of its length."""
    return _LONG_WORD.sub(r"\g<0>\n", text)


def check_vocab_size(vocab_size: int, *, chat: bool = False) -> None:
    """UserError unless a tokenizer of this size can be trained."""
    least = 257 + len(CHAT_TOKENS) * chat
    if vocab_size < least:
        special = ", ".join([EOS_TOKEN, *CHAT_TOKENS] if chat else [EOS_TOKEN])
        raise UserError(f"vocab_size {vocab_size} is too small: 256 bytes and {special} need {least}")
    if vocab_size > 1_000_000:  # the library would allocate for it at once
        raise UserError(f"vocab_size {vocab_size} is too large: the limit is 1000000")


def _batched(texts: Iterable[str], characters: int = 1 << 20) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    yield batch
