"""The difference of two runs in a sentence or two."""

from __future__ import annotations

from collections.abc import Sequence

from lit_llm.trace import look, units
from lit_llm.trace.results import Difference, KernelChange, RankChange, Verdict
from lit_llm.trace.text import ms
from lit_llm.trace.units import percent

WORDS = {
    "compute": "compute",
    "transfer": "transferring",
    "waiting": "waiting for late ranks",
    "comm": "exposed communication",
    "memory": "exposed memory copies",
    "data": "idling for data",
    "sync": "idling while the host synchronises",
    "launch": "idling for launches",
    "dependency": "idling for other streams",
    "other": "idling for untraced host code",
    "idle": "idling",
    "loading": "data loading",
    "optimizer": "optimizer",
    "rest": "time outside of these (mostly compute)",
}
_NAMED = 4
"""Parts, ranks and verdicts that a sentence names at most."""
_LEAST = 0.05
"""Share of the largest change that a part or rank must have to be named."""


def summarize(found: Difference) -> str:
    """``A step takes 46 ms (31%) longer: 40 ms more waiting for late ranks, ...``; or that nothing changed."""
    step = found.step
    if step.before is None or step.after is None or step.change is None:
        return "The steps can't be compared: one of the runs has none."
    length = f"{ms(abs(step.change))} ({percent(abs(step.ratio or 0))}) {'longer' if step.change > 0 else 'less'}"
    between = f"{ms(step.after)} a step, {ms(step.before)} before"
    if step.noise is None:
        return f"A step takes {length}, but one step a rank can't be told from noise ({between})."
    clear = {key: one for key, one in found.parts.items() if one.clear}
    ordered = sorted(clear.items(), key=lambda item: -abs(item[1].change or 0))
    largest = max((abs(one.change or 0) for one in clear.values()), default=0.0)
    named = [(key, one.change or 0) for key, one in ordered[:_NAMED] if abs(one.change or 0) > _LEAST * largest]
    told = ", ".join(_more(change, WORDS[key]) for key, change in named)
    details = _details(found, [key for key, _ in ordered])
    same = f"A step takes as long as before, within the noise ({between}, noise {ms(step.noise)})"
    if step.clear:
        first = f"A step takes {length}" + (f": {told}" if told else f" ({between})")
        if found.parts and sum(change for _, change in named) / step.change < 0.5:
            first += f", and no {'other ' if told else ''}part changed beyond its noise"
    elif told or details:
        first = same + (f", but: {told}" if told else "")
    else:
        first = f"No change beyond the noise: {between}, noise {ms(step.noise)}"
    return ". ".join([first, *details]) + "."


def _details(found: Difference, parts: Sequence[str]) -> list[str]:
    """Sentences on ranks, layers, kernels and verdicts; ``parts``: those that changed, the most changed first."""
    sentences = []
    largest = max((abs(row.time.change or 0) for row in found.ranks), default=0.0)
    ranks = [row for row in found.ranks if abs(row.time.change or 0) > _LEAST * largest]
    if ranks:
        rows = [_rank_text(row) for row in ranks[:_NAMED]]
        more = f"; {len(ranks) - _NAMED} more such" if len(ranks) > _NAMED else ""
        sentences.append(f"Unlike the others, {'; '.join(rows)}{more}")
    step = found.step.change or 0
    if parts and parts[0] in ("transfer", "comm"):
        layers = [one for one in found.layers if one.exposed.clear and (one.exposed.change or 0) * step > 0]
        layers.sort(key=lambda one: -abs(one.exposed.change or 0))
        rows = [f"{units.shorten(one.layer, 40)} ({_more(one.exposed.change or 0)})" for one in layers[:_NAMED]]
        if rows:
            more = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
            sentences.append(f"Exposed gathers, a step and rank: {', '.join(rows)}{more}")
    if {"compute", "rest"} & set(parts) or (not parts and found.device == "gpu"):
        moved = [one for one in found.kernels if one.clear and abs(one.change) > 0.1 * abs(step)]
        if moved:
            sentences.append(f"Changed most, a step and rank: {_kernel_text(moved[0])}")
    for verdicts, word in ((found.new, "Now"), (found.gone, "No more")):
        if verdicts:
            sentences.append(f"{word}: {', '.join(_verdict_text(one) for one in verdicts[:_NAMED])}")
    return sentences


def _more(change: float, what: str = "") -> str:
    return f"{ms(abs(change))} {'more' if change > 0 else 'less'} {what}".strip()


def _rank_text(row: RankChange) -> str:
    return f"rank {row.rank} has {_more(row.time.change or 0, WORDS[row.part])}"


def _kernel_text(kernel: KernelChange) -> str:
    text = f"{units.shorten(kernel.name.removeprefix('void '), 60)} ({_more(kernel.change)}"
    if kernel.status in ("new", "gone"):
        return f"{text}, {kernel.status})"
    if kernel.status == "unlisted":
        return f"{text}, at least)"
    more = kernel.calls.ratio or 0
    return f"{text}, {percent(abs(more))} {'more' if more > 0 else 'fewer'} calls)" if abs(more) > 0.02 else f"{text})"


def _verdict_text(verdict: Verdict) -> str:
    ranks = f", {units.named('rank', verdict.ranks)}" if verdict.ranks else ""
    return look.title(verdict).lower() + ranks
