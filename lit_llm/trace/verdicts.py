"""Answers in words: what is wrong, how sure that is, what it rests on, and which option to change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lit_llm.trace import shares
from lit_llm.trace.lags import Lags
from lit_llm.trace.per_rank import RankSummary
from lit_llm.trace.results import CollectiveKind, FsdpLayer, Split, Verdict
from lit_llm.trace.stalls import find_stalls
from lit_llm.trace.straggler import Finding, comparable, slowdown, step_length, threshold
from lit_llm.trace.text import hosts_of, ms, ranks_text
from lit_llm.trace.units import percent

_REASON = {
    "data_loading": ("waits for its data", "wait for their data"),
    "slow_device": ("computes the same more slowly", "compute the same more slowly"),
    "slow_host": ("is held up by its host", "are held up by their hosts"),
    "uneven_work": ("has more to compute", "have more to compute"),
    "unknown": ("is late, the cause does not show", "are late, the cause does not show"),
}
_ADVICE = {
    "data_loading": shares.DATA_ADVICE,
    "slow_device": "The same kernels take longer here: check the device's clocks, temperature, power limit and who "
    "else uses it, and swap the machine if it stays slow.",
    "slow_host": "The host is late with its work: look for other processes, CPU binding, garbage collection and Python "
    "that runs on this rank alone (loggers, callbacks); --model.compile true needs fewer launches.",
    "uneven_work": "This rank computes more: balance the tokens of the micro-batches (packing, equal lengths) and look "
    "for code that runs on it alone.",
    "unknown": "Compare this rank's lanes in the timeline with another's; record more steps (active) to be surer.",
}
_PARTS = {"data": "data", "ops": "compute", "launch": "launching", "rest": "untraced host code"}
_ORDER = {"critical": 0, "warning": 1, "info": 2}


def judge(
    ranks: Sequence[RankSummary],
    left_out: Sequence[RankSummary],
    lags: Lags,
    finding: Finding | None,
    splits: Sequence[Split],
    kinds: Sequence[CollectiveKind],
    layers: Sequence[FsdpLayer],
    world_size: int | None,
) -> list[Verdict]:
    """All verdicts, the gravest first; ``healthy`` where none is grave.

    Args:
        ranks: the ranks that may be judged.
        left_out: ranks whose figures can't be trusted, as their files are cut off.
        lags: arrivals and waits of ``ranks``.
        finding: the straggler among them.
        splits: of ``ranks``, with the waits.
        kinds: the collectives.
        layers: FSDP's, without waits for late ranks.
        world_size: of the run.
    """
    found: list[Verdict] = []
    if ranks:
        found += _straggler(ranks, left_out, lags, finding, world_size)
        found += find_stalls(ranks, lags, finding)
        named = any(one.code in ("straggler", "one_off_stall") and one.ranks for one in found)
        starved_alone = finding is not None and finding.cause == "data_loading" and len(ranks) <= 2
        found += [
            one
            for one in (
                shares.communication(ranks, splits, kinds, named),
                shares.prefetch(ranks, layers),
                *shares.idle(ranks),
                None if starved_alone else shares.data(ranks),
            )
            if one is not None
        ]
    for why in ("cut", "other"):
        numbers = [one.rank for one in left_out if one.rank is not None and one.truncated == (why == "cut")]
        if numbers:
            plural = len(numbers) > 1
            message = (
                f"{ranks_text(numbers)}: no work of a GPU is in the file{'s' if plural else ''}, unlike the others'"
            )
            evidence, advice = "what it did can't be compared with them", "Record it like the others."
            if why == "cut":
                message = (
                    f"{ranks_text(numbers)}: the file{'s are' if plural else ' is'} cut off, so nothing is concluded"
                )
                evidence = "a cut file lacks kernels of all times, not the last ones alone"
                advice = "Record again; the run may have died while it wrote."
            found.append(Verdict("not_enough_evidence", "info", numbers, message, evidence, advice))
    troubles = {"straggler", "one_off_stall", "prefetch_missing", "communication_bound", "not_enough_evidence"}
    checked = all(len(one.marks) or one.split.window for one in ranks)
    if ranks and checked and all(one.severity == "info" and one.code not in troubles for one in found):
        message = "Nothing here is slow for a reason that the traces show"
        found.append(Verdict("healthy", "info", [], message, "all checks are within their bounds", ""))
    if ranks and max(len(one.marks) for one in ranks) < 2:  # start-up and the like may be all there is
        for one in found:
            one.confidence = "low"
    return sorted(found, key=lambda one: _ORDER[one.severity])


def _straggler(
    ranks: Sequence[RankSummary],
    left_out: Sequence[RankSummary],
    lags: Lags,
    finding: Finding | None,
    world_size: int | None,
) -> list[Verdict]:
    """A slow rank, none, or not enough to say."""
    if len(ranks) < 2:
        if (world_size or 1) < 2 and not left_out:
            return []
        what = "can be judged" if left_out else "was read"
        message = f"One rank of {max(world_size or 1, 1 + len(left_out))} {what}: who lags can't be told"
        advice = "Record all ranks, or every k-th (TraceCapture ranks)."
        evidence = "a rank's lateness shows in the others' waits"
        return [Verdict("not_enough_evidence", "info", [], message, evidence, advice)]
    steps = len(comparable(lags))
    if steps < 2:
        seen = "one step alone is comparable" if steps else "no step has collectives that match between ranks"
        if not any(len(one.marks) for one in ranks):
            seen = "the traces have no step marks (ProfilerStep#)"
        advice = "Record two or more of the same steps on every rank (TraceCapture active, 3 by default)."
        message = "Whether a rank lags can't be told"
        return [Verdict("not_enough_evidence", "info", [], message, seen, advice, confidence="low")]
    if finding is None:
        return [_no_straggler(ranks, lags, steps, whole=bool(lags.complete.all()) and not left_out)]
    places = [finding.place, *finding.others]
    numbers = [rank for place in places if (rank := ranks[place].rank) is not None]
    share = percent(finding.delay / max(finding.step_ns, 1))
    if finding.waited_for:
        them = "it" if len(places) == 1 else "them"
        cost = f"the others wait {ms(finding.delay)} of each {ms(finding.step_ns)} step for {them} ({share})"
    else:
        cost = (
            f"{ms(finding.delay)} more than the others in each {ms(finding.step_ns)} step ({share}), which their waits "
            "do not show"
        )
    who = f"{ranks_text(numbers)}{hosts_of([ranks[place] for place in places])}"
    message = f"{who} {_REASON[finding.cause][len(places) > 1]}: {cost}"
    evidence = f"{'latest' if finding.waited_for else 'so'} in {finding.led} of {finding.steps} steps; "
    evidence += _excess_text(ranks, finding)
    one = Verdict("straggler", "info", numbers, message, evidence, _ADVICE[finding.cause], steps=list(lags.steps))
    one.confidence = "low"
    if finding.strong:
        one.severity = "critical" if finding.delay > 0.25 * finding.step_ns else "warning"
        one.confidence = "medium" if finding.cause == "unknown" else "high"
    return [one]


def _excess_text(ranks: Sequence[RankSummary], finding: Finding) -> str:
    parts = [
        f"{ms(value)} more {_PARTS[what]}"
        for what, value in sorted(finding.excess.items(), key=lambda item: -item[1])
        if what in _PARTS and value > 0.1 * finding.delay
    ]
    text = f"a step it takes {', '.join(parts) or 'no longer in anything that is traced'} than the median of the others"
    if finding.cause == "slow_device":
        ratios, weights = slowdown(ranks, finding.place, finding.others)
        if len(ratios):
            text += f"; the same kernels take {percent(float(np.average(ratios, weights=weights)) - 1)} longer"
    if finding.cause == "uneven_work" and finding.excess["calls"] > 0:
        text += f"; {finding.excess['calls']:,} more {'kernels' if ranks[0].device == 'gpu' else 'ops'} a step"
    return text


def _no_straggler(ranks: Sequence[RankSummary], lags: Lags, steps: int, whole: bool) -> Verdict:
    delay = lags.delay[comparable(lags)]
    worst = float(np.median(delay.max(axis=1)))
    least = threshold(ranks, step_length(ranks))
    evidence = f"{len(ranks)} ranks over {steps} steps; the latest of a step delays it by {ms(worst)} in the median"
    if worst > least and ranks[0].device == "gpu":
        late = sorted({rank for place in delay.argmax(axis=1).tolist() if (rank := ranks[place].rank) is not None})
        message = (
            f"No single rank lags, but in most steps one or another does, by {ms(worst)} ({ranks_text(late).lower()})"
        )
        advice = "The work is uneven from step to step: balance the tokens of micro-batches, and record more steps."
        return Verdict("no_straggler", "info", [], message, evidence, advice, confidence="medium")
    who = "No rank" if whole else f"None of the {len(ranks)} ranks that can be judged"
    if not whole:
        evidence += "; the others wait for them unseen, and they for the others"
    one = Verdict(
        "no_straggler", "info", [], f"{who} keeps the others waiting, within {ms(least)} a step", evidence, ""
    )
    one.confidence = "low" if not whole else "high" if worst < least / 2 and steps > 3 else "medium"
    return one
