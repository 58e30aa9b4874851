"""What one rank's trace says by itself, small enough to be handed between processes.

Definitions (all unions of intervals): C compute kernels, M communication kernels, X copies and fills, B = C u M u X.
``compute = |C|``, ``comm_exposed = |M \\ C|``, ``mem_exposed = |X \\ (C u M)|``, ``idle = window - |B|``. On a CPU-only
trace M is the executions of collectives on their own threads, and compute is any op that is open on the main thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lit_llm.trace import kinds
from lit_llm.trace.collectives import Collectives, on_cpu, on_gpu
from lit_llm.trace.columns import Category, Ints, RankTrace
from lit_llm.trace.file_set import FileFacts
from lit_llm.trace.fsdp import Gathers, gathers_of
from lit_llm.trace.idle import Idle, find_idle
from lit_llm.trace.intervals import clip, join, length, subtract, union
from lit_llm.trace.marks import Marks, find_marks
from lit_llm.trace.results import Split
from lit_llm.trace.tables import Table, gpu_table, op_table


@dataclass
class RankSummary:
    """One rank, before it is compared with others. Times are ns on this rank's own clock."""

    facts: FileFacts
    path: str
    rank: int | None
    world_size: int | None
    host: str | None
    clock: str
    truncated: bool
    problems: list[str]
    meta: dict[str, Any]
    groups: dict[str, tuple[int, ...]]
    group_descriptions: dict[str, str]
    device: Literal["gpu", "cpu"]
    marks: Marks
    windows: Ints
    """(steps, 2) of the GPU in each step; on a CPU those of the marks."""
    split: Split
    step_splits: list[Split]
    collectives: Collectives
    exposed: Ints
    """(n, 2) communication that nothing hides."""
    bare: Ints
    """(n, 2) the same, but on a CPU also where an op that is open only waits: what a late rank is told by."""
    gathers: Gathers
    idle: Idle | None
    table: Table
    work: dict[str, Ints]
    """Per step, (steps,): ns of ``ops``, that is compute, of ``data``, of idle for ``launch``, of the ``rest`` on the
    host; and ``calls``, of kernels or ops."""
    launch_ahead: int | None = None
    unlaunched: int = 0
    """GPU events with no launch in the trace."""
    launches: int = 0
    """Runtime calls in the trace."""
    gpu_events: dict[str, int] = field(default_factory=dict)
    whole: tuple[int, int] = (0, 0)
    """From the first event to the end of the last."""

    def window_of(self, step: int | None) -> tuple[int, int] | None:
        """Of a step (None: of everything) on this rank's clock; None where it has none."""
        start, end = self.whole
        if step is not None:
            rows = self.windows[self.marks.numbers == step]
            if not len(rows):
                return None
            start, end = rows[0].tolist()
        return (start, end) if end > start else None


def summarize(trace: RankTrace, facts: FileFacts | None = None) -> RankSummary:
    """All figures that need only this rank."""
    events, category = trace.events, trace.events.category
    gpu = (category == Category.KERNEL) | (category == Category.MEMCPY) | (category == Category.MEMSET)
    marks = find_marks(trace)
    common: dict[str, Any] = {
        "facts": facts or FileFacts.of(trace),
        "path": trace.path,
        "rank": trace.rank,
        "world_size": trace.world_size,
        "host": trace.host,
        "clock": trace.clock,
        "truncated": trace.truncated,
        "problems": list(trace.problems),
        "meta": trace.meta,
        "groups": trace.groups,
        "group_descriptions": trace.group_descriptions,
        "marks": marks,
        "whole": (int(events.start[0]), int(events.end.max())) if len(events) else (0, 0),
    }
    return (_gpu if gpu.any() else _cpu)(trace, marks, common)


