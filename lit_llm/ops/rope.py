"""Rotary position embedding (Su et al. 2021, RoFormer, section 3.2) with float32 tables, and ways to stretch it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_llm.errors import UserError
from lit_llm.ops.rope_scaling import (
    BETA_FAST,
    BETA_SLOW,
    ORIGINAL,
    ROPE_TYPES,
    normalised_scaling,
    usual_attention_factor,
)

__all__ = [
    "ROPE_TYPES",
    "RopeFrequencies",
    "apply_rope",
    "normalised_scaling",
    "rope_frequencies",
    "rope_inverse_frequencies",
    "rope_switch_length",
    "rope_tables",
]


@dataclass(frozen=True)
class RopeFrequencies:
    """What the rotary tables of a model are made of.

    Args:
        inv_freq: (rotary_dim / 2,) float64 on the CPU, radians per position of each rotated pair.
        long_inv_freq: the same for sequences of more than ``original_length`` tokens, or None: as all others.
        original_length: tokens of a sequence up to which ``inv_freq`` holds; None: always.
        attention_factor: of cosines and sines.
    """

    inv_freq: Tensor
    long_inv_freq: Tensor | None = None
    original_length: int | None = None
    attention_factor: float = 1.0


def rope_frequencies(
    rotary_dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
    max_position_embeddings: int | None = None,
) -> RopeFrequencies:
    """The angles per position of each rotated pair.

    Args:
        rotary_dim: number of rotated dimensions of a head, even.
        theta: base of the geometric series.
        scaling: None, or a mapping as in Hugging Face's ``rope_scaling``; see
            :func:`~lit_llm.ops.rope_scaling.normalised_scaling` for its types and fields.
        max_position_embeddings: the model's context, which some fields default to.

    Raises:
        UserError: unknown ``rope_type``; a field of it that is missing, has a wrong value, or is a list of a wrong
            length.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim
    inv_freq = 1.0 / theta**exponents
    fields = normalised_scaling(scaling, max_position_embeddings)
    kind = fields["rope_type"]
    if kind == "default":
        return RopeFrequencies(inv_freq)
    if kind == "linear":
        return RopeFrequencies(inv_freq / fields["factor"])
    if kind == "llama3":
        return RopeFrequencies(_llama3(inv_freq, fields))
    attention_factor = fields.get("attention_factor") or usual_attention_factor(fields, max_position_embeddings)
    if kind == "yarn":
        return RopeFrequencies(_yarn(inv_freq, theta, fields), attention_factor=attention_factor)
    short, long = (inv_freq / _per_pair(fields, name, len(inv_freq)) for name in ("short_factor", "long_factor"))
    return RopeFrequencies(short, long, fields[ORIGINAL], attention_factor)


def rope_inverse_frequencies(rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> Tensor:
    """The ``inv_freq`` of :func:`rope_frequencies` alone: (rotary_dim / 2,) float64 on the CPU."""
    return rope_frequencies(rotary_dim, theta, scaling).inv_freq


def rope_switch_length(scaling: Mapping[str, Any] | None, max_position_embeddings: int | None = None) -> int | None:
    """``original_length`` of :func:`rope_frequencies`: a longer sequence is rotated otherwise from its start on."""
    fields = normalised_scaling(scaling, max_position_embeddings)
    return fields[ORIGINAL] if fields["rope_type"] == "longrope" else None


def _llama3(inv_freq: Tensor, fields: Mapping[str, Any]) -> Tensor:
    # Turns that a pair makes within the original context: many turns stay as they are, few are slowed down by
    # `factor`, and between the two thresholds the change is blended in linearly.
    turns = fields[ORIGINAL] * inv_freq / (2 * math.pi)
    low, high = fields["low_freq_factor"], fields["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * inv_freq + (1 - keep) * inv_freq / fields["factor"]


def _yarn(inv_freq: Tensor, theta: float, fields: Mapping[str, Any]) -> Tensor:
    """Peng et al. 2023, section 3.2, with the ramp over the number of the pair as in the authors' code."""
    if theta <= 1:
        raise UserError(f"rope_scaling: rope_type 'yarn' needs a rope_theta above 1, got {theta}")
    pairs = len(inv_freq)

    def pair_of(turns: float) -> float:
        """The pair that makes this many turns within the original context."""
        return pairs * math.log(fields[ORIGINAL] / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_of(fields.get("beta_fast", BETA_FAST)), pair_of(fields.get("beta_slow", BETA_SLOW))
    if fields.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001  # a step
    # Pairs before `first` stay as they are, those from `last` on are slowed down by `factor`.
    slowed = ((torch.arange(pairs, dtype=torch.float64, device="cpu") - first) / (last - first)).clamp(0.0, 1.0)
    return (1 - slowed) * inv_freq + slowed * inv_freq / fields["factor"]


def _per_pair(fields: Mapping[str, Any], name: str, pairs: int) -> Tensor:
    if len(fields[name]) != pairs:
        raise UserError(
            f"rope_scaling: {name!r} has {len(fields[name])} numbers and a head has {pairs} rotated pairs; give one a "
            "pair"
        )
    return torch.tensor(fields[name], dtype=torch.float64, device="cpu")


def rope_tables(position_ids: Tensor, inv_freq: Tensor, attention_factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, laid out for :func:`apply_rope`.

    Args:
        position_ids: (batch or 1, seq) integers.
        inv_freq: (rotary_dim / 2,) float32 on the same device, or (batch or 1, seq or 1, rotary_dim / 2): a set for
            each token.
        attention_factor: what both are multiplied by.

    Returns:
        Two float32 tensors (batch or 1, seq, 1, rotary_dim), whatever the default dtype or autocast: the angle of pair
        i stands at i and at i + rotary_dim / 2, and the sine is negative at the first of the two.
    """
    angles = position_ids.to(torch.float32)[..., None, None] * inv_freq[..., None, :]
    cos, sin = angles.cos(), angles.sin()
    if attention_factor != 1:
        cos, sin = cos * attention_factor, sin * attention_factor
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first ``cos.shape[-1]`` dimensions of each head, in pairs (i, i + half) as Hugging Face's Llama.

    (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin): x times the cosines, plus its halves swapped times the signed
    sines, which is three passes over x instead of seven.

    Args:
        x: (batch, seq, heads, head_dim).
        cos, sin: (batch or 1, seq, 1, rotary_dim) float32, from :func:`rope_tables`.

    Returns:
        The shape and dtype of ``x``; computed in float32.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        rotated = apply_rope(x[..., :rotary_dim], cos, sin)
        return torch.cat([rotated, x[..., rotary_dim:]], dim=-1)
    swapped = x.roll(rotary_dim // 2, dims=-1)
    return torch.addcmul(x * cos, swapped.to(cos.dtype), sin).to(x.dtype)
