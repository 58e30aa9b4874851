"""A trace file of the PyTorch profiler, of any of its writers, to columns."""

from __future__ import annotations

import gc
from pathlib import Path

from lit_llm.errors import UserError
from lit_llm.trace import facts
from lit_llm.trace.build import Builder
from lit_llm.trace.chunks import Chunks
from lit_llm.trace.columns import RankTrace
from lit_llm.trace.decode import Decoder, Event, ExactEvent
from lit_llm.trace.source import Source


def read(path: str | Path, *, chunk_bytes: int = 8 << 20) -> RankTrace:
    """Reads the trace of one rank.

    Takes JSON and gzip, the layouts of kineto of all years and of other tools (compact, or a bare list of events).
    Text that is cut, damaged or not quite JSON is read as far as it goes; ``problems`` then says what was lost.

    Args:
        path: the file.
        chunk_bytes: of text that are decoded at a time. Memory is a few times that, and about 60 bytes an event.

    Raises:
        UserError: the file can't be read, or holds no trace.
    """
    path = Path(path)
    collecting = gc.isenabled()
    gc.disable()  # events by the ten thousand, none of them in a cycle
    try:
        return _read(path, chunk_bytes)
    finally:
        if collecting:
            gc.enable()


def _read(path: Path, chunk_bytes: int) -> RankTrace:
    source = Source(path, chunk_bytes)
    chunks = Chunks(source.blocks(), chunk_bytes)
    builder = Builder()
    plain, exact = Decoder(Event), Decoder(ExactEvent)
    fine, dropped, mended = True, 0, 0
    for chunk in chunks:
        if fine:
            decoded = plain.decode(chunk, chunks.sure)
            fine = builder.add(decoded.events)
        if not fine:
            decoded = exact.decode(chunk, chunks.sure)  # type: ignore[assignment]
            builder.add_exact(decoded.events)  # type: ignore[arg-type]
        dropped += decoded.dropped
        mended += decoded.mended
        if decoded.rest:
            chunks.give_back(decoded.rest)
        decoded.events.clear()

    told = facts.parse(chunks.head, chunks.tail, listed=chunks.bare)
    events, wall = builder.finish(told.base)
    if len(events) == 0 and (chunks.bare or not (chunks.found or told.cut)):
        raise UserError(f"{path} is no trace of the PyTorch profiler (there are no events in it)")
    problems = list(source.problems)
    truncated = source.damaged or not (chunks.closed or (chunks.bare and chunks.clean))
    if truncated:
        problems.append(f"is cut short or damaged; {len(events):,} events were saved")
    elif len(events) == 0:
        problems.append("holds no events")
    if chunks.closed:
        problems += told.problems
    if mended:
        problems.append(f"is not quite JSON in {mended:,} places, such as NaN or a bad escape; they were mended")
    if dropped + builder.dropped:
        problems.append(f"has {dropped + builder.dropped:,} ill-formed events; they were left out")

    rank, rank_from = told.rank, "trace"
    if rank is None:
        rank = facts.rank_in_name(path)
        rank_from = "none" if rank is None else "file name"
    groups, descriptions = told.groups()
    return RankTrace(
        path=str(path),
        rank=rank,
        rank_from=rank_from,
        world_size=told.world_size,
        host=told.host,
        backend=facts.text(told.distributed.get("backend")),
        groups={**builder.group_members, **groups},
        group_descriptions=descriptions,
        meta=told.meta,
        clock="wall" if wall else "unknown",
        truncated=truncated,
        problems=problems,
        events=events,
        names=builder.names,
        threads=builder.threads,
        details=builder.details,
        thread_names=builder.thread_names,
    )
