"""The analysis as one page that needs no network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lit_llm.trace import look, units
from lit_llm.trace.diff_html import difference_context
from lit_llm.trace.look import Part
from lit_llm.trace.pictures import HeatRow, Row, heat_map, legend, scale, stacked_bars
from lit_llm.trace.results import Analysis, Difference, Rank
from lit_llm.trace.timeline_picture import draw
from lit_llm.trace.writing import write_text


def page(analysis: Analysis, difference: Difference | None = None) -> str:
    """The report as a self-contained HTML page: pictures are inline SVG, the script is only for comfort.

    With a ``difference`` it begins with what changed.
    """
    environment = Environment(
        loader=PackageLoader("lit_llm.trace", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(units=units, look=look)
    return environment.get_template("page.html.j2").render(
        _context(analysis, environment), difference=difference_context(difference)
    )


def write_html(analysis: Analysis, path: str | Path, difference: Difference | None = None) -> Path:
    """Writes :func:`page` to ``path``, whole or not at all.

    Raises:
        UserError: where nothing can be written there.
    """
    return write_text(path, page(analysis, difference))


def _context(analysis: Analysis, environment: Environment) -> dict[str, Any]:
    def file(name: str) -> Markup:
        """A file of ours, as it is."""
        assert environment.loader is not None
        return Markup(environment.loader.get_source(environment, name)[0])

    ranks = sorted(analysis.ranks, key=lambda rank: rank.rank)
    gpu = any(rank.device == "gpu" for rank in ranks)
    flagged = set(look.flagged_ranks(analysis))
    return {
        "analysis": analysis,
        "gpu": gpu,
        "ranks": ranks,
        "css": file("page.css"),
        "js": file("page.js"),
        "summary": look.summary(analysis),
        "tiles": _tiles(analysis, ranks, gpu),
        "verdicts": look.by_severity(analysis),
        "rank_bars": _rank_bars(ranks, flagged),
        "lags": _lags(ranks, flagged),
        "timeline": draw(analysis.timeline) if analysis.timeline and analysis.timeline.ranks else None,
        "layers": _layers(analysis),
        "idle": _idle(ranks),
    }


def _tiles(analysis: Analysis, ranks: Sequence[Rank], gpu: bool) -> list[tuple[str, str, str]]:
    """The figures on top: (what, figure, small print)."""
    tiles = []
    times = [time for rank in ranks if (time := look.step_time(rank)) is not None]
    if times:
        low, high = units.duration(min(times)), units.duration(max(times))
        spread = "median" if len(times) == 1 else "on every rank" if low == high else f"{low} to {high} over ranks"
        tiles.append(("Step", units.duration(look.median(times)), spread))
    totals: dict[str, float] = {}
    for rank in ranks:
        if (rank.device == "gpu") == gpu:
            for part in look.parts(rank):
                totals[part.key] = totals.get(part.key, 0) + part.value
    whole = sum(totals.values())
    exposed = sum(totals.get(key, 0) for key in ("comm", "transfer", "waiting"))
    hidden = sum(rank.split.comm_hidden for rank in ranks)
    if whole:
        if gpu:
            tiles.append(("Compute", units.share(totals.get("compute", 0), whole), "of the GPUs' time"))
        else:
            tiles.append(("Data loading", units.share(totals.get("loading", 0), whole), "of the steps"))
        small = (
            f"{units.share(hidden, hidden + exposed)} of communication is hidden" if hidden + exposed else "none at all"
        )
        tiles.append(("Exposed communication", units.share(exposed, whole), small))
        if gpu:
            idle = sum(totals.get(key, 0) for key in ("idle", *look.CAUSE_KEYS.values()))
            data = totals.get("data", 0)
            small = f"{units.share(data, idle)} of it data loading" if data and idle else "of the GPUs' time"
            tiles.append(("Idle", units.share(idle, whole), small))
        else:
            tiles.append(("Optimizer", units.share(totals.get("optimizer", 0), whole), "of the steps"))
    lags = [(lag, rank.rank) for rank in ranks if (lag := look.lag_time(rank)) is not None]
    if lags:
        lag, rank_number = max(lags)
        tiles.append(("Largest median lag", units.duration(lag), f"rank {rank_number}"))
    return tiles


def _rank_bars(ranks: Sequence[Rank], flagged: set[int]) -> dict[str, Any] | None:
    rows = [
        Row(
            f"rank {rank.rank}",
            look.parts(rank),
            units.duration(sum(part.value for part in look.parts(rank))) + (" (cut)" if rank.truncated else ""),
            rank.rank in flagged,
            f"rank {rank.rank}" + (f" on {rank.host}" if rank.host else ""),
        )
        for rank in ranks
    ]
    if not any(part.value > 0 for row in rows for part in row.parts):
        return None
    picture = stacked_bars(
        rows,
        units.duration,
        title="Where the time of each rank went",
        description="One stacked bar a rank, on one scale.",
    )
    used = {part.key for row in rows for part in row.parts if part.value > 0}
    return {"picture": picture, "legend": legend(key for key in look.LABELS if key in used)}


def _lags(ranks: Sequence[Rank], flagged: set[int]) -> dict[str, Any] | None:
    steps = sorted({step.step for rank in ranks for step in rank.steps})
    known = [step.lag for rank in ranks for step in rank.steps if step.lag is not None]
    if not known or len(ranks) < 2:
        return None
    rows = []
    for rank in ranks:
        by_step = {step.step: step.lag for step in rank.steps}
        note = units.duration(look.lag_time(rank))
        rows.append(HeatRow(f"rank {rank.rank}", [by_step.get(step) for step in steps], note, rank.rank in flagged))
    # Microseconds of noise on equal ranks must not glow: the scale goes at least to 5% of a step.
    step_time = look.median([time for rank in ranks if (time := look.step_time(rank)) is not None]) or 0
    top = max(max(known), 0.05 * step_time, 1)
    picture = heat_map(
        rows,
        [str(step) for step in steps],
        units.duration,
        top,
        title="Arrival lag of each rank in each step",
        description="How much later than the first rank this rank came to a collective, at most, in the step.",
    )
    return {"picture": picture, "scale": scale(top, units.duration)}


def _layers(analysis: Analysis) -> dict[str, Any] | None:
    if not analysis.fsdp_layers:
        return None
    said = " ".join(f"{v.message} {v.evidence}" for v in analysis.verdicts if v.code == "prefetch_missing")
    rows = []
    for layer in analysis.fsdp_layers:
        exposed = layer.exposed / layer.gather if layer.gather else 0.0
        early = "" if layer.early is None else f", {units.percent(layer.early)} early"
        parts = [Part("hidden", layer.hidden), Part("exposed", layer.exposed)]
        named = re.search(rf"(?<![\w.]){re.escape(layer.layer)}(?!\w|\.\w)", said) is not None
        rows.append(Row(layer.layer, parts, f"{units.percent(exposed)} exposed{early}", named, layer.layer))
    picture = stacked_bars(
        rows,
        units.duration,
        title="All-gathers of each FSDP layer",
        description="The part hidden behind compute and the part exposed, summed over ranks and steps.",
        label_width=150,
        note_width=200,
        label_length=21,
    )
    return {"picture": picture, "legend": legend(["hidden", "exposed"])}


def _idle(ranks: Sequence[Rank]) -> dict[str, Any] | None:
    causes: dict[str, int] = {}
    for rank in ranks:
        for cause, time in (rank.split.idle_by_cause or {}).items():
            causes[cause] = causes.get(cause, 0) + time
    whole = sum(causes.values())
    if not whole:
        return None
    rows = [
        Row(
            look.CAUSE_WORDS.get(cause, cause),
            [Part(look.CAUSE_KEYS.get(cause, "other"), time)],
            units.share(time, whole),
        )
        for cause, time in sorted(causes.items(), key=lambda item: -item[1])
        if time
    ]
    return {
        "picture": stacked_bars(
            rows,
            units.duration,
            title="Idle time of the GPUs by cause",
            description="Summed over ranks.",
            label_width=150,
            note_width=70,
            label_length=21,
        )
    }
