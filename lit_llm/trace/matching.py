"""Which collective of one rank is which of another: matches across ranks, and the clocks that follow from them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_llm.trace.columns import Ints
from lit_llm.trace.per_rank import RankSummary

# All ranks leave these together; of the others one may go before the rest.
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "barrier")


@dataclass
class Match:
    """One collective as several ranks saw it; columns (ranks,) on their own clocks."""

    kind: str
    group: str | None
    """The group's name, or its members where names differ between ranks."""
    size: int | None
    """Ranks of the group; None: not told."""
    step: int
    place: Ints
    """Places of the ranks in the list of summaries."""
    arrival: Ints
    begin: Ints
    end: Ints
    bytes: int


@dataclass
class Clock:
    """How far a rank's clock is ahead of the first rank's, ns."""

    offset: int | None
    error: int | None
    applied: bool


def match(ranks: Sequence[RankSummary], whole: bool = True) -> tuple[list[Match], list[str]]:
    """Joins the collectives of ranks that see the same ones.

    By the group's sequence number where the trace has it; else the k-th of its kind and size in a step, among ranks
    that have equally many there. What differs in size is no match.

    Args:
        ranks: of one run.
        whole: whether these are all its ranks, so that groups that no trace names are whole as well.

    Returns:
        All collectives, those seen by one rank alone among them, in order of time; and lines on what did not fit.
    """
    matches, odd = [], 0
    for (label, size, kind, *_), places in _keyed(ranks, whole).items():
        sizes = {int(ranks[place].collectives.bytes[row]) for place, row in places}
        if len(sizes) > 1 and kind in _TOGETHER:
            odd += 1
            continue
        columns = np.array(
            [
                (place, one.arrival[row], one.begin[row], one.end[row])
                for place, row in places
                for one in (ranks[place].collectives,)
            ],
            dtype=np.int64,
        ).T
        place, row = places[0]
        step = int(ranks[place].collectives.step[row])
        matches.append(Match(kind, label, size, step, columns[0], columns[1], columns[2], columns[3], max(sizes)))
    matches.sort(key=lambda one: int(one.begin[0]))
    notes = [f"{odd} collectives differ in size between ranks and are not compared"] if odd else []
    return matches, notes


