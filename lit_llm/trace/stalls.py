"""Steps in which one rank, or the run as a whole, stood still once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lit_llm.trace.lags import Lags
from lit_llm.trace.per_rank import RankSummary
from lit_llm.trace.results import Verdict
from lit_llm.trace.straggler import LEAST, Finding, comparable, excess_of, step_length
from lit_llm.trace.text import hosts_of, ms

STALL = 0.2
"""Of a step, from which on a single delay is a stall."""
LONG = 1.5
"""Times the usual step, from which on a step of all ranks is one."""
LEAST_COMMON = 20_000_000
"""ns beyond the usual that such a step must take."""

_PARTS = {"data": "fetching its data", "ops": "computing", "launch": "launching", "rest": "in code that is not traced"}


def find_stalls(ranks: Sequence[RankSummary], lags: Lags, finding: Finding | None) -> list[Verdict]:
    """A verdict for each stall; not for what the straggler does in every step, nor where stalls are the rule."""
    chronic = {finding.place, *finding.others} if finding is not None and finding.strong else set()
    step_ns, rows = step_length(ranks), comparable(lags)
    single: dict[int, tuple[int, int]] = {}
    for row in rows if len(rows) >= 2 else ():
        delays = np.array([-1 if place in chronic else value for place, value in enumerate(lags.delay[row])])
        place = int(delays.argmax())
        others = np.array([lags.delay[other, place] for other in rows if other != row])
        usual = float(np.median(others[others >= 0])) if (others >= 0).any() else 0.0
        if delays[place] - usual > max(STALL * step_ns, 2 * LEAST[ranks[0].device]):
            single[lags.steps[row]] = place, int(delays[place])
    if len(single) > max(1, len(rows) // 3):  # then ranks are late in turn
        single = {}
    found = [
        _verdict(ranks, step, place, delay, excess_of(ranks, place, step=step), step_ns)
        for step, (place, delay) in single.items()
    ]
    return found + _common(ranks, set(single), step_ns)


def _common(ranks: Sequence[RankSummary], told: set[int], step_ns: int) -> list[Verdict]:
    """Steps that took every rank much longer than the others did.

    By the marks on the host: a GPU's window of a step begins only when the step's data is there.
    """
    lengths: dict[int, list[int]] = {}
    for one in ranks:
        for number, length in zip(one.marks.numbers.tolist(), one.marks.lengths.tolist(), strict=True):
            lengths.setdefault(number, []).append(length)
    steps = sorted(lengths)
    if len(steps) < 3:
        return []
    shortest = {step: min(lengths[step]) for step in steps}
    middle = {step: float(np.median(lengths[step])) for step in steps}
    found = []
    for step in steps:
        usual = float(np.median([middle[one] for one in steps if one != step]))
        if step in told or shortest[step] < LONG * usual or shortest[step] - usual < LEAST_COMMON:
            continue
        more = {}
        for what in _PARTS:
            now = np.median([_of_step(one, what, step) for one in ranks])
            more[what] = int(now - np.median([_of_step(one, what, n) for one in ranks for n in steps if n != step]))
        found.append(_verdict(ranks, step, None, int(middle[step] - usual), more, step_ns))
    return found if len(found) <= max(1, len(steps) // 3) else []


def _verdict(
    ranks: Sequence[RankSummary], step: int, place: int | None, delay: int, excess: dict[str, int], step_ns: int
) -> Verdict:
    what = max(_PARTS, key=lambda key: excess.get(key, 0))
    clear = excess.get(what, 0) > 0.4 * delay
    who, numbers = "every rank" if len(ranks) > 1 else "the run", []
    if place is not None:
        one = ranks[place]
        assert one.rank is not None
        who, numbers = f"rank {one.rank}{hosts_of([one])}", [one.rank]
    doing = f", {_PARTS[what]}" if clear else ""
    message = f"Step {step} stood still for {ms(delay)}: {who} was late{doing}; other steps were not"
    evidence = "no part that the trace shows was longer"
    if clear:
        evidence = f"{ms(excess[what])} more {_PARTS[what]} than usual"
    again = "record more windows to see whether it repeats."
    if what == "data" and clear:
        again = "if it repeats, raise data.num_workers."
    advice = f"A single stall: see what happened then (checkpoint, evaluation, garbage collection, storage); {again}"
    found = Verdict("one_off_stall", "warning", numbers, message, evidence, advice, steps=[step])
    found.confidence = "medium" if clear else "low"
    # On a CPU whose cores others use as well single steps are late all the time.
    if ranks[0].device == "cpu" and (not clear or what != "data" or delay < 0.5 * step_ns):
        found.severity = "info"
    return found


def _of_step(one: RankSummary, what: str, step: int) -> int:
    values = one.work[what][one.marks.numbers == step]
    return int(values[0]) if len(values) else 0
