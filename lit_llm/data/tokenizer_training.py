"""A tokenizer learned from texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from threading import Thread
from typing import TYPE_CHECKING, Any

from lit_llm.data.tokenizer_json import CONFIG_FILE, TOKENIZER_FILE
from lit_llm.errors import UserError

if TYPE_CHECKING:
    from lit_llm.data.tokenizer import Tokenizer

EOS_TOKEN = "<|endoftext|>"
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")

_LONG_WORD = re.compile(r"\S{1000}")
_LONG_BLANK = re.compile(r"(\s{1000})\s+")


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 8192, *, min_frequency: int = 2, chat: bool = False
) -> Tokenizer:
    """A byte-level BPE (Sennrich et al. 2016 over bytes, with GPT-2's way of cutting text into words) learned on texts.

    Any Unicode text can be encoded and comes back unchanged. EOS is ``<|endoftext|>``, id 0; no BOS. ChatML's tokens
    ``<|im_start|>`` (1) and ``<|im_end|>`` (2) are always there, so that chats can follow a training on texts. With
    ``chat`` EOS is ``<|im_end|>``, padding ``<|endoftext|>``, and the template says ChatML. The result depends on the
    texts alone. A corpus with too few pairs that occur ``min_frequency`` times gives fewer ids.

    Raises:
        UserError: ``vocab_size`` below 259 (256 bytes and these three) or beyond a million.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from lit_llm.data.tokenizer import Tokenizer  # which hands this function on

    check_vocab_size(vocab_size)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[EOS_TOKEN, *CHAT_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _interruptibly(lambda: backend.train_from_iterator(_batched(map(_cut_long_words, texts)), trainer))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS_TOKEN}
    config |= {"add_bos_token": False, "clean_up_tokenization_spaces": False}
    if chat:
        from lit_llm.data.chat import CHATML

        config |= {"eos_token": CHAT_TOKENS[1], "pad_token": EOS_TOKEN, "chat_template": CHATML}
    return Tokenizer.from_files(
        {TOKENIZER_FILE: backend.to_str(pretty=True), CONFIG_FILE: json.dumps(config, indent=2)}
    )


def _interruptibly(work: Callable[[], None]) -> None:
    """Runs ``work``, which may stay in a library for minutes, in a thread, so that signals are heard meanwhile."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if failed:
        raise failed[0]


def _cut_long_words(text: str) -> str:
    """Breaks words of over 1,000 characters, such as encoded data, and shortens as long runs of white space: to learn
    from one takes the square of its length."""
    return _LONG_BLANK.sub(r"\1", _LONG_WORD.sub(r"\g<0>\n", text))


def check_vocab_size(vocab_size: int) -> None:
    """UserError unless a tokenizer of this size can be trained."""
    special = [EOS_TOKEN, *CHAT_TOKENS]
    if vocab_size < 256 + len(special):
        raise UserError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {', '.join(special)} need {256 + len(special)}"
        )
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
