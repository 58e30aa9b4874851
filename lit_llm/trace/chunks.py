"""Text of a trace to chunks of whole events, one chunk in memory at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from lit_llm.trace.salvage import EVENT, object_end

_ARRAY = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_CLOSE_AND_KEY = re.compile(
    rb'\}\s*\](?=\s*,\s*"(?:traceName|displayTimeUnit|baseTimeNanoseconds|distributedInfo)"\s*:)'
)
# Numbers and the like are no events, but no reason to stop either.
_BETWEEN = re.compile(rb"(?:[\s,]|null|true|false|[-+\d][\d.eE+-]*)*")
_SPACE = b" \t\r\n"
# What stands before the events is a few kB; a file without them in its first 64 MiB is something else.
_HEAD_LIMIT = 64 << 20
_LOOK_BACK = 8


class _Probe(msgspec.Struct, gc=False):
    """Any event: all have a phase and a time."""

    ph: str
    ts: msgspec.Raw


_probe = msgspec.json.Decoder(_Probe)


class Chunks:
    """Walks the array ``traceEvents`` of a trace, or a bare list of events.

    Attributes, known when the walk has ended:
        found: there was such an array.
        bare: the file is a bare list.
        closed: the array's end was seen.
        clean: not closed, but nothing stands behind the last event.
        head: what stands before the array's bracket; if none was found, the beginning of the file.
        tail: what stands behind the array.

    While it goes on, ``sure`` tells that the last chunk was not cut by a guess.
    """

    def __init__(self, blocks: Iterator[bytes], chunk_bytes: int) -> None:
        self.found = self.bare = self.closed = self.clean = False
        self.head = self.tail = b""
        self.sure = False
        self._blocks = blocks
        self._chunk_bytes = chunk_bytes
        self._buffer = b""
        self._ended = self._given_back = False

    def give_back(self, data: bytes) -> None:
        """Puts the end of the chunk just given in front of the rest: it was cut inside an event."""
        self._buffer = data + self._buffer
        self._given_back = True

    def __iter__(self) -> Iterator[bytes]:
        """Chunks of complete events with commas between them, without the list's brackets."""
        if not self._open():
            return
        wanted = self._chunk_bytes
        while True:
            self._fill(wanted)
            if self._ended:
                break
            end = _last_boundary(self._buffer)
            if end is None:
                wanted = 2 * len(self._buffer)
                continue
            yield self._take(end)
            wanted = self._chunk_bytes + (len(self._buffer) if self._given_back else 0)
        self._given_back = False
        while True:
            data = self._buffer
            end = self._last_events(data, 0 if self.sure else _last_boundary(data) or 0)
            if end:
                yield self._take(end)
            if not self._given_back:
                return
            self.sure = True

    def _take(self, end: int) -> bytes:
        chunk = self._buffer[:end].lstrip(_SPACE + b",")
        self._buffer = self._buffer[end:]
        self._given_back = False
        return chunk

    def _fill(self, size: int) -> None:
        parts, length = [self._buffer], len(self._buffer)
        while length < size and not self._ended:
            block = next(self._blocks, b"")
            self._ended = not block
            parts.append(block)
            length += len(block)
        self._buffer = b"".join(parts)

    def _open(self) -> bool:
        """Moves to behind the array's opening bracket."""
        seen = 0
        while not self._ended and seen < _HEAD_LIMIT:
            self._fill(len(self._buffer) + 1)
            start = self._buffer.lstrip(_SPACE)
            if start.startswith(b"["):
                self.found = self.bare = True
                self._buffer = start[1:]
                return True
            match = _ARRAY.search(self._buffer, max(0, seen - 64))
            if match:
                self.found = True
                self.head = self._buffer[: match.end() - 1]
                self._buffer = self._buffer[match.end() :]
                return True
            seen = len(self._buffer)
        self.head = self._buffer
        return False

    def _last_events(self, data: bytes, end: int) -> int:
        """Where the last complete event behind ``end`` ends; sets ``closed``, ``clean`` and ``tail``."""
        self.closed = self.clean = False
        self.tail = b""
        at = end
        while True:
            between = _BETWEEN.match(data, at)
            at = between.end() if between else at
            if data[at : at + 1] == b"]":
                self.closed, self.tail = True, data[at + 1 :]
                return end
            if at == len(data):
                self.clean = True
                return end
            stop, following = _next_event(data, at)
            if stop is not None:
                end = stop
            if following is None:
                return end
            at = following


def _next_event(data: bytes, at: int) -> tuple[int | None, int | None]:
    """Where the event at ``at`` ends, and where to look for the next; None if it is cut off, or nothing follows."""
    if data[at : at + 1] != b"{":
        stop = None
    else:
        stop = object_end(data, at)
        if stop is not None and _is_event(data, at, stop):
            return stop, stop
    # Cut off here; or ill-formed: then a brace that is missing may have swallowed what follows.
    limit = len(data) if stop is None else stop
    for match in EVENT.finditer(data, at, limit):
        other = object_end(data, match.end())
        if other is not None and _is_event(data, match.end(), other):
            return match.start() + 1, match.end()
    close = _CLOSE_AND_KEY.search(data, at, limit)
    if close:
        return close.start() + 1, close.start() + 1
    return stop, stop


def _is_event(data: bytes, start: int, end: int) -> bool:
    try:
        _probe.decode(memoryview(data)[start:end])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _last_boundary(data: bytes) -> int | None:
    """Where the last event ends that another one follows.

    ``},{`` may also stand inside an event, in a string or between the members of a nested list. So the event before the
    boundary must decode as a whole, and have a phase and a time.
    """
    between = _BETWEEN.match(data)
    first = between.end() if between else 0
    cuts: list[int] = []
    at = len(data)
    while at > first:
        at = max(data.rfind(b"{", first, at), first)
        end = None if at == first else _end_before(data, at)
        if end is None and at > first:
            continue
        for cut in cuts:
            if _is_event(data, at, cut):
                return cut
        if end is not None:
            cuts = [end, *cuts[: _LOOK_BACK - 1]]
    return None


def _end_before(data: bytes, start: int) -> int | None:
    """Where the object before the one at ``start`` ends, if a comma and white space only stand between them."""
    at = start - 1
    while at >= 0 and data[at] in _SPACE:
        at -= 1
    if at < 0 or data[at : at + 1] != b",":
        return None
    at -= 1
    while at >= 0 and data[at] in _SPACE:
        at -= 1
    return at + 1 if at >= 0 and data[at : at + 1] == b"}" else None
