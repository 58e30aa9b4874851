"""From logits to a token: penalty, temperature, filters and the draw, as pure functions.

Nothing here holds state. The random number of a draw is a function of (seed, prompt ids, sample number, position), so a
prompt's text does not depend on the batch, the order or the rank it is decoded in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_llm.generation.config import GenerationConfig

_TOP_P_SLACK = 1e-6  # float32 logits carry that much error into a sum of probabilities


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Makes ids that occurred before less likely (Keskar et al. 2019, CTRL, section 4.1).

    Args:
        logits: (rows, vocab) float.
        seen: (rows, vocab) bool, the ids that occurred; how often does not matter.
        penalty: positive seen logits are divided by it, negative ones multiplied.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """(rows, vocab) logits with all but the k best at -inf; of equal ones at the border the lower ids stay."""
    if k >= logits.shape[-1]:
        return logits
    border = logits.topk(k).values[:, -1:]
    better, equal = logits > border, logits == border
    room = k - better.sum(-1, keepdim=True)
    return logits.masked_fill(~(better | (equal & (equal.cumsum(-1) <= room))), -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """(rows, vocab) logits with -inf outside the nucleus (Holtzman et al. 2020, section 3.1).

    The nucleus is the smallest set of best ids whose probabilities sum to at least ``p``, up to 1e-6 for rounding; it
    holds the best id even for 0. Of equal ids the lower come first.
    """
    if p >= 1:
        return logits
    ordered, ids = logits.softmax(-1, dtype=torch.float64).sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    drop = before >= p - _TOP_P_SLACK
    drop[:, 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter_(-1, ids, drop), -torch.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """(rows, vocab) logits with -inf where the probability is below ``p`` times that of the best id."""
    best = logits.amax(-1, keepdim=True)
    return logits.masked_fill((logits - best).exp() < p, -torch.inf)


def prompt_key(seed: int, prompt: Sequence[int], sample_number: int = 0) -> bytes:
    """What the random numbers of one completion share: a digest of (seed, prompt ids, sample number)."""
    return hashlib.blake2b(repr((seed, sample_number, [int(i) for i in prompt])).encode(), digest_size=32).digest()


def uniform(key: bytes, position: int) -> float:
    """The random number in [0, 1) for the token at ``position`` of the sequence; a multiple of 2**-52.

    Plain integers and a standard hash: equal on every machine, with no generator whose state must be kept.
    """
    digest = hashlib.blake2b(position.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 12) / 2**52


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Inverts the cumulative distribution in the order of the vocabulary.

    Args:
        logits: (rows, vocab) float, -inf where an id cannot be drawn.
        uniforms: (rows,) float64 in [0, 1).

    Returns:
        (rows,) int64 ids, each of probability above 0.
    """
    probabilities = logits.softmax(-1, dtype=torch.float64)
    # A parallel sum may creep up by rounding over places of probability 0; they must never be hit.
    cumulative = probabilities.cumsum(-1).masked_fill(probabilities == 0, 0.0)
    target = uniforms[:, None] * cumulative.amax(-1, keepdim=True)
    return (cumulative > target).to(torch.int8).argmax(-1)  # argmax gives the first of equals


def sample(logits: Tensor, config: GenerationConfig, uniforms: Tensor | None) -> Tensor:
    """The next token of each row: temperature, top_k, top_p, min_p and the draw, or the best id if greedy.

    Args:
        logits: (rows, vocab) float32, after the repetition penalty.
        config: of the filters; with temperature 0 it is greedy.
        uniforms: (rows,) float64 in [0, 1), see :func:`uniform`; not read if greedy.

    Returns:
        (rows,) int64 ids.
    """
    if config.greedy:
        return logits.argmax(-1)
    assert uniforms is not None
    # In float64 and with the best at 0, no temperature is too small.
    logits = logits.double()
    logits = (logits - logits.amax(-1, keepdim=True)) / config.temperature
    if config.top_k is not None:
        logits = keep_top_k(logits, config.top_k)
    if config.top_p is not None:
        logits = keep_top_p(logits, config.top_p)
    if config.min_p is not None:
        logits = keep_min_p(logits, config.min_p)
    return draw(logits, uniforms)
