"""What changed between two runs, a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from lit_llm.trace import look
from lit_llm.trace.diff_totals import compare_collectives, compare_kernels, compare_layers
from lit_llm.trace.diff_words import summarize
from lit_llm.trace.results import (
    Analysis,
    Difference,
    Figure,
    Rank,
    RankChange,
    Step,
    Verdict,
)

FLOOR = {"gpu": 0.01, "cpu": 0.05}
"""Share of a step that it must change by at least: runs differ by so much for reasons that no trace has."""
PART = {"gpu": 0.0025, "cpu": 0.05}
"""Share of a step that a part must change by at least; more for large parts: 5% of theirs, up to ``FLOOR``."""
SPREADS = 1.5
"""Interquartile ranges of the steps that count as noise."""
SMALL = {"gpu": 0.002, "cpu": 0.01}
"""Share of a step that a kernel or a layer, one among many, must change by."""
LIKE = {"gpu": 0.03, "cpu": 0.15}
"""And of its own time."""
_OWN = ("compute", "memory", "data", "sync", "launch", "other", "loading", "optimizer", "rest")
"""Parts that are a rank's own: not the waits for others."""
_OPTIONAL = {
    "comm_waiting": "waits for late ranks",
    "idle_by_cause": "why a GPU idles",
    "dataloader": "data loading",
    "optimizer": "the optimizer",
}
"""Fields of a split that not every trace has, in words."""

Device = Literal["gpu", "cpu"]
Rows = dict[int, np.ndarray]
"""By rank: a figure of each of its steps, ns."""


@dataclass
class _Run:
    """One of the two runs: what of it is compared."""

    analysis: Analysis
    device: Device
    ranks: list[Rank]
    """With steps, and without those whose files are cut."""
    rank_steps: int
    """Steps of all ranks that the totals are of."""

    @property
    def steps(self) -> int:
        return max((len(rank.steps) for rank in self.ranks), default=0)


def compare(analysis: Analysis, base: Analysis) -> Difference:
    """What is other in ``analysis`` than in ``base``, the run before.

    A part of a step is its median over the steps of a rank, then the mean over ranks: so the parts still add up, a
    stall in one step does not count, and a single slow rank does. A change is noise up to 1.5 times the larger of both
    runs' interquartile ranges over steps (mean over ranks), or a floor: 1% of a step on a GPU, less for small parts; 5%
    on a CPU. For kernels, collectives and layers, totals of the trace over ranks and steps.

    Args:
        analysis: the run after.
        base: the run before.
    """
    after, before = _run(analysis), _run(base)
    device = after.device if after.device == before.device else None
    notes = _notes(before, after)
    figure = _Noise(before, after)
    step = figure(lambda one: one.duration)
    parts = _parts(before, after, figure, notes) if device else {}
    found = Difference(base.source, analysis.source, device, "", step, parts, *_communication(figure), notes=notes)
    found.method = _method(step, device)
    found.new, found.gone = _verdicts(analysis, base), _verdicts(base, analysis)
    if before.rank_steps and after.rank_steps:
        least = max(LIKE[figure.kind], (step.noise or 0) / max(figure.length, 1)), SMALL[figure.kind] * figure.length

        def noise(one: float | None, other: float | None) -> float | None:
            """Of a total, whose spread over steps is not known."""
            return None if step.noise is None else max(least[0] * max(one or 0, other or 0), least[1])

        sides = (base, before.rank_steps), (analysis, after.rank_steps)
        found.ranks = _rank_changes(figure, parts)
        found.kernels = compare_kernels(*sides, noise) if device else []
        found.collectives = compare_collectives(*sides, noise, found.exposed.noise)
        found.layers = compare_layers(*sides, noise)
    found.summary = summarize(found)
    return found


def _communication(figure: _Noise) -> tuple[Figure, Figure]:
    return figure(lambda one: one.split.comm_exposed), figure(lambda one: one.split.comm_hidden)