def _gpu(trace: RankTrace, marks: Marks, common: dict[str, Any]) -> RankSummary:
    events, category = trace.events, trace.events.category
    start, end = events.start, events.end
    talks = kinds.matching(trace.names, kinds.is_communication)[events.name]
    named = np.fromiter((d.collective is not None for d in trace.details), dtype=bool, count=len(trace.details))
    if len(named):
        talks = talks | ((events.detail >= 0) & named[np.maximum(events.detail, 0)])
    kernel = category == Category.KERNEL
    memory = (category == Category.MEMCPY) | (category == Category.MEMSET)
    on_device = np.flatnonzero(kernel | memory)
    is_comm, is_compute = kernel & talks, kernel & ~talks
    compute = union(start[is_compute], end[is_compute])
    comm = union(start[is_comm], end[is_comm])
    copies = union(start[memory], end[memory])
    exposed = subtract(comm, compute)
    bare_memory = subtract(copies, join(compute, comm))
    busy = join(compute, comm, copies)

    launches = _launches(trace, on_device)
    launched = np.where(launches >= 0, start[np.maximum(launches, 0)], -1)  # the time of it
    opens = kernel[on_device] if kernel.any() else np.ones(len(on_device), dtype=bool)
    windows = _step_windows(marks, start[on_device][opens], launched[opens], int(end[on_device].max()))
    idle = find_idle(trace, marks, busy, on_device, launches)

    def split(a: int, b: int) -> Split:
        window = b - a
        parts = [length(clip(s, a, b)) for s in (compute, exposed, bare_memory, busy)]
        one = Split(window, parts[0], parts[1], 0, parts[2], window - parts[3])
        one.comm_hidden = length(clip(comm, a, b)) - parts[1]
        assert one.compute is not None
        assert one.mem_exposed is not None
        assert one.idle is not None
        assert window == one.compute + one.comm_exposed + one.mem_exposed + one.idle
        one.idle_by_cause = idle.by_cause(a, b)
        return one

    whole = split(int(busy[0, 0]), int(busy[-1, 1])) if len(busy) else Split(0, 0, 0, 0, 0, 0)
    steps = [split(int(a), int(b)) for a, b in windows]
    _host_times(marks, whole, steps)
    of_step = marks.step_of(launched)
    calls = np.bincount(of_step[(of_step >= 0) & is_compute[on_device]], minlength=len(marks))
    computed = np.array([s.compute for s in steps], dtype=np.int64)
    ahead = (start[on_device] - launched)[(launched >= 0) & kernel[on_device] & ~talks[on_device]]
    collectives = on_gpu(trace, np.flatnonzero(is_comm), marks, exposed, dict(zip(on_device, launched, strict=True)))
    return RankSummary(
        **common,
        device="gpu",
        windows=windows,
        split=whole,
        step_splits=steps,
        collectives=collectives,
        exposed=exposed,
        bare=exposed,
        gathers=gathers_of(trace, collectives, exposed),
        idle=idle,
        table=gpu_table(trace, np.flatnonzero(is_compute)),
        work={
            "ops": computed,
            "calls": calls.astype(np.int64),
            "data": marks.per_step(marks.data),
            "launch": np.array([(s.idle_by_cause or {}).get("launch", 0) for s in steps], dtype=np.int64),
            "rest": np.array([(s.idle_by_cause or {}).get("other", 0) for s in steps], dtype=np.int64),
        },
        launch_ahead=int(np.median(ahead)) if len(ahead) else None,
        unlaunched=int((launches < 0).sum()),
        launches=int((category == Category.RUNTIME).sum()),
        gpu_events={"compute": int(is_compute.sum()), "comm": int(is_comm.sum()), "memory": int(memory.sum())},
    )


