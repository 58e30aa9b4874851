"""One prompt and its completion: what is asked for, and what comes of it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from lit_llm.errors import UserError
from lit_llm.generation.config import GenerationConfig
from lit_llm.generation.sampling import prompt_key, uniform
from lit_llm.generation.text import TextStream, TextTokenizer
from lit_llm.model import ModelConfig

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class GenerationResult:
    """One completion.

    Args:
        tokens: the new ids, with the EOS id or the token that completed a stop text as the last one.
        logprobs: per token its log-probability under the model's own distribution: before penalty, temperature and
            filters, ids of the padded vocabulary excluded.
        finish_reason: ``eos``; ``stop``: a stop text occurred; ``length``: max_new_tokens or the context is used up.
        text: ``tokenizer.decode`` of the tokens without the EOS id, cut before the stop text; None without tokenizer.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    text: str | None = None

    def record(self, index: int, prompt: Any) -> dict[str, Any]:
        """The completion as one JSON object of predict's and generate's output."""
        return {
            "index": index,
            "prompt": prompt,
            "completion": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "logprobs": self.logprobs,
        }


class Row:
    """One prompt and its completion so far."""

    def __init__(
        self,
        model_config: ModelConfig,
        prompt: Sequence[int] | Tensor,
        config: GenerationConfig,
        tokenizer: TextTokenizer | None,
        sample_number: int,
        name: str,
    ) -> None:
        if config.stop and tokenizer is None:
            raise UserError("generation.stop needs a tokenizer; give tokenizer= as well")
        self.prompt = _prompt_ids(prompt, model_config, name)
        self.room = min(config.max_new_tokens, model_config.max_position_embeddings - len(self.prompt))
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.piece = ""  # the text that the last token settled
        self._eos = _eos_ids(config, model_config)
        self._text = TextStream(tokenizer, config.stop or ()) if tokenizer is not None else None
        self._key = prompt_key(config.seed, self.prompt, sample_number)

    def uniform(self) -> float:
        """The random number for the next token."""
        return uniform(self._key, len(self.prompt) + len(self.tokens))

    def take(self, token: int, logprob: float) -> None:
        """Adds a token and decides whether it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        is_eos = token in self._eos
        self.piece = self._text.push(token) if self._text is not None and not is_eos else ""
        if is_eos:
            self.finish_reason = "eos"
        elif self._text is not None and self._text.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.room:
            self.finish_reason = "length"
        if self._text is not None and self.finish_reason is not None:
            self.piece += self._text.finish()

    def result(self) -> GenerationResult:
        """The completion, once it is finished."""
        assert self.finish_reason is not None
        text = self._text.text if self._text is not None else None
        return GenerationResult(self.tokens, self.logprobs, self.finish_reason, text)


def _eos_ids(config: GenerationConfig, model_config: ModelConfig) -> frozenset[int]:
    given = config.eos_token_id
    ids = model_config.eos_token_id if given is None else given
    ids = [] if ids is None else [ids] if isinstance(ids, int) else ids
    outside = [i for i in ids if not 0 <= i < model_config.vocab_size]
    if given is not None and outside:
        raise UserError(
            f"generation.eos_token_id {outside[0]} is outside the vocabulary of {model_config.vocab_size} ids; "
            "give ids of the model's tokenizer, or [] for none"
        )
    return frozenset(ids)


def _prompt_ids(prompt: Any, config: ModelConfig, name: str) -> list[int]:
    try:
        values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        ids = [operator.index(i) for i in values]
    except TypeError:
        shown = repr(prompt)
        shown = shown if len(shown) < 40 else shown[:40] + "..."
        raise UserError(f"{name} must be a list of token ids, got {shown}; encode a text with the tokenizer") from None
    if not ids:
        if config.bos_token_id is None:
            raise UserError(f"{name} is empty and the model has no BOS id to start from; give at least one token")
        ids = [config.bos_token_id]
    outside = [i for i in ids if not 0 <= i < config.vocab_size]
    if outside:
        raise UserError(
            f"{name}: token id {outside[0]} is outside the vocabulary of {config.vocab_size} ids; it was encoded with "
            "another tokenizer than the model's"
        )
    if len(ids) >= config.max_position_embeddings:
        raise UserError(
            f"{name} has {len(ids)} tokens, which leaves no room for a new one in the model's context of "
            f"{config.max_position_embeddings} (max_position_embeddings); shorten it"
        )
    return ids
