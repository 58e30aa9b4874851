"""Decoding a Transformer: the verbs `prefill` and `decode_one_token`, the one loop over them, and `generate`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from lit_llm.errors import UserError
from lit_llm.generation.config import GenerationConfig
from lit_llm.generation.rows import GenerationResult, Row
from lit_llm.generation.sampling import apply_repetition_penalty, sample
from lit_llm.generation.text import TextTokenizer
from lit_llm.model import KVCache, Transformer


@torch.no_grad()
def prefill(
    model: Transformer, input_ids: Tensor, lengths: Sequence[int], cache: KVCache, chunk_size: int | None = None
) -> Tensor:
    """Feeds prompts, or their continuation, behind what the cache holds, and moves it on by ``lengths``.

    Args:
        input_ids: (rows, longest) ids; row b has ``lengths[b]`` real ones and any valid id behind them.
        lengths: 1 to ``longest`` per row.
        chunk_size: tokens of a row that one forward takes, which bounds the memory of activations; None: all. The
            result is the same.

    Returns:
        (rows, vocab_size) logits behind the last real token of each row.

    Raises:
        UserError: lengths that do not fit, or more tokens than the cache has room for; with longrope, a row that grows
            beyond the original context, for which what the cache holds of it is of no use.
    """
    rows, longest = input_ids.shape
    if len(lengths) != rows or not all(1 <= length <= longest for length in lengths):
        raise UserError(f"lengths {list(lengths)[:8]} do not fit input_ids of {rows} rows of {longest} tokens")
    if chunk_size is not None and chunk_size < 1:
        raise UserError(f"chunk_size must be at least 1 or None for whole prompts, got {chunk_size}")
    cache.check_room(longest)
    _check_stale(cache, lengths)
    logits: Tensor | None = None
    size = chunk_size or longest
    with cache.expecting(lengths):
        for start in range(0, longest, size):
            chunk = input_ids[:, start : start + size]
            real = [min(max(length - start, 0), chunk.shape[1]) for length in lengths]
            last = torch.tensor([max(n - 1, 0) for n in real], device=input_ids.device)
            here = model(chunk, cache=cache, logits_at=last)
            cache.advance(real)
            live = torch.tensor([n > 0 for n in real], device=input_ids.device)
            logits = here if logits is None else torch.where(live[:, None], here, logits)
    assert logits is not None
    return logits


@torch.no_grad()
def decode_one_token(model: Transformer, tokens: Tensor, cache: KVCache) -> Tensor:
    """Feeds one token a row, (rows,) ids, behind what the cache holds, and moves it on by one.

    Returns:
        (rows, vocab_size) logits of the token after it. Nothing of the past is computed again.

    Raises:
        UserError: the longest row has no room left; with longrope, as :func:`prefill`.
    """
    _check_stale(cache, 1)
    return _feed_one_token(model, tokens, cache)


def _check_stale(cache: KVCache, new_lengths: Sequence[int] | int) -> None:
    stale = cache.stale_rows(new_lengths)
    if stale:
        raise UserError(
            f"row {stale[0]} grows beyond {cache.switch_length} tokens, from where on longrope rotates all of it "
            "otherwise, and the cache holds it as it was; prefill a new cache with the whole row, or use generate"
        )


def _feed_one_token(model: Transformer, tokens: Tensor, cache: KVCache) -> Tensor:
    logits = model(tokens[:, None], cache=cache)[:, 0]
    cache.advance(1)
    return logits


def generate(
    model: Transformer,
    prompts: Iterable[Sequence[int] | Tensor],
    generation_config: GenerationConfig | None = None,
    *,
    tokenizer: TextTokenizer | None = None,
    sample_number: int | Sequence[int] = 0,
    batch_size: int | None = None,
    chunk_size: int | None = None,
) -> list[GenerationResult]:
    """Completes prompts. What a prompt gets does not depend on the other prompts, their order or the batch size.

    A draw depends on (seed, prompt ids, sample number, position) alone, so two equal prompts get equal completions;
    give them different sample numbers for different ones. The model's training mode is left as found, and compiled
    blocks run eagerly, since every length would be compiled anew.

    Args:
        prompts: lists of ids, or tensors (seq,), of any lengths; or one tensor (prompts, seq). An empty prompt starts
            from the model's BOS id.
        generation_config: None: the defaults, which are greedy.
        tokenizer: for ``text`` in the results, and for stop texts.
        sample_number: which sample of a prompt's completions to draw, one for all or one per prompt.
        batch_size: prompts decoded together; None: all.
        chunk_size: see :func:`prefill`.

    Returns:
        One result per prompt, in their order. A prompt near the end of the context gets fewer new tokens than
        max_new_tokens, with the reason ``length``.

    Raises:
        UserError: a prompt that leaves no room for one new token or holds an id outside the vocabulary; an empty one
            without a BOS id; stop texts without a tokenizer; logits that are NaN.
    """
    config, prompts = generation_config or GenerationConfig(), list(prompts)
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch_size must be at least 1 or None for all prompts, got {batch_size}")
    numbers = [sample_number] * len(prompts) if isinstance(sample_number, int) else list(sample_number)
    if len(numbers) != len(prompts):
        raise UserError(
            f"{len(numbers)} sample numbers for {len(prompts)} prompts; give one per prompt, or a single one"
        )
    rows = [
        Row(model.config, prompt, config, tokenizer, number, f"prompt {i}")
        for i, (prompt, number) in enumerate(zip(prompts, numbers, strict=True))
    ]
    by_length = sorted(rows, key=lambda row: len(row.prompt))  # rows of about one length share a batch
    size = batch_size or len(rows)
    with decoding_mode(model):
        for start in range(0, len(rows), size or 1):
            loop = DecodingLoop(model, by_length[start : start + size], config, chunk_size)
            while loop.step():
                pass
    return [row.result() for row in rows]


class DecodingLoop:
    """The loop under `generate` and `stream`: a batch of rows, one token each a step. Steps run in `decoding_mode`."""

    def __init__(
        self, model: Transformer, rows: Sequence[Row], config: GenerationConfig, chunk_size: int | None = None
    ) -> None:
        self._model = model
        self._rows = list(rows)
        self._config = config
        self._chunk_size = chunk_size
        self._vocab_size = model.config.generated_vocab_size
        self._tokens: Tensor | None = None  # the last ones, (rows,)
        self._cache: KVCache | None = None
        self._seen: Tensor | None = None  # (rows, vocab) ids of prompt and completion, for the penalty

    def step(self) -> bool:
        """Adds one token to each unfinished row; whether any is left unfinished."""
        # Ids that only pad the vocabulary cannot be generated: they are cut off at once.
        raw = self._next_logits()[:, : self._vocab_size].float()
        logits = raw
        if self._seen is not None:
            logits = apply_repetition_penalty(raw, self._seen, self._config.repetition_penalty)
        uniforms = None
        if not self._config.greedy:
            uniforms = torch.tensor([row.uniform() for row in self._rows], dtype=torch.float64, device=raw.device)
        self._tokens = sample(logits, self._config, uniforms)
        if self._seen is not None:
            self._seen.scatter_(1, self._tokens[:, None], True)
        logprobs = raw.gather(1, self._tokens[:, None])[:, 0] - raw.logsumexp(-1)
        for row, token, logprob in zip(self._rows, self._tokens.tolist(), logprobs.tolist(), strict=True):
            if row.finish_reason is None:
                if logprob != logprob:
                    raise UserError(
                        f"the model's logits are NaN after {len(row.tokens)} new tokens; its weights are damaged or "
                        "the precision is too narrow for it"
                    )
                row.take(token, logprob)
        return self._drop_finished()

    def _next_logits(self) -> Tensor:
        if self._cache is not None and self._tokens is not None:
            return self._next_logits_behind(self._tokens, self._cache)
        device, longest = self._model.device, max(len(row.prompt) for row in self._rows)
        self._cache = self._new_cache(self._rows, max(len(row.prompt) + row.room for row in self._rows))
        if self._config.repetition_penalty != 1:
            seen = torch.zeros(len(self._rows), self._model.config.vocab_size, dtype=torch.bool, device=device)
            # The padding repeats the row's first id, which it has seen anyway.
            padded = [row.prompt + row.prompt[:1] * (longest - len(row.prompt)) for row in self._rows]
            self._seen = seen.scatter_(1, torch.tensor(padded, device=device), True)[:, : self._vocab_size]
        return self._prefill(self._rows, self._cache)

    def _next_logits_behind(self, tokens: Tensor, cache: KVCache) -> Tensor:
        # Rows that grow beyond longrope's original context are computed anew, the others as ever: each gets what it
        # would get alone. Of a finished row nobody reads the logits.
        anew = [i for i in cache.stale_rows(1) if self._rows[i].finish_reason is None]
        if not anew:
            return _feed_one_token(self._model, tokens, cache)
        rows = [self._rows[i] for i in anew]
        fresh = self._new_cache(rows, max(len(row.prompt) + len(row.tokens) for row in rows))
        logits = self._prefill(rows, fresh)
        if len(anew) == len(self._rows):
            cache.advance(1)
        else:
            index = torch.tensor(anew, device=logits.device)
            logits = _feed_one_token(self._model, tokens, cache).index_copy(0, index, logits)
        cache.put(anew, fresh)
        return logits

    def _new_cache(self, rows: Sequence[Row], capacity: int) -> KVCache:
        return self._model.new_cache(len(rows), capacity, _compute_dtype(self._model))

    def _prefill(self, rows: Sequence[Row], cache: KVCache) -> Tensor:
        """Feeds all that the rows are by now."""
        ids = [row.prompt + row.tokens for row in rows]
        lengths = [len(row) for row in ids]
        padded = [row + [0] * (max(lengths) - len(row)) for row in ids]
        return prefill(self._model, torch.tensor(padded, device=self._model.device), lengths, cache, self._chunk_size)

    def _drop_finished(self) -> bool:
        """Takes finished rows out once they are half of the batch, or its longest: all that run on then have room."""
        assert self._cache is not None
        assert self._tokens is not None
        left = [i for i, row in enumerate(self._rows) if row.finish_reason is None]
        if not left or len(left) == len(self._rows):
            return bool(left)
        lengths = self._cache.lengths
        if 2 * len(left) <= len(lengths) or max(lengths[i] for i in left) < max(lengths):
            self._rows = [self._rows[i] for i in left]
            index = torch.tensor(left, device=self._tokens.device)
            self._tokens = self._tokens[index]
            self._cache.select(left)
            if self._seen is not None:
                self._seen = self._seen[index]
        return True


@contextmanager
def decoding_mode(model: nn.Module) -> Iterator[None]:
    """No dropout, no gradients, no compilation inside; everything as it was afterwards.

    Inference mode is switched off where it is on: sharded parameters do not support it, and a cache made in it could
    not be written outside it.
    """
    training = [module for module in model.modules() if module.training]
    # Nothing can be compiled before torch._dynamo is imported, and the import takes a second.
    may_be_compiled = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    try:
        for module in training:
            module.training = False
        eager = torch.compiler.set_stance("force_eager") if may_be_compiled else nullcontext()
        with torch.inference_mode(False), torch.no_grad(), eager:
            yield
    finally:
        for module in training:
            module.training = True


def _compute_dtype(model: Transformer) -> torch.dtype:
    """The dtype that keys and values come in."""
    device = model.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return model.embed_tokens.weight.dtype
