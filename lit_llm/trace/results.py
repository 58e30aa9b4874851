"""What the analysis finds. Times are integer nanoseconds here; None is what a trace can't tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["info", "warning", "critical"]
CAUSES = ("data_loading", "host_sync", "launch", "dependency", "other")
"""Of idle time of a GPU."""


@dataclass
class Split:
    """Where a window of a rank's time went.

    On a GPU ``window = compute + comm_exposed + mem_exposed + idle``, exactly, and idle is the sum of its causes. On a
    CPU window, compute, mem_exposed and idle are None. ``comm_exposed = comm_waiting + comm_transfer`` where the
    collectives could be matched across ranks.
    """

    window: int | None = None
    compute: int | None = None
    comm_exposed: int = 0
    comm_hidden: int = 0
    mem_exposed: int | None = None
    idle: int | None = None
    comm_waiting: int | None = None
    comm_transfer: int | None = None
    idle_by_cause: dict[str, int] | None = None
    dataloader: int | None = None
    optimizer: int | None = None


@dataclass
class Step:
    """One optimizer step of a rank."""

    step: int
    start: int
    """Aligned: comparable across ranks."""
    duration: int
    """Of the ``ProfilerStep#`` mark, on the host."""
    split: Split
    lag: int | None = None
    """The latest that this rank came to a collective after the first one there; None: nothing to compare."""
    delay: int | None = None
    """How much less this rank waited for others than the median of them did: who is late waits least."""


@dataclass
class Rank:
    """One rank, over its whole trace."""

    rank: int
    file: str
    host: str | None
    device: Literal["gpu", "cpu"]
    truncated: bool
    clock_offset: int | None
    """By how much its clock is ahead of the first rank's, by the ends of collectives; None: it can't be told."""
    clock_error: int | None
    """Half the spread (16th to 84th percentile) of the estimates that ``clock_offset`` is the median of."""
    clock_applied: bool
    """Whether times were shifted by it: not where it lies within its error."""
    steps: list[Step]
    split: Split
    launch_ahead: int | None = None
    """Median time from the launch of a kernel to its start: how far the host runs ahead of the GPU."""
    kernels: int = 0


@dataclass
class CollectiveKind:
    """All collectives of a kind in a process group, summed over the ranks that were read."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send_recv, barrier, ... or other."""
    group: str | None
    group_size: int | None
    count: int
    """Of collectives, each counted once for all its ranks."""
    total: int
    """Union per rank, summed over ranks."""
    exposed: int
    hidden: int
    bytes: int | None
    """Of one rank's larger side, summed over the collectives of one rank (the mean over ranks)."""
    bandwidth: float | None = None
    """Bytes / time of the last to arrive, bytes per second (algorithm bandwidth); the median."""


@dataclass
class FsdpPhase:
    """A unit's all-gathers in forward or in backward, summed over ranks and steps."""

    count: int
    gather: int
    exposed: int
    first: bool
    """Nothing comes before them to hide behind."""


@dataclass
class FsdpLayer:
    """All-gathers of one FSDP unit, summed over ranks and steps."""

    layer: str
    count: int
    gather: int
    hidden: int
    exposed: int
    early: float | None = None
    """Share of the gathers that were called for before the unit's own turn came, that is, prefetched."""
    phases: dict[str, FsdpPhase] = field(default_factory=dict)
    """``forward`` and ``backward``."""


@dataclass
class Kernel:
    """A kernel (on a CPU trace: an op, by self time) over all ranks."""

    name: str
    calls: int
    total: int
    mean: float
    p95: int
    share: float
    """Of the total of all."""
    slowest_rank: int | None = None
    slowest_ratio: float | None = None
    """That rank's mean over the median rank's mean."""


@dataclass
class Gap:
    """A long idle gap of a GPU."""

    rank: int
    step: int | None
    duration: int
    cause: str
    op: str | None
    """What the launching thread was doing."""


@dataclass
class Straggler:
    """A rank that keeps the others waiting."""

    rank: int
    median_lag: int
    steps_led: int
    steps: int
    cause: Literal["data_loading", "slow_device", "slow_host", "uneven_work", "unknown"]


@dataclass
class Verdict:
    """An answer, with what it rests on."""

    code: str
    severity: Severity
    ranks: list[int]
    message: str
    evidence: str
    advice: str
    confidence: Literal["low", "medium", "high"] = "medium"
    steps: list[int] = field(default_factory=list)


@dataclass
class Health:
    """Something about the traces themselves that a reader must know."""

    rank: int | None
    message: str


