"""The all-gathers of each FSDP unit: which unit, in which phase, begun early, and hidden or not.

FSDP2 names the unit in its annotations (``FSDP::all_gather (layers.3)``), on CPUs and GPUs alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lit_llm.trace import kinds
from lit_llm.trace.collectives import Collectives
from lit_llm.trace.columns import Category, Ints, RankTrace
from lit_llm.trace.intervals import covered

ROOT = "(root)"


@dataclass
class Gathers:
    """Columns of equal length (n,), in order of their calls."""

    units: list[str]
    """Names, which ``unit`` points to."""
    unit: Ints
    backward: np.ndarray
    """Whether it serves the backward, (n,) bool."""
    early: np.ndarray
    """Whether it was called for before the unit's own turn, (n,) bool."""
    first: np.ndarray
    """Whether nothing comes before it in its forward or backward to hide behind, (n,) bool.

    So it is with the first gather, and in the forward with the first block's after the root's.
    """
    step: Ints
    begin: Ints
    end: Ints
    exposed: Ints

    def __len__(self) -> int:
        return len(self.unit)


def gathers_of(trace: RankTrace, collectives: Collectives, exposed: Ints) -> Gathers:
    """Joins the annotations with the collectives that were called for inside them.

    Args:
        trace: of the rank.
        collectives: of the rank.
        exposed: (n, 2) when communication ran that no compute hid.
    """
    events = trace.events
    units: dict[int, tuple[str, str]] = {}
    for place, name in enumerate(trace.names):
        if (found := kinds.UNIT.match(name)) is not None:
            units[place] = found.group(1), found.group(2) or found.group(3) or ROOT
    noted = np.isin(events.name, list(units))
    called = collectives.launched
    category = Category.ANNOTATION
    if not (
        noted & (events.category == category)
    ).any():  # the host's rows may be missing, and the GPU's copies be there
        category, called = Category.GPU_ANNOTATION, collectives.begin
    gathers: list[tuple[int, int, str]] = []
    turns: list[tuple[int, int, str, bool, bool]] = []  # begin, end, unit, backward, whether it is the unit's own turn
    for place in np.flatnonzero(noted & (events.category == category)).tolist():
        what, unit = units[int(events.name[place])]
        begin, end = int(events.start[place]), int(events.end[place])
        if what == "all_gather":
            gathers.append((begin, end, unit))
        elif what in ("pre_forward", "pre_backward", "forward_prefetch", "backward_prefetch"):
            turns.append((begin, end, unit, "backward" in what, what.startswith("pre_")))
    kind_of = [kind for kind, _ in collectives.keys]
    wanted = np.array([kind == "all_gather" for kind in kind_of], dtype=bool)
    is_gather = wanted[collectives.key] if len(collectives) else np.zeros(0, dtype=bool)
    rows: list[tuple[int, ...]] = []
    names: dict[str, int] = {}
    seen: dict[tuple[int, bool], list[str]] = {}
    bare = covered(exposed, collectives.begin, collectives.end)
    starts = np.array([span[0] for span in gathers], dtype=np.int64)
    turn_starts = np.array([turn[0] for turn in turns], dtype=np.int64)
    for place in np.flatnonzero(is_gather & (called >= 0)).tolist():
        when = int(called[place])
        at = int(np.searchsorted(starts, when, side="right")) - 1
        if at < 0 or when >= gathers[at][1]:
            continue
        unit = gathers[at][2]
        turn = int(np.searchsorted(turn_starts, when, side="right")) - 1
        inside = turn >= 0 and when < turns[turn][1]
        backward = inside and turns[turn][3]
        own = inside and turns[turn][4] and turns[turn][2] == unit
        step = int(collectives.step[place])
        before = seen.setdefault((step, backward), [])
        first = not before or before == [ROOT]
        before.append(unit)
        flags = (names.setdefault(unit, len(names)), backward, not own, first, step)
        rows.append((*flags, *(int(column[place]) for column in (collectives.begin, collectives.end, bare))))
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 8).T
    unit_column, in_backward, early, is_first, steps, begins, ends, open_ns = table
    truth = (in_backward.astype(bool), early.astype(bool), is_first.astype(bool))
    return Gathers(list(names), unit_column, truth[0], truth[1], truth[2], steps, begins, ends, open_ns)
