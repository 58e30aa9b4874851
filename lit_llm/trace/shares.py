"""Verdicts on shares of the time over all ranks: communication, prefetch, idle, copies, data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lit_llm.trace.per_rank import RankSummary
from lit_llm.trace.results import CollectiveKind, FsdpLayer, Severity, Split, Verdict
from lit_llm.trace.straggler import step_length
from lit_llm.trace.text import ms
from lit_llm.trace.units import percent

EXPOSED = (0.15, 0.30)
"""Share of the time in which communication is exposed: warning, critical."""
STARVED = (0.10, 0.25)
"""In which a CPU's ranks fetch data; of a GPU's idle for it half as much."""
LAUNCH = (0.15, 0.35)
DEPENDENCY = (0.20, 0.50)
SYNC = (0.03, 0.10)
COPIES = (0.05, 0.15)
GATHER = 0.5
"""Share of a unit's gathers that is exposed, from which on its prefetch is missing."""

DATA_ADVICE = (
    "Raise data.num_workers, or look at what this storage and data set do; with num_workers 0 the batch is made while "
    "the device waits."
)
_WAITING_ADVICE = (
    "It is mostly waiting for late ranks, not the network: deal with the rank that lags, or even out the work."
)
_SHARDING_ADVICE = (
    "Raise trainer.strategy.prefetch, keep parameters gathered (trainer.strategy.reshard_after_forward false) if they "
    "fit, shard over fewer devices (replicate x shard), or give each gather more compute (data.micro_batch_size)."
)
_REDUCING_ADVICE = (
    "Reduce less often (more micro-batches a step), use other buckets (DataParallelStrategy bucket_size_mb, "
    "compression bf16), or give each step more compute (data.micro_batch_size)."
)


def _severity(value: float, levels: tuple[float, float]) -> Severity | None:
    if not value >= levels[0]:  # also of nan: not known
        return None
    return "critical" if value >= levels[1] else "warning"


def share_of(ranks: Sequence[RankSummary], take: str, cause: str | None = None, low: bool = False) -> float:
    """Median over ranks (``low``: their lower quartile) of a part of their time; nan where no trace tells it.

    With three steps or more it is the median over a rank's steps, so that one stall is no state. A CPU-only trace has
    steps alone.
    """
    values = []
    for one in ranks:
        steps = list(zip(one.step_splits, (one.windows[:, 1] - one.windows[:, 0]).tolist(), strict=True))
        steps = [(split, window) for split, window in steps if window > 0]
        if one.split.window and len(steps) < 3:
            steps = [(one.split, one.split.window)]
        parts = [getattr(s, take) if cause is None else (s.idle_by_cause or {}).get(cause) for s, _ in steps]
        if steps and all(part is not None for part in parts):
            values.append(float(np.median([part / window for part, (_, window) in zip(parts, steps, strict=True)])))
    if not values:
        return float("nan")
    return float(np.percentile(values, 25 if low else 50))


def _over(ranks: Sequence[RankSummary]) -> str:
    return f"median over {len(ranks)} ranks" if len(ranks) > 1 else "one rank"


def communication(
    ranks: Sequence[RankSummary], splits: Sequence[Split], kinds: Sequence[CollectiveKind], named: bool
) -> Verdict | None:
    """Communication that nothing hides; if ``named``, without the waits for a rank that another verdict names."""
    waiting, exposed = (sum(getattr(one, name) or 0 for one in splits) for name in ("comm_waiting", "comm_exposed"))
    known = bool(splits) and all(one.comm_waiting is not None for one in splits)
    waited = waiting / exposed if exposed and known else 0.0
    share = share_of(ranks, "comm_exposed")
    severity = _severity(share * (1 - waited) if named else share, EXPOSED)
    if severity is None:
        return None
    gpu = ranks[0].device == "gpu"
    evidence = _over(ranks)
    if not known and len(ranks) > 1:
        evidence += "; how much of it is waiting for late ranks can't be told, as not all members were read"
    if known:
        evidence += f"; {percent(waited)} of it waiting for late ranks, {percent(1 - waited)} transferring"
    advice = _WAITING_ADVICE if known and waited > 0.6 else _REDUCING_ADVICE
    if kinds:
        worst = max(kinds, key=lambda one: one.exposed)
        among = f" among {worst.group}" if worst.group else ""
        share_of_kind = worst.exposed / max(sum(one.exposed for one in kinds), 1)
        evidence += f"; most of it is {worst.kind}{among} ({percent(share_of_kind)})"
        if advice is _REDUCING_ADVICE and worst.kind in ("all_gather", "reduce_scatter"):
            advice = _SHARDING_ADVICE
    message = f"{percent(share)} of the time goes to communication that no compute hides"
    # What a laptop's processes take over gloo says little about a cluster's network.
    one = Verdict("communication_bound", severity if gpu else "info", [], message, evidence, advice)
    one.confidence = "high" if known and gpu else "medium"
    return one