def _keyed(ranks: Sequence[RankSummary], whole: bool) -> dict[tuple[Any, ...], list[tuple[int, int]]]:
    """(place of the rank, row) of all that belong together, by (group, its size, kind, ...)."""
    found: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
    # Rows without a number of their own, by what must be equal, and rank.
    counted: dict[tuple[Any, ...], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, one in enumerate(ranks):
        columns, labels = one.collectives, []
        for kind, group in columns.keys:
            members = one.groups.get(group) if group is not None else None
            label = _members(members) if members else group
            labels.append((label, len(members) if members else None, kind, group is not None))
        values = (getattr(columns, name).tolist() for name in ("key", "sequence", "step", "bytes"))
        table = list(zip(*values, strict=True))
        known = Counter((key, sequence) for key, sequence, _, _ in table if sequence >= 0)
        useless = {key for (key, _), count in known.items() if count > 1}  # a backend that does not count
        for row, (key, sequence, step, size) in enumerate(table):
            label, number, kind, named = labels[key]
            if sequence >= 0 and key not in useless:
                found[(label, number, kind, "sequence", sequence)].append((place, row))
            elif step < 0 and len(one.marks):  # between steps the k-th of one rank need not be another's
                found[(label, number, kind, "alone", place, row)].append((place, row))
            else:
                counted[(label, number, kind, named, step, size)][place].append(row)
    unnamed: dict[tuple[Any, ...], dict[int, list[tuple[int, int]]]] = defaultdict(dict)
    for (label, number, kind, named, step, size), rows in counted.items():
        usual = Counter(map(len, rows.values())).most_common(1)[0][0]
        for place in [place for place, mine in rows.items() if len(mine) != usual]:
            for row in rows.pop(place):  # of a step that is cut off somewhere
                found[(label, number, kind, "alone", place, row)].append((place, row))
        for k in range(usual):
            places = [(place, mine[k]) for place, mine in rows.items()]
            if named:
                found[(label, number, kind, "k", step, size, k)] = places
            else:
                unnamed[(kind, size, k)][step] = places
    found.update(_by_inferred_groups(ranks, unnamed, whole))
    return found


def _members(members: Sequence[int]) -> str:
    """A group by its ranks, such as ``0-7`` or ``0, 2``."""
    if len(members) > 2 and list(members) == list(range(members[0], members[-1] + 1)):
        return f"ranks {members[0]}-{members[-1]}"
    shown = ", ".join(map(str, members[:6])) + (", ..." if len(members) > 6 else "")
    return f"ranks {shown}"


def _by_inferred_groups(
    ranks: Sequence[RankSummary], unnamed: dict[tuple[Any, ...], dict[int, list[tuple[int, int]]]], whole: bool
) -> dict[tuple[Any, ...], list[tuple[int, int]]]:
    """Matches where a trace does not name groups, as on CPUs.

    Of the ways to split the ranks that the process groups allow, the one with the largest groups whose members leave
    together. The same place in a step is taken to be the same collective in every step.
    """
    found: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    partitions = _partitions(ranks)
    for (kind, size, k), of_step in unnamed.items():
        groups = _best(ranks, partitions, of_step)
        for step, places in of_step.items():
            for members in groups:
                inside = [(place, row) for place, row in places if place in members]
                if inside:
                    ids = [one if (one := ranks[place].rank) is not None else place for place in sorted(members)]
                    label = _members(ids) if len(groups) > 1 else None
                    found[(label, len(members) if whole else None, kind, "k", step, size, k)] = inside
    return found


def _partitions(ranks: Sequence[RankSummary]) -> list[list[frozenset[int]]]:
    """Ways to split the ranks into groups, by the process groups that they know; all together first."""
    everybody = frozenset(range(len(ranks)))
    place_of = {one.rank: place for place, one in enumerate(ranks)}
    known: dict[str, set[frozenset[int]]] = defaultdict(set)
    for one in ranks:
        for name, members in one.groups.items():
            inside = frozenset(place_of[member] for member in members if member in place_of)
            if len(inside) > 1:
                known[one.group_descriptions.get(name) or name].add(inside)
    ways = [[everybody]]
    for groups in known.values():
        if sum(map(len, groups)) == len(everybody) and frozenset().union(*groups) == everybody and len(groups) > 1:
            ways.append(sorted(groups, key=min))
    return ways


def _best(ranks: Sequence[RankSummary], ways: list[list[frozenset[int]]], numbered: Any) -> list[frozenset[int]]:
    if len(ways) == 1:
        return ways[0]
    spreads = []
    for groups in ways:
        apart = []
        for places in numbered.values():
            for members in groups:
                ends = [int(ranks[place].collectives.end[row]) for place, row in places if place in members]
                if len(ends) > 1:
                    apart.append(max(ends) - min(ends))
        spreads.append(float(np.median(apart)) if apart else np.inf)
    good = [place for place, spread in enumerate(spreads) if spread <= 3 * min(spreads) + 200_000]
    return ways[min(good, key=lambda place: len(ways[place]))]


def clocks(ranks: Sequence[RankSummary], matches: Sequence[Match]) -> list[Clock]:
    """The offset of each rank's clock, as the median over collectives that all leave together.

    Groups are chained over ranks that they share. The first collective of each rank is left out: the profiler opens at
    a time of its own on each.
    """
    usable = [one for one in matches if one.kind in _TOGETHER and len(one.place) > 1]
    first = {place: row for row, one in reversed(list(enumerate(usable))) for place in one.place.tolist()}
    kept = [one for row, one in enumerate(usable) if row not in set(first.values())]
    usable = kept if len(kept) >= 3 else usable
    of_rank: dict[int, list[int]] = defaultdict(list)
    for row, one in enumerate(usable):
        for place in one.place.tolist():
            of_rank[place].append(row)
    result: list[Clock | None] = [None] * len(ranks)
    for root in range(len(ranks)):
        if result[root] is not None:
            continue
        alone = root not in of_rank
        result[root] = Clock(None, None, False) if alone else Clock(0, 0, False)
        waiting = [] if alone else [root]
        while waiting:
            known = waiting.pop(0)
            offsets: dict[int, list[int]] = defaultdict(list)
            for row in of_rank[known]:
                one = usable[row]
                reference = int(one.end[np.flatnonzero(one.place == known)[0]])
                for place, end in zip(one.place.tolist(), one.end.tolist(), strict=True):
                    if result[place] is None:
                        offsets[place].append(end - reference)
            base = result[known]
            assert base is not None
            assert base.offset is not None
            for place, values in sorted(offsets.items()):
                result[place] = _clock(ranks[place], ranks[root], values, base)
                waiting.append(place)
    return [one or Clock(None, None, False) for one in result]


def _clock(one: RankSummary, root: RankSummary, values: list[int], base: Clock) -> Clock:
    low, middle, high = np.percentile(values, [16, 50, 84])
    offset, error = round(middle) + (base.offset or 0), int((high - low) / 2) + (base.error or 0)
    # On one host clocks are one, and the ends of gloo's threads differ by milliseconds on a busy machine.
    least = 20_000 if one.device == "gpu" else 5_000_000
    applied = one.clock != root.clock or one.clock == "unknown" or abs(offset) > max(3 * error, least)
    return Clock(offset, error, applied)
