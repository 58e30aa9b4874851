"""Numbers out of configuration files."""

from __future__ import annotations

import math
from typing import Any

from lit_llm.errors import UserError


def as_float(name: str, value: Any, *, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite number in [low, high], also out of text: YAML reads 1e-5 as a string.

    Raises:
        UserError: anything else, with the option's name.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{name} must be a number, got {value!r}")
    if not low <= number <= high:
        bounds = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise UserError(f"{name} must be {bounds}, got {value!r}")
    return number


def as_steps(name: str, value: Any, *, low: int = 0) -> int | None:
    """A whole number of steps, or None."""
    if value is None:
        return None
    number = as_float(name, value, low=low)
    if number != int(number):
        raise UserError(f"{name} must be a whole number of steps, got {value!r}")
    return int(number)
