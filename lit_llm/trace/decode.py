"""Chunks of events to typed objects, event by event where a chunk is ill-formed."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from math import nan
from typing import Generic, TypeVar

import msgspec
from msgspec import Raw, Struct, field

from lit_llm.trace.salvage import repair, resplit, split

Value = int | float | str | None
"""Of an argument that should be a number, but some writers make it text."""
NOTHING = Raw(b"")
ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Args(Struct, gc=False):
    """The arguments that are used; the decoder skips all others."""

    device: Value = None
    stream: Value = None
    correlation: Value = None
    bytes: Value = None
    name: Value = None
    collective: Value = field(name="Collective name", default=None)
    group: Value = field(name="Process Group Name", default=None)
    members: Value = field(name="Process Group Ranks", default=None)
    sequence: Value = field(name="Seq", default=None)
    in_elements: Value = field(name="In msg nelems", default=None)
    out_elements: Value = field(name="Out msg nelems", default=None)
    group_size: Value = field(name="Group size", default=None)
    dtype: Value = None
    shapes: Raw = field(name="Input Dims", default=NOTHING)
    types: Raw = field(name="Input type", default=NOTHING)


class Event(Struct, gc=False):
    """An event; times in microseconds."""

    ph: str
    cat: str = ""
    name: str = ""
    pid: int | float | str = ""
    tid: int | float | str = ""
    ts: int | float = nan
    dur: int | float = 0
    args: Args | None = None


class ExactEvent(Struct, gc=False):
    """The same with times as they are written: a float64 of microseconds since 1970 keeps a quarter of one only."""

    ph: str
    cat: str = ""
    name: str = ""
    pid: int | float | str = ""
    tid: int | float | str = ""
    ts: Decimal = Decimal("nan")
    dur: Decimal = Decimal(0)
    args: Args | None = None


_raw = msgspec.json.Decoder(list[Raw])
E = TypeVar("E", Event, ExactEvent)


@dataclass
class Decoded(Generic[E]):
    """Events of a chunk."""

    events: list[E]
    dropped: int = 0
    mended: int = 0
    rest: bytes = b""
    """The beginning of an event that the chunk has cut."""


class Decoder(Generic[E]):
    """Decodes chunks to events of one type."""

    def __init__(self, kind: type[E]) -> None:
        self._list: msgspec.json.Decoder[list[E]] = msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]
        self._one: msgspec.json.Decoder[E] = msgspec.json.Decoder(kind)

    def decode(self, chunk: bytes, sure: bool = True) -> Decoded[E]:
        """Events of ``chunk``, that is, of objects with commas between them; not ``sure``: it may be cut inside one."""
        try:
            return Decoded(self._list.decode(b"[" + chunk + b"]"))
        except ERRORS:
            pass
        text, mended = repair(chunk)
        try:
            return Decoded(self._list.decode(b"[" + text + b"]"), mended=max(1, mended))
        except ERRORS:
            pass
        rest = b""
        try:
            pieces = [bytes(raw) for raw in _raw.decode(b"[" + text + b"]")]  # JSON it is, but not all are events
        except ERRORS:
            pieces, rest = split(text, sure)
        found = Decoded[E]([], mended=mended, rest=rest)
        for piece in pieces:
            if not self._take(piece, found):
                parts = resplit(piece)
                if len(parts) == 1:
                    found.dropped += 1
                    continue
                found.dropped += sum(not self._take(part, found) for part in parts)
        return found

    def _take(self, piece: bytes, found: Decoded[E]) -> bool:
        try:
            found.events.append(self._one.decode(piece))
        except ERRORS:
            return False
        return True
