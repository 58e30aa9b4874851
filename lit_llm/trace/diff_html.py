"""The pictures of the difference of two runs for the page."""

from __future__ import annotations

from typing import Any

from lit_llm.trace import look, units
from lit_llm.trace.diff_terminal import changed, number, verdict_on
from lit_llm.trace.look import Part
from lit_llm.trace.pictures import Row, legend, stacked_bars
from lit_llm.trace.results import Difference, Figure

ROWS = 15
"""Kernels and layers in a table at most."""


def difference_context(found: Difference | None) -> dict[str, Any] | None:
    """What the template ``difference.html.j2`` draws; None: there is no difference."""
    if found is None:
        return None
    kernels = [one for one in found.kernels if one.clear]
    layers = sorted((one for one in found.layers if one.exposed.clear), key=lambda one: -abs(one.exposed.change or 0))
    rows = [("step", "", found.step), *((look.LABELS[key], key, one) for key, one in found.parts.items())]
    if not found.parts:
        rows.append(("communication, exposed", "comm", found.exposed))
    rows.append(("communication, hidden", "hidden", found.hidden))
    return {
        "found": found,
        "bars": _bars(found),
        "parts": [row for row in rows if row[2].before or row[2].after],
        "kernels": kernels[:ROWS],
        "more_kernels": max(len(kernels) - ROWS, 0),
        "largest_kernel": _largest([one.total for one in kernels[:ROWS]]),
        "layers": layers[:ROWS],
        "changed": changed,
        "number": number,
        "verdict_on": verdict_on,
    }


def _largest(figures: list[Figure]) -> float:
    return max((max(one.before or 0, one.after or 0) for one in figures), default=0) or 1.0


def _bars(found: Difference) -> dict[str, Any] | None:
    """The step before and after, one above the other on one scale."""
    used = [key for key, one in found.parts.items() if one.before or one.after]
    if not used:
        return None
    rows = []
    for name, source in (("before", found.before), ("after", found.after)):
        parts = [Part(key, getattr(found.parts[key], name) or 0) for key in used]
        rows.append(Row(name, parts, units.duration(sum(part.value for part in parts)), full_label=f"{name}: {source}"))
    picture = stacked_bars(
        rows,
        units.duration,
        title="A step before and after",
        description="One stacked bar a run, on one scale: the mean over ranks of the medians over steps.",
    )
    return {"picture": picture, "legend": legend(used)}
