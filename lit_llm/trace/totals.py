"""Figures over all ranks: collectives by kind, FSDP layers, kernels, gaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from lit_llm.trace.columns import Ints
from lit_llm.trace.intervals import covered, intersect, length, union
from lit_llm.trace.matching import Match
from lit_llm.trace.per_rank import RankSummary
from lit_llm.trace.results import CollectiveKind, FsdpLayer, FsdpPhase, Gap, Kernel

_KERNELS = 25
_GAPS = 15


def collective_kinds(ranks: Sequence[RankSummary], matches: Sequence[Match]) -> list[CollectiveKind]:
    """By kind and process group, those that are exposed longest first."""
    spans: dict[tuple[str, str | None], dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    counts: dict[tuple[str, str | None], int] = defaultdict(int)
    bandwidths: dict[tuple[str, str | None], list[float]] = defaultdict(list)
    sizes: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    members: dict[tuple[str, str | None], int | None] = {}
    for one in matches:
        key = (one.kind, one.group)
        counts[key] += 1
        members[key] = one.size
        sizes[key].append(one.bytes)
        shortest = int((one.end - np.maximum(one.arrival, one.begin)).min())
        if one.bytes > 0 and shortest > 0:
            bandwidths[key].append(one.bytes * 1e9 / shortest)
        for place, begin, end in zip(one.place.tolist(), one.begin.tolist(), one.end.tolist(), strict=True):
            spans[key][place].append((begin, end))
    found = []
    for key, of_rank in spans.items():
        total = exposed = 0
        for place, rows in of_rank.items():
            both = np.array(rows, dtype=np.int64)
            whole = union(both[:, 0], both[:, 1])
            total += length(whole)
            exposed += length(intersect(whole, ranks[place].exposed))
        known = [size for size in sizes[key] if size > 0]
        moved = sum(known) if known else None
        width = float(np.median(bandwidths[key])) if bandwidths[key] else None
        found.append(
            CollectiveKind(key[0], key[1], members[key], counts[key], total, exposed, total - exposed, moved, width)
        )
    return sorted(found, key=lambda one: (-one.exposed, one.kind, one.group or ""))


def fsdp_layers(ranks: Sequence[RankSummary], waiting: Sequence[Ints] | None = None) -> list[FsdpLayer]:
    """Per unit in the order of their first gather.

    Args:
        ranks: to be added up.
        waiting: for each rank when it waited for others, to be left out: then what remains is the network's.
    """
    rows: dict[str, dict[bool, list[list[Ints]]]] = {}
    for place, one in enumerate(ranks):
        gathers = one.gathers
        waited = np.zeros(len(gathers), dtype=np.int64)
        if waiting is not None:
            waited = covered(waiting[place], gathers.begin, gathers.end)
        for number, unit in enumerate(gathers.units):
            for backward in (False, True):
                mine = (gathers.unit == number) & (gathers.backward == backward)
                took = gathers.end[mine] - gathers.begin[mine] - waited[mine]
                bare = np.maximum(gathers.exposed[mine] - waited[mine], 0)
                flags = gathers.early[mine], gathers.first[mine]
                columns = [took, bare, *(flag.astype(np.int64) for flag in flags)]
                rows.setdefault(unit, {}).setdefault(backward, []).append(columns)
    layers = []
    for unit, phases in rows.items():
        layer = FsdpLayer(unit, 0, 0, 0, 0)
        early = 0
        for backward, parts in phases.items():
            took, exposed, is_early, is_first = (np.concatenate(column) for column in zip(*parts, strict=True))
            if not len(took):
                continue
            phase = FsdpPhase(len(took), int(took.sum()), int(exposed.sum()), bool(is_first.mean() > 0.5))
            layer.phases["backward" if backward else "forward"] = phase
            early += int(is_early.sum())
        layer.count, layer.gather, layer.exposed = (
            sum(getattr(phase, name) for phase in layer.phases.values()) for name in ("count", "gather", "exposed")
        )
        layer.hidden = layer.gather - layer.exposed
        layer.early = early / layer.count if layer.count else None
        layers.append(layer)
    return layers


def top_kernels(ranks: Sequence[RankSummary]) -> list[Kernel]:
    """Those that took longest over all ranks, and the rank on which each is slowest."""
    calls: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    samples: dict[str, list[tuple[np.ndarray, float]]] = defaultdict(list)
    means: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for place, one in enumerate(ranks):
        table = one.table
        for name, count, took in zip(table.names, table.calls.tolist(), table.total.tolist(), strict=True):
            calls[name] += count
            total[name] += took
            kept = table.samples[name]
            samples[name].append((kept, count / max(len(kept), 1)))
            means[name].append((took / max(count, 1), place))
    everything = sum(one.table.all_total for one in ranks) or 1
    found = []
    for name in sorted(total, key=lambda one: -total[one])[:_KERNELS]:
        values = np.concatenate([kept for kept, _ in samples[name]])
        weights = np.concatenate([np.full(len(kept), weight) for kept, weight in samples[name]])
        kernel = Kernel(
            name, calls[name], total[name], total[name] / calls[name], _quantile(values, weights, 0.95), 0.0
        )
        kernel.share = total[name] / everything
        if len(means[name]) > 1:
            mean, place = max(means[name])
            others = float(np.median([value for value, other in means[name] if other != place]))
            if others > 0:
                kernel.slowest_rank, kernel.slowest_ratio = ranks[place].rank, mean / others
        found.append(kernel)
    return found


def _quantile(values: np.ndarray, weights: np.ndarray, share: float) -> int:
    order = np.argsort(values)
    reach = np.cumsum(weights[order])
    return int(values[order][min(int(np.searchsorted(reach, share * reach[-1])), len(values) - 1)])


def longest_gaps(ranks: Sequence[RankSummary]) -> list[Gap]:
    """The longest idle gaps of all ranks' GPUs."""
    found = []
    for one in ranks:
        if one.idle is None:
            continue
        for place, op in one.idle.longest:
            cause = max(one.idle.parts, key=lambda name: int(one.idle.parts[name][place]))  # type: ignore[union-attr]
            start, end = int(one.idle.start[place]), int(one.idle.end[place])
            inside = np.flatnonzero((one.windows[:, 0] <= start) & (start < one.windows[:, 1]))
            step = int(one.marks.numbers[inside[0]]) if len(inside) else None
            assert one.rank is not None
            found.append(Gap(one.rank, step, end - start, cause, op))
    return sorted(found, key=lambda gap: -gap.duration)[:_GAPS]
