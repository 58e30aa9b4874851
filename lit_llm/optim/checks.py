"""Numbers as people write them in configurations, checked."""

from __future__ import annotations

import math
from typing import Any

from lit_llm.errors import UserError


def as_float(name: str, value: Any, low: float, high: float = math.inf, *, below: bool = False) -> float:
    """``value`` as a finite float in [low, high], or in [low, high) with ``below``.

    Text such as "3e-4" counts as a number: YAML 1.1 reads 1e-5, without a point, as text.

    Raises:
        UserError: it is no such number; the message starts with ``name``.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number) and low <= number <= high and not (below and number == high):
        return number
    limits = [] if low == -math.inf else [f"at least {low:g}"]
    limits += [] if high == math.inf else [f"{'below' if below else 'at most'} {high:g}"]
    kind = ", ".join(["a number", *([" and ".join(limits)] if limits else [])])
    raise UserError(f"{name} must be {kind}, not {value!r}")


def as_int(name: str, value: Any, low: int) -> int:
    """``value`` as an integer of at least ``low``; text and floats count where they are whole, as "1e3" is.

    Raises:
        UserError: it is no such integer; the message starts with ``name``.
    """
    try:
        number = as_float(name, value, low)
    except UserError:
        number = math.nan
    if number.is_integer():
        return int(number)
    raise UserError(f"{name} must be a whole number, at least {low}, not {value!r}")


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a ``value`` that is none of ``choices``.

    Raises:
        UserError: the message starts with ``name`` and lists the choices.
    """
    if value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
