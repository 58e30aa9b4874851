"""Whether files belong together: one run, one window, every rank once."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lit_llm.trace.columns import RankTrace

_STEP = re.compile(r"ProfilerStep#(\d+)")
_FAR = 60 * 10**9
"""ns; ranks of one window are not this far apart, clocks of one cluster neither."""


@dataclass(frozen=True)
class FileFacts:
    """What must be known of a file to tell whether it belongs to a set."""

    path: str
    rank: int | None
    world_size: int | None = None
    run: str | None = None
    """``lit_llm.run`` of the trace, equal on all ranks of a run."""
    first: int | None = None
    """ns since 1970 of its first event; None where its clock is unknown."""
    last: int | None = None
    """The same of its last event's end."""
    steps: frozenset[int] = frozenset()
    """Numbers of its step marks."""

    @classmethod
    def of(cls, trace: RankTrace) -> FileFacts:
        """Of a trace that was read."""
        events = trace.events
        timed = trace.clock == "wall" and len(events) > 0
        return cls(
            path=trace.path,
            rank=trace.rank,
            world_size=trace.world_size,
            run=str(trace.meta["run"]) if trace.meta.get("run") else None,
            first=int(events.start[0]) if timed else None,
            last=int(events.end.max()) if timed else None,
            steps=frozenset(int(match[1]) for name in trace.names if (match := _STEP.fullmatch(name))),
        )


@dataclass
class FileSet:
    """The files that belong together."""

    kept: list[int]
    """Indices of the files, by rank."""
    ranks: list[int]
    """Of these files."""
    world_size: int | None = None
    missing: list[int] = field(default_factory=list)
    """Ranks below ``world_size`` without a file."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user."""


def check_set(files: Sequence[FileFacts]) -> FileSet:
    """Keeps the largest set of files that are of one run and window, and numbers those that tell no rank.

    Files of another run (``run``, ``world_size``, or a rank twice at times far apart) and a rank's second file are left
    out. Of equally large sets the latest counts. What was done, and what is missing, stands in the notes.
    """
    everything = list(range(len(files)))
    notes: list[str] = []
    kept = _largest(files, everything, [files[index].run for index in everything], "run", notes)
    kept = _largest(files, kept, [files[index].world_size for index in kept], "world size", notes)
    kept = _one_time(files, kept, notes)
    kept = _once(files, kept, notes)
    ranks = _numbered(files, kept, notes)
    kept.sort(key=lambda index: ranks[index])
    result = FileSet(kept, [ranks[index] for index in kept], notes=notes)
    sizes = {files[index].world_size for index in kept} - {None}
    result.world_size = max((size for size in sizes if size is not None), default=None)
    if result.world_size is not None:
        result.missing = sorted(set(range(result.world_size)) - set(result.ranks))
        beyond = [rank for rank in result.ranks if rank >= (result.world_size or 0)]
        if beyond:
            notes.append(f"the files tell a world size of {result.world_size}, but also {named(beyond)}")
        if result.missing:
            notes.append(f"{named(result.missing)} of {result.world_size} {_are(result.missing)} missing")
    notes += _about_steps(files, result) + _about_times(files, result)
    return result


def _largest(
    files: Sequence[FileFacts], kept: list[int], keys: Sequence[str | int | None], what: str, notes: list[str]
) -> list[int]:
    """Keeps the files with the key that most ranks have, and those that tell none."""
    sets: dict[str | int, list[int]] = defaultdict(list)
    for index, key in zip(kept, keys, strict=True):
        if key is not None:
            sets[key].append(index)
    if len(sets) < 2:
        return kept
    best = _best(files, list(sets.values()))
    out = [index for indices in sets.values() if indices is not best for index in indices]
    how = f"{len(sets)} {what}s are mixed"
    if what == "world size":
        how = f"world sizes {', '.join(map(str, sorted(sets)))} are mixed, so these are different runs"
    notes.append(f"{how}; the one with the most ranks, or else the latest, is kept; left out: {_listed(files, out)}")
    return [index for index in kept if index not in set(out)]


def _best(files: Sequence[FileFacts], sets: list[list[int]]) -> list[int]:
    """The set with the most ranks; of equals the latest, then the first."""

    def size(indices: list[int]) -> tuple[int, int]:
        told = {files[index].rank for index in indices} - {None}
        unknown = sum(files[index].rank is None for index in indices)
        return len(told) + unknown, max(files[index].first or 0 for index in indices)

    return max(sets, key=size)


