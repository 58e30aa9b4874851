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


def match(ranks: Sequence[RankSummary]) -> tuple[list[Match], list[str]]:
    """Joins the collectives of ranks that see the same ones.

    By the group's sequence number where the trace has it; else the k-th of its kind and size in a step, if all ranks of
    the group have as many there. What differs in size is no match.

    Returns:
        All collectives, those seen by one rank alone among them, in order of time; and lines on what did not fit.
    """
    found: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for key, places in _keyed(ranks).items():
        found[key] = places
    matches, odd = [], 0
    for key, places in found.items():
        label, size = key[0], key[1]
        columns = [[], [], [], []]  # type: list[list[int]]
        sizes = set()
        for place, row in places:
            one = ranks[place].collectives
            for column, value in zip(columns, (place, one.arrival[row], one.begin[row], one.end[row]), strict=True):
                column.append(int(value))
            sizes.add(int(one.bytes[row]))
        if len(sizes) > 1 and key[2] in _TOGETHER:
            odd += 1
            continue
        first = ranks[places[0][0]].collectives
        row = places[0][1]
        arrays = [np.array(column, dtype=np.int64) for column in columns]
        matches.append(Match(key[2], label, size, int(first.step[row]), *arrays, max(sizes)))
    matches.sort(key=lambda one: int(one.begin[0]))
    notes = [f"{odd} collectives differ in size between ranks and are not compared"] if odd else []
    return matches, notes


def _keyed(ranks: Sequence[RankSummary]) -> dict[Any, list[tuple[int, int]]]:
    """(place of the rank, row) of all that belong together, by group, kind and number."""
    unnamed: dict[int, list[tuple[int, Any]]] = {}
    found: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for place, one in enumerate(ranks):
        columns, seen = one.collectives, Counter()  # type: Any, Counter[Any]
        labels = []
        for kind, group in columns.keys:
            members = one.groups.get(group) if group is not None else None
            labels.append((kind, group, _members(members) if members else group, len(members) if members else None))
        rows = zip(
            columns.key.tolist(), columns.sequence.tolist(), columns.step.tolist(), columns.bytes.tolist(), strict=True
        )
        for row, (key, sequence, step, size) in enumerate(rows):
            kind, group, label, number = labels[key]
            if sequence >= 0:
                found[(label, number, kind, "seq", sequence)].append((place, row))
                continue
            number_in_step = (kind, label, step, size)
            seen[number_in_step] += 1
            if group is None:
                unnamed.setdefault(place, []).append((row, (kind, step, size, seen[number_in_step])))
            else:
                found[(label, number, kind, "k", step, size, seen[number_in_step])].append((place, row))
    found.update(_by_inferred_groups(ranks, unnamed))
    return {key: places for key, places in found.items() if key[3] == "seq" or _complete(ranks, found, key, places)}


def _complete(ranks: Sequence[RankSummary], found: Any, key: Any, places: Any) -> bool:
    """Whether a collective that is known by its number in a step may be compared: not that of a step cut off somewhere."""
    if len(places) < 2 or key[4] != -1:
        return True
    # Outside of steps the k-th of one rank need not be the k-th of another: each stands alone.
    return all(not ranks[place].truncated for place, _ in places)


def _members(members: Sequence[int]) -> str:
    """A group by its ranks, such as ``0-7`` or ``0, 2``."""
    if len(members) > 2 and list(members) == list(range(members[0], members[-1] + 1)):
        return f"ranks {members[0]}-{members[-1]}"
    shown = ", ".join(map(str, members[:6])) + (", ..." if len(members) > 6 else "")
    return f"ranks {shown}"


def _by_inferred_groups(ranks: Sequence[RankSummary], unnamed: dict[int, list[tuple[int, Any]]]) -> dict[Any, Any]:
    """Matches where a trace does not name groups, as on CPUs: of the ways to split the ranks that the process groups allow,
    the one with the largest groups whose members leave together."""
    by_key: dict[Any, dict[Any, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for place, rows in unnamed.items():
        for row, (kind, step, size, number) in rows:
            # The same place in a step is the same collective in each; without shapes it is all that tells two groups apart.
            by_key[(kind, size, number)][step].append((place, row))
    found: dict[Any, list[tuple[int, int]]] = {}
    partitions = _partitions(ranks)
    for (kind, size, number), of_step in by_key.items():
        groups = _best(ranks, partitions, of_step)
        for step, places in of_step.items():
            for members in groups:
                inside = [(place, row) for place, row in places if place in members]
                if inside:
                    ids = [one if (one := ranks[place].rank) is not None else place for place in sorted(members)]
                    label = _members(ids) if len(groups) > 1 else None
                    found[(label, len(members), kind, "k", step, size, number)] = inside
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
    offset, error = int(round(middle)) + (base.offset or 0), int((high - low) / 2) + (base.error or 0)
    # On one host clocks are one, and the ends of gloo's threads differ by milliseconds on a busy machine.
    least = 20_000 if one.device == "gpu" else 5_000_000
    applied = one.clock != root.clock or one.clock == "unknown" or abs(offset) > max(3 * error, least)
    return Clock(offset, error, applied)