def _cpu(trace: RankTrace, marks: Marks, common: dict[str, Any]) -> RankSummary:
    events, category = trace.events, trace.events.category
    start, end = events.start, events.end
    runs = kinds.matching(trace.names, kinds.is_host_communication)[events.name] & (category == Category.ANNOTATION)
    enqueues = kinds.matching(trace.names, kinds.ENQUEUE.match)[events.name] & (category == Category.CPU_OP)
    blocked = kinds.matching(trace.names, kinds.WAIT.match)[events.name]  # an op that only waits computes nothing
    main_ops = (category == Category.CPU_OP) & (events.thread == marks.thread) & ~enqueues & ~blocked
    compute = union(start[main_ops], end[main_ops])
    comm = union(start[runs], end[runs])
    # FSDP's hooks in the backward run, and wait, inside an op that is open around each node of the graph.
    inner = main_ops & ~kinds.matching(trace.names, kinds.AROUND.match)[events.name]
    worked = union(start[inner], end[inner])
    bare = subtract(comm, worked)
    exposed = subtract(comm, compute)

    def split(a: int | None, b: int | None) -> Split:
        clipped = [one if a is None or b is None else clip(one, a, b) for one in (comm, exposed)]
        bare = length(clipped[1])
        return Split(comm_exposed=bare, comm_hidden=length(clipped[0]) - bare)

    whole, steps = split(None, None), [split(int(a), int(b)) for a, b in marks.windows]
    _host_times(marks, whole, steps)
    of_step = marks.step_of(start[main_ops])
    collectives = on_cpu(trace, np.flatnonzero(enqueues), np.flatnonzero(runs), marks, exposed)
    ops, data = marks.per_step(worked), marks.per_step(marks.data)
    known = marks.per_step(join(worked, bare, collectives.waits(), marks.data))
    rest = marks.windows[:, 1] - marks.windows[:, 0] - known
    return RankSummary(
        **common,
        device="cpu",
        windows=marks.windows,
        split=whole,
        step_splits=steps,
        collectives=collectives,
        exposed=exposed,
        bare=bare,
        gathers=gathers_of(trace, collectives, bare),
        idle=None,
        table=op_table(trace, np.flatnonzero(main_ops)),
        work={
            "ops": ops,
            "calls": np.bincount(of_step[of_step >= 0], minlength=len(marks)).astype(np.int64),
            "data": data,
            "launch": np.zeros(len(marks), dtype=np.int64),
            "rest": rest,
        },
    )


def _host_times(marks: Marks, whole: Split, steps: list[Split]) -> None:
    """Fills in what annotations tell of data loading and the optimizer."""
    if marks.has_data:
        whole.dataloader = length(marks.data)
    if marks.has_optimizer:
        whole.optimizer = length(marks.optimizer)
    data, optimizer = marks.per_step(marks.data), marks.per_step(marks.optimizer)
    for place, one in enumerate(steps):
        one.dataloader = int(data[place]) if marks.has_data else None
        one.optimizer = int(optimizer[place]) if marks.has_optimizer else None


def _launches(trace: RankTrace, on_device: Ints) -> Ints:
    """For each GPU event the place of the runtime call that launched it, -1 where the trace has none.

    Several kernels may have one launch, as of a graph.
    """
    events = trace.events
    calls = np.flatnonzero((events.category == Category.RUNTIME) & (events.correlation > 0))
    if not len(calls):
        return np.full(len(on_device), -1, dtype=np.int64)
    order = np.argsort(events.correlation[calls], kind="stable")  # events are sorted by time: the first call is taken
    keys = events.correlation[calls][order]
    wanted = events.correlation[on_device]
    place = np.minimum(np.searchsorted(keys, wanted, side="left"), len(keys) - 1)
    return np.where((keys[place] == wanted) & (wanted > 0), calls[order][place], -1)


def _step_windows(marks: Marks, start: Ints, launched: Ints, last: int) -> Ints:
    """(steps, 2): from the first kernel launched in a step to the first that is launched after it.

    That is the next step's, or what runs between two steps, such as a validation; for the last one it is the end of the
    GPU's work. An empty window where a step launched nothing.
    """
    windows = np.zeros((len(marks), 2), dtype=np.int64)
    known = launched >= 0
    order = np.argsort(launched[known], kind="stable")
    when, begins = launched[known][order], start[known][order]
    # the earliest start of all work launched at or after each launch
    from_here = np.minimum.accumulate(begins[::-1])[::-1]
    for place, (a, b) in enumerate(marks.windows):
        lo, hi = np.searchsorted(when, [a, b])
        if lo == hi:
            windows[place] = last
            continue
        opens = int(begins[lo:hi].min())
        closes = int(from_here[hi]) if hi < len(when) else last
        windows[place] = opens, max(closes, opens)
    return windows
