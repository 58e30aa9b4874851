"""Reads the traces of all ranks and puts together what they say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lit_llm.errors import UserError
from lit_llm.trace.file_set import FileFacts, check_set, named, ranges
from lit_llm.trace.finding import find
from lit_llm.trace.intervals import covered, intersect, length
from lit_llm.trace.lags import Lags, find_lags
from lit_llm.trace.matching import Clock, clocks, match
from lit_llm.trace.per_rank import RankSummary, summarize
from lit_llm.trace.reader import read
from lit_llm.trace.results import Analysis, Health, Lane, Rank, RankTimeline, Span, Split, Step, Timeline
from lit_llm.trace.straggler import as_result, find_straggler
from lit_llm.trace.timeline import lanes
from lit_llm.trace.totals import collective_kinds, fsdp_layers, longest_gaps, top_kernels
from lit_llm.trace.verdicts import judge
from lit_llm.trace.workers import run_on_files

_DRAWN = 4
"""Ranks in the timeline."""


def analyze(
    paths: str | Path | Sequence[str | Path], *, processes: int | None = None, timeline: bool = False
) -> Analysis:
    """Reads the traces of one window and says what is wrong, rank by rank.

    Args:
        paths: trace files, a folder of them, or a run's folder (its last window is taken).
        processes: that read files side by side; None: one for each CPU, none for small files.
        timeline: also prepare the picture of a step, for which some files are read again.

    Raises:
        UserError: nothing there is a trace.
    """
    begun = time.monotonic()
    found = find([paths] if isinstance(paths, str | Path) else list(paths))
    results = run_on_files(summarize_file, [(str(file),) for file in found.files], processes)
    summaries = [one for one in results if isinstance(one, RankSummary)]
    failed = [str(one) for one in results if isinstance(one, UserError)]
    if not summaries:
        raise UserError(
            failed[0] if len(failed) == 1 else f"none of {len(failed)} files is a trace that can be read; {failed[0]}"
        )
    belonging = check_set([one.facts for one in summaries])
    kept = []
    for place, rank in zip(belonging.kept, belonging.ranks, strict=True):
        summaries[place].rank = rank
        kept.append(summaries[place])
    analysis = combine(kept, world_size=belonging.world_size, missing=belonging.missing)
    analysis.source = found.source
    analysis.notes = [*found.notes, *failed, *belonging.notes]
    analysis.health = _health(analysis.notes, kept) + analysis.health
    if timeline:
        analysis.timeline = _timeline(kept, analysis, processes)
    analysis.seconds = time.monotonic() - begun
    return analysis


def summarize_file(path: str) -> RankSummary:
    """Reads and summarizes one rank."""
    trace = read(path)
    return summarize(trace, FileFacts.of(trace))


def combine(ranks: Sequence[RankSummary], *, world_size: int | None = None, missing: Sequence[int] = ()) -> Analysis:
    """Compares ranks that were read, and judges.

    Args:
        ranks: each with its rank, in order.
        world_size: of the run; None: not known.
        missing: ranks that there must have been.
    """
    matches, odd = match(ranks, whole=not missing)
    found_clocks = clocks(ranks, matches)
    lags = find_lags(ranks, matches, found_clocks, everybody=not missing)
    several = len(ranks) > 1
    devices = {one.device for one in ranks}
    fit = [place for place, one in enumerate(ranks) if not (one.truncated and one.device == "gpu")]
    if len(devices) > 1:  # a rank without GPU work among others
        fit = [place for place in fit if ranks[place].device == "gpu"]
    judged = [ranks[place] for place in fit]
    left_out = [one for place, one in enumerate(ranks) if place not in fit]
    seen = Lags(
        lags.steps,
        lags.lag[:, fit],
        lags.waits[:, fit],
        lags.delay[:, fit],
        [lags.waiting[one] for one in fit],
        lags.complete[fit],
    )
    finding = find_straggler(judged, seen) if len(judged) > 1 else None

    results = [_rank(one, place, lags, found_clocks[place], several) for place, one in enumerate(ranks)]
    kinds = collective_kinds(ranks, matches)
    splits = [results[place].split for place in fit]
    layers = fsdp_layers(judged, seen.waiting)
    health = [Health(None, line) for line in odd] + _clock_health(ranks, found_clocks)
    return Analysis(
        source="",
        ranks=results,
        collectives=kinds,
        fsdp_layers=fsdp_layers(ranks),
        top_kernels=top_kernels(ranks),
        gaps=longest_gaps(ranks),
        straggler=None if finding is None else as_result(judged, seen, finding),
        verdicts=judge(judged, left_out, seen, finding, splits, kinds, layers, world_size),
        health=health,
        world_size=world_size,
        missing_ranks=list(missing),
    )


def _rank(one: RankSummary, place: int, lags: Lags, clock: Clock, several: bool) -> Rank:
    assert one.rank is not None
    row_of = {step: row for row, step in enumerate(lags.steps)}
    waiting = intersect(lags.waiting[place], one.exposed)
    compared = several and bool(lags.complete[place])
    shift = clock.offset if clock.applied and clock.offset is not None else 0
    whole = one.split
    if compared:
        _share_out(whole, length(waiting))
        for split, value in zip(
            one.step_splits, covered(waiting, one.windows[:, 0], one.windows[:, 1]).tolist(), strict=True
        ):
            _share_out(split, value)
    steps = []
    for number, mark, split in zip(
        one.marks.numbers.tolist(), one.marks.windows.tolist(), one.step_splits, strict=True
    ):
        row = row_of.get(number)
        lag, delay = ((int(table[row, place]) if row is not None else -1) for table in (lags.lag, lags.delay))
        step = Step(number, mark[0] - shift, mark[1] - mark[0], split)
        step.lag, step.delay = (None if value < 0 else value for value in (lag, delay))
        steps.append(step)
    return Rank(
        rank=one.rank,
        file=one.path,
        host=one.host,
        device=one.device,
        truncated=one.truncated,
        clock_offset=clock.offset if several else None,
        clock_error=clock.error if several else None,
        clock_applied=clock.applied,
        steps=steps,
        split=whole,
        launch_ahead=one.launch_ahead,
        kernels=one.gpu_events.get("compute", 0) + one.gpu_events.get("comm", 0),
    )


def _share_out(split: Split, waiting: int) -> None:
    split.comm_waiting = min(waiting, split.comm_exposed)
    split.comm_transfer = split.comm_exposed - split.comm_waiting


def _health(notes: list[str], kept: Sequence[RankSummary]) -> list[Health]:
    lines = [Health(None, line) for line in notes]
    for one in kept:
        lines += [Health(one.rank, f"{Path(one.path).name} {problem}") for problem in one.problems]
        cut = one.meta.get("truncated_to_steps")
        if cut:
            lines.append(
                Health(one.rank, f"the recorder kept the first {cut} steps alone, by its limit of size (max_mb)")
            )
        if not len(one.marks):
            lines.append(Health(one.rank, "has no step marks (ProfilerStep#), so nothing is told by step"))
        if one.meta.get("last_step_is_partial"):
            lines.append(Health(one.rank, "ends in the middle of a step, which is left out of the steps"))
        if one.marks.repeated:
            lines.append(Health(one.rank, "has step marks of equal numbers, as of epochs; they are counted from 0"))
        if one.device == "gpu" and not one.launches:
            lines.append(Health(one.rank, "has no runtime calls, so kernels belong to no step and idle has no cause"))
    unlaunched = [
        (one.rank, one.unlaunched) for one in kept if one.unlaunched and one.launches and one.rank is not None
    ]
    if unlaunched:
        most = max(count for _, count in unlaunched)
        ranks = ranges(rank for rank, _ in unlaunched)
        text = f"up to {most:,} GPU events were launched before the trace began (ranks {ranks}); they are in no step"
        lines.append(Health(None, text))
    return lines


def _clock_health(ranks: Sequence[RankSummary], found: Sequence[Clock]) -> list[Health]:
    lines = []
    moved = [(one, clock) for one, clock in zip(ranks, found, strict=True) if clock.applied and clock.offset]
    baseless = [one.rank for one, _ in moved if one.clock == "unknown" and one.rank is not None]
    if baseless:
        text = f"{named(baseless)}: no base time in the file; aligned by the ends of collectives"
        lines.append(Health(None, text))
    apart = [(one.rank, clock) for one, clock in moved if one.clock != "unknown" and one.rank is not None]
    if apart and ranks[0].clock != "unknown":
        most = max(abs(clock.offset or 0) for _, clock in apart)
        error = max(clock.error or 0 for _, clock in apart)
        text = (
            f"{named([rank for rank, _ in apart])}: clocks are up to {most / 1e6:,.3f} ms (+- {error / 1e6:,.3f}) off"
        )
        lines.append(Health(None, f"{text} rank {ranks[0].rank}'s and were aligned by the ends of collectives"))
    if len(ranks) > 1 and all(clock.offset is None for clock in found):
        lines.append(Health(None, "no collective could be matched between ranks: waits, lags and clocks can't be told"))
    return lines


# The picture of one step


def _timeline(ranks: Sequence[RankSummary], analysis: Analysis, processes: int | None) -> Timeline | None:
    step = _step_to_draw(analysis)
    drawn, spans = [], []
    for rank, label in _ranks_to_draw(analysis, step):
        one = next(one for one in ranks if one.rank == rank)
        clock = next(one for one in analysis.ranks if one.rank == rank)
        shift = clock.clock_offset if clock.clock_applied and clock.clock_offset is not None else 0
        drawn.append((rank, label, one.path, shift))
        if (window := one.window_of(step)) is not None:
            spans.append((window[0] - shift, window[1] - shift))
    if not spans:
        return None
    start, end = min(a for a, _ in spans), max(b for _, b in spans)  # the same stretch of time on all
    results = run_on_files(lanes_of_file, [(path, start + shift, end + shift) for *_, path, shift in drawn], processes)
    rows = [
        RankTimeline(rank, label, [_moved(lane, shift) for lane in found])
        for (rank, label, _, shift), found in zip(drawn, results, strict=True)
        if not isinstance(found, UserError)
    ]
    return Timeline(step, start, end, rows) if rows else None


def lanes_of_file(path: str, start: int, end: int) -> list[Lane]:
    """Reads a file again for its lanes."""
    return lanes(read(path), start, end)


def _moved(lane: Lane, shift: int) -> Lane:
    return Lane(lane.name, [Span(one.start - shift, one.end - shift, one.kind, one.name) for one in lane.spans])


def _step_to_draw(analysis: Analysis) -> int | None:
    """One that all ranks have, in the middle by the straggler's delay, or by its length."""
    common = [{step.step for step in rank.steps} for rank in analysis.ranks]
    steps = sorted(set.intersection(*common) or set.union(*common)) if common else []
    if not steps:
        return None
    rows = [(rank.rank, step) for rank in analysis.ranks for step in rank.steps]
    key = {number: float(np.median([one.duration for _, one in rows if one.step == number])) for number in steps}
    if analysis.straggler is not None:
        late = analysis.straggler.rank
        key = {
            number: max((one.delay or 0 for r, one in rows if r == late and one.step == number), default=0)
            for number in steps
        }
    stalls = [one for one in analysis.verdicts if one.code == "one_off_stall" and one.severity != "info"]
    if stalls and analysis.straggler is None and stalls[0].steps[0] in key:
        return stalls[0].steps[0]
    return sorted(steps, key=lambda number: key[number])[len(steps) // 2]


def _ranks_to_draw(analysis: Analysis, step: int | None) -> list[tuple[int, str]]:
    """The latest rank and the one in the middle; all, where there are few."""
    delay = {
        one.rank: next((s.delay if s.delay is not None else 0 for s in one.steps if s.step == step), 0)
        for one in analysis.ranks
    }
    order = sorted(delay, key=lambda rank: (-delay[rank], rank))
    first = analysis.straggler.rank if analysis.straggler is not None else order[0]
    label = "latest" if delay[first] > 0 else ""
    if len(order) <= _DRAWN:
        return [(rank, label if rank == first else "") for rank in sorted(order)]
    others = [rank for rank in order if rank != first]
    return [(first, label), (others[len(others) // 2], "median")]