def prefetch(ranks: Sequence[RankSummary], layers: Sequence[FsdpLayer]) -> Verdict | None:
    """FSDP units whose gather does not hide; those with nothing before them are left out."""
    gpu = ranks[0].device == "gpu"
    rest = [(one, name, p) for one in layers for name, p in one.phases.items() if not p.first and p.gather > 0]
    bare = [row for row in rest if row[2].exposed > GATHER * row[2].gather]
    steps = sum(max(len(one.marks), 1) for one in ranks)
    step_ns = step_length(ranks)
    if not step_ns:
        return None
    share = sum(phase.exposed for _, _, phase in bare) / steps / step_ns
    units = list(dict.fromkeys(one.layer for one, _, _ in bare))
    odd = gpu and len(units) <= len({one.layer for one, _, _ in rest}) // 2  # others do hide, so these could
    if not bare or share < (0.003 if odd else 0.01):
        return None
    names = ", ".join(units[:6]) + (f" and {len(units) - 6} more" if len(units) > 6 else "")
    worst, where, phase = max(bare, key=lambda row: row[2].exposed)
    evidence = (
        f"{worst.layer} in the {where}: {ms(phase.exposed / phase.count)} of {ms(phase.gather / phase.count)} a gather "
        f"exposed; {len(rest) - len(bare)} of {len(rest)} (units x forward, backward) hide theirs"
    )
    early = [one.early for one, _, _ in bare if one.early is not None]
    if early:
        asked = float(np.mean(early))
        evidence += f"; {percent(asked) if asked else 'none'} of these units' gathers were called for before their turn"
    how = "Set trainer.strategy.prefetch to 1 or more" if np.mean(early or [0.0]) < 0.9 else "Set prefetch to 2"
    advice = (
        f"{how}, keep what is large gathered (reshard_after_forward false), or raise data.micro_batch_size so that a "
        "layer computes longer than the next takes to arrive."
    )
    message = f"The gather of {names} does not hide behind the compute before it: {percent(share)} of a step"
    grave = gpu and share >= (0.01 if odd else 0.05)
    return Verdict("prefetch_missing", "warning" if grave else "info", [], message, evidence, advice)


def idle(ranks: Sequence[RankSummary]) -> list[Verdict]:
    """What GPUs wait for besides communication and data."""
    if ranks[0].device != "gpu":
        return []
    return [one for one in (_launch(ranks), _dependency(ranks), _host_sync(ranks), _copies(ranks)) if one is not None]


def _launch(ranks: Sequence[RankSummary]) -> Verdict | None:
    ahead = [one.launch_ahead for one in ranks if one.launch_ahead is not None]
    behind = float(np.median(ahead)) if ahead else None
    dispatch, other = share_of(ranks, "idle", "launch"), share_of(ranks, "idle", "other")
    severity = _severity(dispatch + other, LAUNCH)
    if severity is None or (behind is not None and behind > 1e6):  # launched long before: not the host
        return None
    evidence = f"{percent(dispatch)} in ops and runtime calls, {percent(other)} in code that is not traced"
    if behind is not None:
        evidence += f"; kernels start {ms(behind)} after their launch in the median"
    advice = (
        "Give each kernel more to do (data.micro_batch_size), need fewer of them (--model.compile true), and keep "
        "Python out of the step."
    )
    message = f"The GPU waits {percent(dispatch + other)} of the time for the host to launch its next kernel"
    return Verdict("launch_bound", severity, [], message, evidence, advice)


def _dependency(ranks: Sequence[RankSummary]) -> Verdict | None:
    share = share_of(ranks, "idle", "dependency")
    severity = _severity(share, DEPENDENCY)
    if severity is None:
        return None
    evidence = f"{_over(ranks)}; streams wait for events of each other or of the host, or short kernels leave gaps"
    advice = "See in the timeline which stream waits for which; fuse short kernels (--model.compile true)."
    message = f"The GPU idles {percent(share)} of the time although its next work is launched"
    return Verdict("dependency_wait", severity, [], message, evidence, advice)


def _copies(ranks: Sequence[RankSummary]) -> Verdict | None:
    share = share_of(ranks, "mem_exposed")
    severity = _severity(share, COPIES)
    if severity is None:
        return None
    advice = (
        "Copy batches from pinned memory without blocking, keep tensors on the device, and look for .cpu(), .to() and "
        "cpu_offload in the step."
    )
    message = f"{percent(share)} of the time goes to copies and fills that no compute hides"
    return Verdict("memory_copies", severity, [], message, _over(ranks), advice)


def _host_sync(ranks: Sequence[RankSummary]) -> Verdict | None:
    share = share_of(ranks, "idle", "host_sync")
    severity = _severity(share, SYNC) or ("info" if share > 0.003 else None)
    if severity is None:
        return None
    rows: dict[str, list[int]] = {}
    lines: dict[str, str] = {}
    for one in ranks:
        for name, count, total, line in one.idle.syncs if one.idle is not None else []:
            row = rows.setdefault(name, [0, 0])
            row[0], row[1] = row[0] + count, row[1] + total
            if line:
                lines[name] = line
    what, evidence = "a blocking call", "blocking calls in the step"
    if rows:
        what = max(rows, key=lambda name: rows[name][1])
        a_step = rows[what][0] / max(sum(max(len(one.marks), 1) for one in ranks), 1)
        evidence = f"{what} {a_step:,.1f} times a step on a rank"
        what += f" at {lines[what]}" if what in lines else ""
    advice = (
        "Take .item(), .cpu(), print of a tensor and boolean masks out of the step, or read values a step later; "
        "record with with_stack true to see the line."
    )
    message = f"The GPU idles {percent(share)} of the time because the host waits for it ({what})"
    return Verdict("host_sync", severity, [], message, evidence, advice)


def data(ranks: Sequence[RankSummary]) -> Verdict | None:
    """All ranks, or nearly all, wait for their data."""
    gpu = ranks[0].device == "gpu"
    share = share_of(ranks, "idle", "data_loading", low=True) if gpu else share_of(ranks, "dataloader", low=True)
    severity = _severity(2 * share if gpu else share, STARVED)
    if severity is None:
        return None
    who = "Every rank waits" if len(ranks) > 1 else "The rank waits"
    message = f"{who} for its data: {percent(share)} of the time"
    evidence = f"lower quartile of {len(ranks)} ranks" if len(ranks) > 1 else "one rank"
    return Verdict("data_starved", severity, [], message, evidence, DATA_ADVICE, confidence="high")