def _one_time(files: Sequence[FileFacts], kept: list[int], notes: list[str]) -> list[int]:
    """Where a rank comes twice, at times far apart, keeps the files of one time."""
    counts = Counter(files[index].rank for index in kept if files[index].rank is not None)
    timed = [(first, index) for index in kept if (first := files[index].first) is not None]
    if max(counts.values(), default=0) < 2 or not timed:
        return kept
    timed.sort()
    clusters: list[list[int]] = []
    until = 0
    for first, index in timed:
        if not clusters or first - until > _FAR:
            clusters.append([])
        clusters[-1].append(index)
        until = max(until, files[index].last or first)
    if len(clusters) < 2:
        return kept
    best = _best(files, clusters)
    ranks = {files[index].rank for index in best}
    # A cluster without any of these ranks may be of the same run, with a wrong clock.
    others = [cluster for cluster in clusters if ranks & {files[index].rank for index in cluster} - {None}]
    out = [index for cluster in others if cluster is not best for index in cluster]
    if not out:
        return kept
    notes.append(
        f"traces of {len(others)} different times are mixed; the time with the most ranks is kept, left out: "
        f"{_listed(files, out)}"
    )
    return [index for index in kept if index not in set(out)]


def _once(files: Sequence[FileFacts], kept: list[int], notes: list[str]) -> list[int]:
    """Keeps one file a rank: the one with the most steps, then the first."""
    by_rank: dict[int, list[int]] = defaultdict(list)
    for index in kept:
        rank = files[index].rank
        if rank is not None:
            by_rank[rank].append(index)
    out: set[int] = set()
    for rank, indices in sorted(by_rank.items()):
        if len(indices) > 1:
            best = max(indices, key=lambda index: len(files[index].steps))
            left = [index for index in indices if index != best]
            out.update(left)
            notes.append(
                f"rank {rank} has {len(indices)} files; {files[best].path} is read, not {_listed(files, left)}"
            )
    return [index for index in kept if index not in out]


def _numbered(files: Sequence[FileFacts], kept: list[int], notes: list[str]) -> dict[int, int]:
    """The rank of each file; one that tells none gets the first free number, in the order of names."""
    ranks = {index: rank for index in kept if (rank := files[index].rank) is not None}
    unknown = sorted(
        (index for index in kept if index not in ranks), key=lambda index: natural(Path(files[index].path))
    )
    free = iter(number for number in range(len(ranks) + len(kept) + 1) if number not in set(ranks.values()))
    for index in unknown:
        ranks[index] = next(free)
    if unknown:
        numbers = named([ranks[index] for index in unknown])
        notes.append(f"no rank is told by {_listed(files, unknown)}; read as {numbers}, in the order of their names")
    return ranks


def _about_steps(files: Sequence[FileFacts], kept: FileSet) -> list[str]:
    """Which ranks recorded which steps, if they differ."""
    by_steps: dict[frozenset[int], list[int]] = defaultdict(list)
    for index, rank in zip(kept.kept, kept.ranks, strict=True):
        by_steps[files[index].steps].append(rank)
    if len(by_steps) < 2:
        return []
    groups = sorted(by_steps.items(), key=lambda item: (-len(item[1]), item[1]))
    told = [f"{ranges(steps) if steps else 'none'} on {named(ranks)}" for steps, ranks in groups[:4]]
    more = ", ..." if len(groups) > 4 else ""
    line = f"the ranks recorded different steps: {'; '.join(told)}{more}"
    common = frozenset.intersection(*by_steps)
    return [line if common else f"{line}; none is common to all"]


def _about_times(files: Sequence[FileFacts], kept: FileSet) -> list[str]:
    """Ranks whose times are far from the others': they may be of another run, or have a wrong clock."""
    times = sorted(first for index in kept.kept if (first := files[index].first) is not None)
    if len(times) < 2:
        return []
    middle = times[(len(times) - 1) // 2]
    length = max((files[index].last or 0) - (files[index].first or 0) for index in kept.kept)
    far = [
        rank
        for index, rank in zip(kept.kept, kept.ranks, strict=True)
        if (first := files[index].first) is not None and abs(first - middle) > _FAR + length
    ]
    if not far:
        return []
    return [f"{named(far)} recorded more than a minute away from the others: of another run, or with a wrong clock"]


def named(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 5``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: ``3, 5-9``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _are(things: Sequence[int]) -> str:
    return "are" if len(things) > 1 else "is"


def _listed(files: Sequence[FileFacts], indices: Sequence[int]) -> str:
    names = [files[index].path for index in indices]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def natural(path: Path) -> list[tuple[int, str]]:
    """A key that sorts numbers in names as numbers."""
    parts = re.findall(r"\d+|\D+", str(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