def _run(analysis: Analysis) -> _Run:
    device: Device = "gpu" if any(rank.device == "gpu" for rank in analysis.ranks) else "cpu"
    ranks = [rank for rank in analysis.ranks if rank.device == device and rank.steps]
    fit = [rank for rank in ranks if not (rank.truncated and device == "gpu")]
    return _Run(analysis, device, fit, sum(len(rank.steps) for rank in ranks))


class _Noise:
    """Figures of steps with their noise."""

    def __init__(self, before: _Run, after: _Run) -> None:
        self.before, self.after = before, after
        self.several = min(before.steps, after.steps) > 1
        lengths = [_middle(_rows(run, lambda one: one.duration)) for run in (before, after)]
        self.kind: Device = "gpu" if before.device == after.device == "gpu" else "cpu"
        self.length = min((one for one in lengths if one), default=0.0)
        self.rows: dict[str, tuple[Rows, Rows]] = {}

    def __call__(self, take: Callable[[Step], float | None]) -> Figure:
        """A figure of each step."""
        return self.of(_rows(self.before, take), _rows(self.after, take))

    def of(self, before: Rows, after: Rows, name: str = "") -> Figure:
        """Its rows before and after; kept under ``name``."""
        self.rows[name] = before, after
        figure = Figure(_middle(before), _middle(after))
        if self.several:
            small = self.length * PART[self.kind]
            floor = max(small, min(0.05 * max(figure.before or 0, figure.after or 0), self.length * FLOOR[self.kind]))
            figure.noise = max(floor, SPREADS * max(_spread(before), _spread(after)))
        return figure


def _rows(run: _Run, take: Callable[[Step], float | None]) -> Rows:
    """Empty where a step of any rank does not tell."""
    found = {rank.rank: [take(step) for step in rank.steps] for rank in run.ranks}
    if any(value is None for values in found.values() for value in values):
        return {}
    return {number: np.array(values, dtype=np.float64) for number, values in found.items()}


def _middle(rows: Rows) -> float | None:
    return float(np.mean([np.median(one) for one in rows.values()])) if rows else None


def _spread(rows: Rows) -> float:
    """Between steps: constant differences between ranks are no noise."""
    ranges = [float(np.percentile(one, 75) - np.percentile(one, 25)) for one in rows.values() if len(one) > 1]
    return float(np.mean(ranges)) if ranges else 0.0


def _parts(before: _Run, after: _Run, figure: _Noise, notes: list[str]) -> dict[str, Figure]:
    """The parts that both runs tell; what one of them can't tell stays in the rest."""

    def tells(run: _Run, name: str) -> bool:
        return all(getattr(step.split, name) is not None for rank in run.ranks for step in rank.steps)

    unknown: dict[str, Any] = {}
    for name, word in _OPTIONAL.items():
        told = tells(before, name), tells(after, name)
        if not all(told):
            unknown[name] = None
        if any(told) and not all(told) and (before.device == "cpu" or name not in ("dataloader", "optimizer")):
            notes.append(f"the run {'after' if told[0] else 'before'} does not tell {word}: not compared")
    if "comm_waiting" in unknown:
        unknown["comm_transfer"] = None
    old, new = ({rank.rank: _pieces(rank, unknown) for rank in run.ranks} for run in (before, after))
    keys = {key for rows in (*old.values(), *new.values()) for row in rows for key in row}
    if before.device == "cpu":
        keys -= {"loading"} if "dataloader" in unknown else set()
        keys -= {"optimizer"} if "optimizer" in unknown else set()

    def column(rows: dict[int, list[dict[str, float]]], key: str) -> Rows:
        return {rank: np.array([row.get(key, 0.0) for row in steps]) for rank, steps in rows.items()}

    return {key: figure.of(column(old, key), column(new, key), key) for key in look.LABELS if key in keys}


def _pieces(rank: Rank, unknown: dict[str, Any]) -> list[dict[str, float]]:
    """The parts of each step, without the fields that are ``unknown``."""
    found = []
    for step in rank.steps:
        split = replace(step.split, **unknown)
        bars = look.parts(replace(rank, split=split, steps=[replace(step, split=split)]))
        found.append({part.key: float(part.value) for part in bars})
    return found