@dataclass
class Span:
    """A stretch of a lane in a picture; aligned ns."""

    start: int
    end: int
    kind: Literal["compute", "comm", "memory", "data", "forward", "backward", "optimizer", "wait", "host", "other"]
    name: str


@dataclass
class Lane:
    """A row of a picture."""

    name: str
    """Such as ``GPU stream 7``, ``communication``, ``phases``."""
    spans: list[Span]


@dataclass
class RankTimeline:
    """The lanes of one rank in the step that is drawn."""

    rank: int
    label: str
    """Such as ``slowest`` or ``median``."""
    lanes: list[Lane]


@dataclass
class Timeline:
    """One step on several ranks, on one clock."""

    step: int | None
    start: int
    end: int
    ranks: list[RankTimeline]


@dataclass
class Analysis:
    """Everything about one window of traces."""

    source: str
    """What was read, for a title."""
    ranks: list[Rank]
    collectives: list[CollectiveKind] = field(default_factory=list)
    fsdp_layers: list[FsdpLayer] = field(default_factory=list)
    top_kernels: list[Kernel] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    straggler: Straggler | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    health: list[Health] = field(default_factory=list)
    timeline: Timeline | None = None
    world_size: int | None = None
    missing_ranks: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was left out of what the user named, and why; stands in ``health`` as well."""
    seconds: float = 0.0
    """That reading and analysing took."""


# What changed between two runs


@dataclass
class Figure:
    """One figure of two runs; None is what one of them can't tell."""

    before: float | None
    after: float | None
    noise: float | None = None
    """A change up to this says nothing; None: it can't be told."""

    @property
    def change(self) -> float | None:
        """Above 0 where it grew."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def ratio(self) -> float | None:
        """The change as a share of what was before."""
        return None if self.change is None or not self.before else self.change / self.before

    @property
    def clear(self) -> bool | None:
        """Whether the change is beyond the noise."""
        return None if self.change is None or self.noise is None else abs(self.change) > self.noise


@dataclass
class RankChange:
    """A part of one rank's step that changed unlike the other ranks'."""

    rank: int
    part: str
    """As in ``Difference.parts``."""
    time: Figure


@dataclass
class KernelChange:
    """A kernel (on a CPU trace: an op), a step and rank."""

    name: str
    """After; before where it is gone."""
    status: Literal["same", "alike", "new", "gone", "unlisted"]
    """``alike``: its name differs in numbers or template arguments. ``unlisted``: one of the runs has it not among its
    longest, which says little; ``new`` and ``gone``: and it can have taken next to nothing there."""
    calls: Figure
    mean: Figure
    total: Figure
    name_before: str | None = None
    """Where it is another."""
    at_most: float | None = None
    """ns a step and rank that it can have taken in the run that does not list it."""

    @property
    def change(self) -> float:
        """ns a step and rank; of one that a run does not list, what it must have changed by at least."""
        before, after, most = self.total.before, self.total.after, self.at_most or 0.0
        if before is None or after is None:
            return max((after or 0) - most, 0.0) if before is None else min(most - before, 0.0)
        return after - before

    @property
    def clear(self) -> bool | None:
        """Whether it changed by more than the noise."""
        return None if self.total.noise is None else abs(self.change) > self.total.noise


@dataclass
class CollectiveChange:
    """The collectives of a kind, a step and rank."""

    kind: str
    count: Figure
    bytes: Figure
    total: Figure
    exposed: Figure


@dataclass
class LayerChange:
    """The all-gathers of an FSDP unit, a step and rank."""

    layer: str
    gather: Figure
    exposed: Figure
    early: Figure


@dataclass
class Difference:
    """Two runs side by side: one before, one after. Times are ns a step."""

    before: str
    """Source of the first run."""
    after: str
    device: Literal["gpu", "cpu"] | None
    """None: they ran on different kinds."""
    summary: str
    """What became of the step and why, in a sentence or two."""
    step: Figure
    parts: dict[str, Figure]
    """Of the step, by the keys of :data:`lit_llm.trace.look.LABELS`, in the order of drawing."""
    exposed: Figure
    """Communication that nothing hides, which ``parts`` has in pieces."""
    hidden: Figure
    """Communication behind compute, which takes no part of the step."""
    ranks: list[RankChange] = field(default_factory=list)
    kernels: list[KernelChange] = field(default_factory=list)
    """The largest changes first."""
    collectives: list[CollectiveChange] = field(default_factory=list)
    layers: list[LayerChange] = field(default_factory=list)
    new: list[Verdict] = field(default_factory=list)
    """Verdicts above info, and none such before."""
    gone: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What makes the runs hard to compare."""
    method: str = ""
    """What the figures are, and what counts as noise."""
