"""What each kind of time is called and in which colour class it is drawn; the colours are in templates/page.css."""

from __future__ import annotations

from dataclasses import dataclass

from lit_llm.trace.results import Analysis, Rank, Split, Verdict
from lit_llm.trace.units import named

LABELS = {
    "compute": "compute",
    "transfer": "communication, transferring",
    "waiting": "communication, waiting for a rank",
    "comm": "communication",
    "memory": "memory copies",
    "data": "idle: data loading",
    "sync": "idle: host synchronises",
    "launch": "idle: launch",
    "dependency": "idle: dependency",
    "other": "idle: other",
    "idle": "idle",
    "loading": "data loading",
    "optimizer": "optimizer",
    "rest": "rest (mostly compute)",
    "hidden": "hidden behind compute",
    "exposed": "exposed",
}
CAUSE_KEYS = {
    "data_loading": "data",
    "host_sync": "sync",
    "launch": "launch",
    "dependency": "dependency",
    "other": "other",
}
CAUSE_WORDS = {
    "data_loading": "data loading",
    "host_sync": "host synchronises",
    "launch": "launch",
    "dependency": "dependency",
    "other": "other",
    "slow_device": "slow GPU",
    "slow_host": "slow host",
    "uneven_work": "uneven work",
    "unknown": "unknown",
}
SPAN_WORDS = {"comm": "communication", "data": "data loading", "memory": "memory copies", "wait": "waiting"}
TITLES = {
    "straggler": "Slow rank",
    "no_straggler": "No slow rank",
    "communication_bound": "Communication-bound",
    "prefetch_missing": "Gathers not hidden",
    "launch_bound": "Launch-bound",
    "host_sync": "Host synchronises",
    "data_starved": "Starved of data",
    "dependency_wait": "Streams wait for one another",
    "memory_copies": "Memory copies exposed",
    "one_off_stall": "Stall in one step",
    "healthy": "Healthy",
    "not_enough_evidence": "Not enough evidence",
}


@dataclass(frozen=True)
class Part:
    """A piece of a bar; ``value`` in the bar's unit (ns for times)."""

    key: str
    value: float


def parts(rank: Rank) -> list[Part]:
    """What a rank's bar is made of, in the order of drawing.

    On a GPU the parts add up to the window. On a CPU they add up to the rank's steps, as long as data loading, the
    optimizer and exposed communication do not overlap; where they do the rest is 0.
    """
    split = rank.split
    if rank.device == "gpu":
        return [
            Part("compute", split.compute or 0),
            *_communication(split),
            Part("memory", split.mem_exposed or 0),
            *_idle(split),
        ]
    per_step = [step.split for step in rank.steps]
    if per_step:  # the steps alone: there is nothing to tell what else a CPU did in the trace
        split = Split(
            comm_exposed=sum(s.comm_exposed for s in per_step),
            comm_waiting=_sum([s.comm_waiting for s in per_step]),
            comm_transfer=_sum([s.comm_transfer for s in per_step]),
            dataloader=_sum([s.dataloader for s in per_step]),
            optimizer=_sum([s.optimizer for s in per_step]),
        )
    known = [
        Part("loading", split.dataloader or 0),
        Part("optimizer", split.optimizer or 0),
        *_communication(split),
    ]
    rest = sum(step.duration for step in rank.steps) - sum(part.value for part in known)
    return [*known[:1], Part("rest", max(rest, 0)), *known[1:]]


def _communication(split: Split) -> list[Part]:
    if split.comm_waiting is None or split.comm_transfer is None:
        return [Part("comm", split.comm_exposed)]
    return [Part("transfer", split.comm_transfer), Part("waiting", split.comm_waiting)]


def _idle(split: Split) -> list[Part]:
    if split.idle_by_cause is None:
        return [Part("idle", split.idle or 0)]
    return [Part(CAUSE_KEYS.get(cause, "other"), time) for cause, time in split.idle_by_cause.items()]


def _sum(values: list[int | None]) -> int | None:
    """None where any is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def median(values: list[float]) -> float | None:
    """None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def step_time(rank: Rank) -> float | None:
    """Median duration of a rank's steps, ns."""
    return median([step.duration for step in rank.steps])


def lag_time(rank: Rank) -> float | None:
    """Median of a rank's arrival lags, ns."""
    return median([step.lag for step in rank.steps if step.lag is not None])


def title(verdict: Verdict) -> str:
    """A verdict's code in words."""
    return TITLES.get(verdict.code, verdict.code.replace("_", " ").capitalize())


def by_severity(analysis: Analysis) -> list[Verdict]:
    """The verdicts, the worst first, else in their order."""
    weight = {"critical": 0, "warning": 1, "info": 2}
    return sorted(analysis.verdicts, key=lambda verdict: weight[verdict.severity])


def flagged_ranks(analysis: Analysis) -> list[int]:
    """Ranks that a verdict above info, or the straggler, names; the straggler first."""
    found = [analysis.straggler.rank] if analysis.straggler else []
    for verdict in by_severity(analysis):
        if verdict.severity != "info":
            found += [rank for rank in verdict.ranks if rank not in found]
    return found


def summary(analysis: Analysis) -> str:
    """What was read, in a line: ``8 ranks on 2 hosts, GPU, steps 100-102``."""
    ranks = analysis.ranks
    if not ranks:
        return "no rank could be read"
    hosts = {rank.host for rank in ranks if rank.host}
    of = f" of {analysis.world_size}" if analysis.world_size and analysis.world_size != len(ranks) else ""
    words = [f"{len(ranks)}{of} rank{'s' if len(ranks) > 1 or of else ''}"]
    if hosts:
        words[0] += f" on {len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    words.append(" and ".join(sorted({rank.device.upper() for rank in ranks}, reverse=True)))
    steps = sorted({step.step for rank in ranks for step in rank.steps})
    words.append(named("step", steps) if steps else "no step marks")
    if analysis.missing_ranks:
        words.append(f"missing: {named('rank', analysis.missing_ranks)}")
    return ", ".join(words)