def _rank_changes(figure: _Noise, parts: dict[str, Figure]) -> list[RankChange]:
    """Where one rank, or a few, changed by itself; only for runs of the same ranks."""
    found = []
    for part, whole in parts.items():
        before, after = figure.rows[part]
        if part not in _OWN or set(before) != set(after) or len(before) < 2 or whole.noise is None:
            continue
        one = {rank: (float(np.median(before[rank])), float(np.median(after[rank]))) for rank in before}
        moved = {rank: late - early for rank, (early, late) in one.items()}
        rows = []
        for rank, value in moved.items():
            others = float(np.median([other for number, other in moved.items() if number != rank]))
            own = SPREADS * max(_spread({rank: rows_of[rank]}) for rows_of in (before, after))
            least = max(2 * whole.noise, own)
            if abs(value) > least and abs(value - others) > max(least, abs(value) / 2):
                rows.append(RankChange(rank, part, Figure(*one[rank], least)))
        if len(rows) <= max(1, len(moved) // 3):
            found += rows
    return sorted(found, key=lambda row: -abs(row.time.change or 0))


def _verdicts(of: Analysis, without: Analysis) -> list[Verdict]:
    """Above info in the one and not in the other; a slow rank is another where it is another rank."""

    def key(verdict: Verdict) -> tuple[Any, ...]:
        return verdict.code, tuple(sorted(verdict.ranks)) if verdict.code == "straggler" else ()

    others = {key(verdict) for verdict in without.verdicts if verdict.severity != "info"}
    return [one for one in look.by_severity(of) if one.severity != "info" and key(one) not in others]


def _notes(before: _Run, after: _Run) -> list[str]:
    """What is not alike, before and after."""
    old, new = before.analysis, after.analysis
    found = []
    files = [sorted(rank.file for rank in one.ranks) for one in (old, new)]
    if files[0] == files[1] and old.source == new.source:
        found.append("both are the same traces")
    if before.device != after.device:
        text = f"{before.device.upper()} before, {after.device.upper()} after"
        found.append(f"{text}: only the step and the communication are compared")
    sizes = [len(one.ranks) for one in (old, new)]
    if sizes[0] != sizes[1]:
        found.append(f"{_many(sizes[0], 'rank')} before, {sizes[1]} after: figures are a rank's, on average")
    elif {rank.rank for rank in old.ranks} != {rank.rank for rank in new.ranks}:
        found.append("other ranks were read before than after: no rank is compared with itself")
    worlds = old.world_size, new.world_size
    if None not in worlds and worlds[0] != worlds[1] and sizes[0] == sizes[1]:
        found.append(f"a run of {_many(worlds[0] or 0, 'rank')} before, of {worlds[1]} after")
    hosts = [{rank.host for rank in one.ranks if rank.host} for one in (old, new)]
    if all(hosts) and len(hosts[0]) != len(hosts[1]):
        found.append(f"{_many(len(hosts[0]), 'host')} before, {len(hosts[1])} after")
    steps = before.steps, after.steps
    if steps[0] != steps[1]:
        found.append(f"{_many(steps[0], 'step')} a rank before, {steps[1]} after")
    for run, when in ((before, "before"), (after, "after")):
        if not run.rank_steps:
            found.append(f"the run {when} has no step marks (ProfilerStep#): nothing can be compared by step")
        cut = len([rank for rank in run.analysis.ranks if rank.truncated and rank.device == "gpu"])
        if cut:
            found.append(f"{_many(cut, 'file')} of the run {when} cut off: left out of steps, not out of kernels")
        if run.analysis.missing_ranks:
            found.append(f"{_many(len(run.analysis.missing_ranks), 'rank')} of the run {when} missing")
    return found


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _method(step: Figure, device: Device | None) -> str:
    text = "Medians over the steps of a rank, then the mean over ranks. "
    if step.noise is None:
        return text + "With one step a rank in either run, changes can't be told from noise."
    share = FLOOR[device or "cpu"]
    return text + (
        f"A change counts as noise up to {SPREADS:g} times the larger of both runs' interquartile ranges over steps, "
        f"and up to {share:.0%} of a step ({'less for its small parts' if share < 0.05 else 'each part'})."
    )
