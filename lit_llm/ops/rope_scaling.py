"""The mapping ``rope_scaling``: its types, their fields and defaults, in one form for all that compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from lit_llm.errors import UserError

ORIGINAL = "original_max_position_embeddings"
BETA_FAST, BETA_SLOW = 32.0, 1.0  # YaRN (Peng et al. 2023), section 3.2


def normalised_scaling(scaling: Mapping[str, Any] | None, max_position_embeddings: int | None = None) -> dict[str, Any]:
    """``rope_scaling`` with what its type needs and no more, defaults left out; equal for all that compute the same.

    The types and their fields, with the meaning that transformers 5 gives them:

    * ``default``: none.
    * ``linear`` (Chen et al. 2023): ``factor``.
    * ``llama3`` (the Llama 3.1 release): ``factor``, ``low_freq_factor``, ``high_freq_factor``,
      ``original_max_position_embeddings``.
    * ``yarn`` (Peng et al. 2023): ``factor`` (None: context / original context), ``original_max_position_embeddings``,
      ``attention_factor`` or both of ``mscale`` and ``mscale_all_dim``, ``beta_fast``, ``beta_slow``, ``truncate``.
    * ``longrope`` (Ding et al. 2024): ``short_factor`` and ``long_factor`` (lists, a number for each rotated pair),
      ``original_max_position_embeddings``, ``attention_factor`` or ``factor`` (None: context / original context).

    Args:
        scaling: the mapping, or None. Fields that mean nothing to its type are ignored.
        max_position_embeddings: the model's context; ``original_max_position_embeddings`` defaults to it.

    Returns:
        A new dict with ``rope_type``; lengths are ints, all other numbers floats. Yarn's ``mscale`` and longrope's
        ``factor`` become ``attention_factor``, which is left out where it is what the type makes of the lengths.

    Raises:
        UserError: unknown ``rope_type``; a field of it that is missing or has a wrong value.
    """
    given = scaling or {}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _NORMALISED:
        raise UserError(f"rope_scaling: unknown rope_type {kind!r}; known are {', '.join(ROPE_TYPES)}")
    fields = _NORMALISED[kind](_Fields(kind, given, max_position_embeddings))
    return {"rope_type": kind, **fields}


def usual_attention_factor(fields: Mapping[str, Any], max_position_embeddings: int | None) -> float:
    """What a normalised yarn or longrope without ``attention_factor`` multiplies cosines and sines by.

    YaRN, equation 22, and LongRoPE, section 3.3.
    """
    if fields["rope_type"] == "yarn":
        return _yarn_scale(fields["factor"])
    assert max_position_embeddings is not None
    return _longrope_scale(max_position_embeddings / fields[ORIGINAL], fields[ORIGINAL])


class _Fields:
    """The fields of one mapping, read with checks."""

    def __init__(self, kind: str, given: Mapping[str, Any], context: int | None) -> None:
        self.kind, self.given, self.context = kind, given, context

    def number(self, name: str) -> float:
        value = self.given.get(name)
        if not _is_positive(value):
            raise self._wrong(name, "a positive number", value)
        return float(value)

    def numbers(self, name: str) -> list[float]:
        values = self.given.get(name)
        if not isinstance(values, list | tuple) or not all(map(_is_positive, values)):
            raise self._wrong(name, "a list of positive numbers", values)
        return [float(value) for value in values]

    def original(self) -> int:
        """Tokens of the context that the model was trained with first."""
        value = self.given.get(ORIGINAL)
        value = self.context if value is None else value
        if not _is_positive(value) or value != int(value):
            raise self._wrong(ORIGINAL, "a positive number, without a fraction,", value)
        return int(value)

    def stretch(self) -> float:
        """``factor``, or how many times the original context the present one is."""
        if self.given.get("factor") is None and self.context is not None:
            return self.context / self.original()
        return self.number("factor")

    def _wrong(self, name: str, needed: str, value: Any) -> UserError:
        shown = repr(value)
        shown = shown if len(shown) < 60 else shown[:60] + "..."
        return UserError(f"rope_scaling: rope_type {self.kind!r} needs {needed} for {name!r}, got {shown}")


def _is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _default(fields: _Fields) -> dict[str, Any]:
    return {}


def _linear(fields: _Fields) -> dict[str, Any]:
    return {"factor": fields.number("factor")}


def _llama3(fields: _Fields) -> dict[str, Any]:
    numbers = {name: fields.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return {**numbers, ORIGINAL: fields.original()}


def _yarn(fields: _Fields) -> dict[str, Any]:
    factor = fields.stretch()
    done: dict[str, Any] = {"factor": factor, ORIGINAL: fields.original()}
    attention = usual = _yarn_scale(factor)
    if fields.given.get("attention_factor") is not None:
        attention = fields.number("attention_factor")
    elif fields.given.get("mscale") and fields.given.get("mscale_all_dim"):  # 0 is as good as none
        scale, all_dim = fields.number("mscale"), fields.number("mscale_all_dim")
        attention = _yarn_scale(factor, scale) / _yarn_scale(factor, all_dim)
    if attention != usual:
        done["attention_factor"] = attention
    for name, default in (("beta_fast", BETA_FAST), ("beta_slow", BETA_SLOW)):
        if fields.given.get(name) and fields.number(name) != default:
            done[name] = fields.number(name)
    if not fields.given.get("truncate", True):
        done["truncate"] = False
    return done


def _longrope(fields: _Fields) -> dict[str, Any]:
    original, context = fields.original(), fields.context
    done = {name: fields.numbers(name) for name in ("short_factor", "long_factor")}
    if fields.given.get("attention_factor") is not None:
        attention = fields.number("attention_factor")
    else:
        attention = _longrope_scale(fields.stretch(), original)
    if context is None or attention != _longrope_scale(context / original, original):
        return {**done, ORIGINAL: original, "attention_factor": attention}
    return {**done, ORIGINAL: original}


def _yarn_scale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope_scale(factor: float, original: int) -> float:
    if factor <= 1:
        return 1.0
    if original == 1:
        raise UserError(f"rope_scaling: rope_type 'longrope' needs {ORIGINAL!r} above 1, got 1")
    return math.sqrt(1 + math.log(factor) / math.log(original))


_NORMALISED: dict[str, Callable[[_Fields], dict[str, Any]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
ROPE_TYPES = tuple(_NORMALISED)
