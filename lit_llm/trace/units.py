"""Figures as text, for people: the fewest digits that still tell."""

from __future__ import annotations

import math
import unicodedata

NONE = "–"
"""For a figure that the trace can't give."""


def duration(ns: float | None, *, micro: str = "µs") -> str:
    """``ns`` with three digits and the unit that suits it: ``812 ns``, ``4.12 ms``, ``1.23 s``."""
    if ns is None or not math.isfinite(ns):
        return NONE
    if ns == 0:
        return "0"
    if abs(ns) < 999.5:
        return f"{ns:.0f} ns"
    units = (micro, 1e3), ("ms", 1e6), ("s", 1e9)
    # What would be written as 1,000 us is 1.00 ms.
    unit, scale = next((unit for unit in units[:-1] if abs(ns) < 999.5 * unit[1]), units[-1])
    return f"{_three(ns / scale)} {unit}"


def share(part: float | None, whole: float | None) -> str:
    """``part`` of ``whole`` in percent."""
    if part is None or not whole:
        return NONE
    return percent(part / whole)


def percent(value: float | None) -> str:
    """A share (0 to 1) in percent: a digit after the point below ten."""
    if value is None or not math.isfinite(value):
        return NONE
    value *= 100
    if value == 0:
        return "0%"
    if 0 < value < 0.1:
        return "<0.1%"
    # No rounding up to the whole: 99.97% hidden is not everything hidden.
    if 99.5 <= value < 100:
        return f"{min(value, 99.9):.1f}%"
    return f"{value:.0f}%" if abs(value) >= 9.95 else f"{value:.1f}%"


def signed(ns: float | None) -> str:
    """A change of a time: ``+4.12 ms``."""
    return f"+{duration(ns)}" if ns is not None and ns > 0 else duration(ns)


def signed_percent(value: float | None) -> str:
    """A change in percent: ``+3.2%``."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{100 * value:+.0f}%" if abs(value) >= 0.0995 else f"{100 * value:+.1f}%"


def size(count: float | None) -> str:
    """Bytes in decimal units: ``1.2 GB``."""
    return _scaled(count, (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12), ("PB", 1e15)))


def rate(per_second: float | None) -> str:
    """Bytes per second."""
    text = size(per_second)
    return text if text == NONE else f"{text}/s"


def ratio(value: float | None) -> str:
    """``1.32`` as ``1.32x``."""
    return NONE if value is None or not math.isfinite(value) else f"{_three(value)}x"


def count(number: int | None) -> str:
    """With thin groups of three digits."""
    return NONE if number is None else f"{number:,}"


def shorten(text: str, length: int) -> str:
    """At most ``length`` characters of ``text`` on one line, the middle left out: names often differ at their ends."""
    text = clean(text)
    if len(text) <= length:
        return text
    tail = (length - 1) // 3
    return f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


def clean(text: str) -> str:
    """``text`` on one line without control characters, so that a name can't move a terminal's cursor."""
    return "".join(" " if c in "\n\r\t" else "?" if unicodedata.category(c) in ("Cc", "Cs", "Cf") else c for c in text)


def numbers(values: list[int], limit: int = 8) -> str:
    """Ranks or steps as text, runs drawn together: ``0-3, 7``; after ``limit`` runs the rest is counted."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs[:limit]]
    rest = sum(b - a + 1 for a, b in runs[limit:])
    return ", ".join(parts) + (f" and {rest} more" if rest else "")


def named(word: str, values: list[int]) -> str:
    """``rank 3`` or ``ranks 0-3, 7``."""
    return f"{word}{'s' if len(set(values)) > 1 else ''} {numbers(values)}"


def _three(value: float) -> str:
    """Three digits that count, at least."""
    magnitude = abs(value)
    if magnitude >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"


def _scaled(value: float | None, units: tuple[tuple[str, float], ...]) -> str:
    if value is None or not math.isfinite(value):
        return NONE
    unit, scale = next((unit for unit in units[:-1] if abs(value) < 999.5 * unit[1]), units[-1])
    return f"{value:.0f} {unit}" if scale == 1 else f"{_three(value / scale)} {unit}"
