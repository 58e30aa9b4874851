"""Times and names as sentences have them: fewer digits than the tables of :mod:`lit_llm.trace.units`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_llm.trace.file_set import ranges


def ms(ns: float) -> str:
    """A time with a unit and two to three digits: ``61 ms``, ``1.2 s``, ``350 us``."""
    size = abs(ns)
    if size >= 1e9:
        return f"{ns / 1e9:,.1f} s" if size < 1e11 else f"{ns / 1e9:,.0f} s"
    if size >= 1e6:
        return f"{ns / 1e6:.1f} ms" if size < 1e7 else f"{ns / 1e6:.0f} ms"
    return f"{ns / 1e3:.0f} us"


def ranks_text(numbers: Sequence[int]) -> str:
    """``Rank 3``, ``Ranks 3, 5-9``."""
    return f"Rank{'' if len(set(numbers)) == 1 else 's'} {ranges(numbers)}"


def hosts_of(ranks: Sequence[Any]) -> str:
    """`` (host-1)`` where all are on one host whose name is known, else nothing."""
    hosts = {one.host for one in ranks}
    host = next(iter(hosts)) if len(hosts) == 1 else None
    return f" ({host})" if host else ""
