"""Conditions on an analysis, for a check that may fail: ``comm_exposed_pct>15``."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable

import numpy as np

from lit_llm.errors import UserError
from lit_llm.trace.results import Analysis, Rank

_COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_TERM = re.compile(r"\s*(\w+)\s*(>=|<=|==|!=|>|<)\s*([-+]?\d*\.?\d+(?:[eE][-+]?\d+)?)\s*(%?)\s*")


def _share(rank: Rank, part: str, cause: str | None) -> float | None:
    """Percent of the window; on a CPU-only trace, which has none, of the steps."""
    splits = [rank.split] if rank.split.window is not None else [step.split for step in rank.steps]
    whole = rank.split.window or sum(step.duration for step in rank.steps)
    parts = [getattr(one, part) if cause is None else (one.idle_by_cause or {}).get(cause) for one in splits]
    if not whole or any(one is None for one in parts):
        return None
    return 100 * sum(one for one in parts if one is not None) / whole


def _percent(part: str, cause: str | None = None) -> Callable[[Analysis], float | None]:
    def value(analysis: Analysis) -> float | None:
        found = [_share(rank, part, cause) for rank in analysis.ranks]
        shares = [one for one in found if one is not None]
        return float(np.median(shares)) if shares else None

    return value


def _step(analysis: Analysis) -> float | None:
    times = [step.duration / 1e3 for rank in analysis.ranks for step in rank.steps]
    return float(np.median(times)) if times else None


def _lag(analysis: Analysis) -> float | None:
    """None where nobody can tell: one rank of several, or one step."""
    if analysis.straggler is not None:
        return analysis.straggler.median_lag / 1e3
    told = any(one.code == "no_straggler" for one in analysis.verdicts)
    return 0.0 if told or (len(analysis.ranks) == 1 and (analysis.world_size or 1) == 1) else None


def _count(*severities: str) -> Callable[[Analysis], float | None]:
    return lambda analysis: sum(one.severity in severities for one in analysis.verdicts)


FIGURES: dict[str, Callable[[Analysis], float | None]] = {
    "comm_exposed_pct": _percent("comm_exposed"),
    "comm_hidden_pct": _percent("comm_hidden"),
    "comm_waiting_pct": _percent("comm_waiting"),
    "comm_transfer_pct": _percent("comm_transfer"),
    "compute_pct": _percent("compute"),
    "mem_exposed_pct": _percent("mem_exposed"),
    "idle_pct": _percent("idle"),
    "idle_data_loading_pct": _percent("idle", "data_loading"),
    "idle_host_sync_pct": _percent("idle", "host_sync"),
    "idle_launch_pct": _percent("idle", "launch"),
    "dataloader_pct": _percent("dataloader"),
    "optimizer_pct": _percent("optimizer"),
    "step_us": _step,
    "straggler_lag_us": _lag,
    "warnings": _count("warning", "critical"),
    "criticals": _count("critical"),
    "missing_ranks": lambda analysis: len(analysis.missing_ranks),
}
"""What a condition may name: medians over ranks, in percent of the window (on a CPU: of the steps), or microseconds."""


def shown(value: float | None) -> str:
    """A figure; counts without a point."""
    if value is None:
        return "not told"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


class Condition:
    """Comparisons joined by ``or`` and ``and``, which binds closer.

    Raises:
        UserError: it is none.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._any = [
            [self._term(one) for one in re.split(r"\s+and\s+|&&", part)] for part in re.split(r"\s+or\s+|\|\||,", text)
        ]

    def _term(self, text: str) -> tuple[str, str, float]:
        found = _TERM.fullmatch(text)
        if found is None:
            raise UserError(f"--fail_on {self.text!r}: {text.strip()!r} compares nothing, as comm_exposed_pct>15 does")
        name = found.group(1)
        if name not in FIGURES:
            near = difflib.get_close_matches(name, FIGURES, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FIGURES)}"
            raise UserError(f"--fail_on {self.text!r}: there is no figure {name!r}; {hint}")
        bound = float(found.group(3))
        if not math.isfinite(bound):
            raise UserError(f"--fail_on {self.text!r}: {found.group(3)} is beyond all figures")
        return name, found.group(2), bound

    @property
    def names(self) -> list[str]:
        """The figures that it asks for."""
        return list(dict.fromkeys(name for terms in self._any for name, _, _ in terms))

    def holds(self, analysis: Analysis) -> str | None:
        """What holds, with the figures; None if it does not.

        Raises:
            UserError: these traces can't tell a figure that decides.
        """
        for terms in self._any:
            told = []
            for name, sign, bound in terms:
                value = FIGURES[name](analysis)
                if value is None:
                    raise UserError(f"--fail_on {self.text!r}: these traces do not tell {name}; name another figure")
                if not _COMPARISONS[sign](value, bound):
                    break
                told.append(f"{name} is {shown(value)} ({sign}{bound:g})")
            else:
                return " and ".join(told)
        return None
