"""Rotary position embedding (Su et al. 2021, RoFormer, section 3.2) with float32 tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_llm.errors import UserError

ROPE_TYPES = ("default", "linear", "llama3")


def rope_inverse_frequencies(rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> Tensor:
    """The angle per position of each rotated pair.

    Args:
        rotary_dim: number of rotated dimensions of a head, even.
        theta: base of the geometric series.
        scaling: None, or a mapping as in Hugging Face's ``rope_scaling``: ``rope_type`` is ``default``, ``linear``
            (``factor``; Chen et al. 2023) or ``llama3`` (``factor``, ``low_freq_factor``, ``high_freq_factor``,
            ``original_max_position_embeddings``; the Llama 3.1 release).

    Returns:
        (rotary_dim / 2,) float64 on the CPU, radians per position.

    Raises:
        UserError: unknown ``rope_type``, or a missing field of it.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim
    inv_freq = 1.0 / theta**exponents
    if not scaling:
        return inv_freq
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inv_freq
    if kind == "linear":
        return inv_freq / _field(scaling, "factor", kind)
    if kind == "llama3":
        factor = _field(scaling, "factor", kind)
        low = _field(scaling, "low_freq_factor", kind)
        high = _field(scaling, "high_freq_factor", kind)
        original = _field(scaling, "original_max_position_embeddings", kind)
        # Turns that a pair makes within the original context: many turns stay as they are, few are slowed down by
        # `factor`, and between the two thresholds the change is blended in linearly.
        turns = original * inv_freq / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return keep * inv_freq + (1 - keep) * inv_freq / factor
    raise UserError(f"rope_scaling: unknown rope_type {kind!r}; known are {', '.join(ROPE_TYPES)}")


def _field(scaling: Mapping[str, Any], name: str, kind: str) -> float:
    value = scaling.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise UserError(f"rope_scaling: rope_type {kind!r} needs a positive number for {name!r}, got {value!r}")
    return float(value)


def rope_tables(position_ids: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, laid out for :func:`apply_rope`.

    Args:
        position_ids: (batch or 1, seq) integers.
        inv_freq: (rotary_dim / 2,) float32 on the same device.

    Returns:
        Two float32 tensors (batch or 1, seq, 1, rotary_dim), whatever the default dtype or autocast: the angle of pair
        i stands at i and at i + rotary_dim / 2, and the sine is negative at the first of the two.
    """
    angles = position_ids.to(torch.float32)[..., None, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()
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
