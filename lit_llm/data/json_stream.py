"""Records of a .json file of any size, one after another: the file is never in memory as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from lit_llm.data.records import holds_records, is_record, is_record_key
from lit_llm.errors import UserError

OBJECT_CHARACTERS = 1 << 20  # an object that is longer is not taken into memory before it is known to be a record
_WHITE = re.compile(r"[ \t\n\r]*")
_BORDER = 16  # a literal, number or escape that the end of the buffer cuts is an error so near to it


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """A record, the line it starts in, and whether a string in it may hold half a surrogate pair."""

    record: dict[str, Any]
    line: int
    half_characters: bool


def json_records(pieces: Iterator[str], name: str, text_key: str) -> Iterator[JsonRecord]:
    """The records of a JSON text that comes in ``pieces``: a list of objects, one object, several objects one after
    another (JSON lines), or an object that is no record itself but has one list of records, such as
    ``{"data": [...]}``.

    Memory holds the longest record (an object around a list: up to some million characters of it).

    Raises:
        UserError: what is not JSON or no object, with ``name`` and the line.
    """
    buffer = _Buffer(pieces, name)
    first = buffer.peek()
    if first == "[":
        yield from _elements(buffer)
    elif first == "{":
        wrapped = yield from _first_object(buffer, text_key)
        if not wrapped:
            while buffer.peek():
                yield _record(buffer)
    elif first:
        _record(buffer)  # says what is wrong with it
    if buffer.peek():
        raise buffer.error("there is more after the end of the list; a file holds one list, or objects only")


def _elements(buffer: _Buffer) -> Iterator[JsonRecord]:
    """The records of the list that the buffer stands at."""
    buffer.expect("[")
    if buffer.peek() == "]":
        buffer.expect("]")
        return
    while True:
        yield _record(buffer)
        if buffer.expect(",]") == "]":
            return


def _record(buffer: _Buffer) -> JsonRecord:
    char = buffer.peek()
    line = buffer.line
    if char != "{":
        buffer.value()  # which raises for what is not JSON at all
        raise UserError(f"{buffer.name}:{line}: a record must be a JSON object, not {buffer.last():.40}")
    record = buffer.value()
    return JsonRecord(record, line, buffer.half_characters)


def _first_object(buffer: _Buffer, text_key: str) -> Generator[JsonRecord, None, bool]:
    """The record that the buffer stands at, or those of the list in it; whether it was such a list."""
    line = buffer.line
    whole = buffer.value(limit=OBJECT_CHARACTERS)
    wanted: str | None = None
    if whole is not None:
        lists = [key for key, value in whole.items() if holds_records(value)]
        if is_record(whole, text_key) or len(lists) != 1:
            yield JsonRecord(whole, line, buffer.half_characters)
            return False
        wanted = lists[0]
        buffer.back()
    # An object too long to be looked at first: its list of records is the first value that can be one.
    record: dict[str, Any] = {}
    wrapped = half_characters = False
    separator = buffer.expect("{")
    while separator != "}":
        if buffer.peek() != '"':
            raise buffer.error("a key in double quotes is missing")
        key = buffer.value()
        buffer.expect(":")
        found = key == wanted if wanted is not None else not wrapped and not is_record_key(key, text_key)
        if found and buffer.peek() == "[" and (wanted is not None or buffer.opens_records()):
            yield from _elements(buffer)
            wrapped, record = True, {}
        else:
            value = buffer.value()
            half_characters |= buffer.half_characters
            if not wrapped:
                record[key] = value
        separator = buffer.expect(",}")
    if not wrapped:
        yield JsonRecord(record, line, half_characters)
    return wrapped


class _Buffer:
    """The text from where parsing stands, as far as it has been read. ``line`` is the line it stands in."""

    def __init__(self, pieces: Iterator[str], name: str) -> None:
        self.name = name
        self.line = 1
        self.half_characters = False  # of the value read last
        self._pieces = pieces
        self._text = ""
        self._position = 0
        self._before = (0, 1)  # position and line before the value read last
        self._decoder = json.JSONDecoder()

    def peek(self) -> str:
        """The next character that is not white; "" at the end."""
        while True:
            self._go(_WHITE.match(self._text, self._position).end())  # type: ignore[union-attr]  # it always matches
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._more():
                return ""

    def opens_records(self) -> bool:
        """Whether a list whose first element is an object comes next."""
        while True:
            end = _WHITE.match(self._text, self._position + 1).end()  # type: ignore[union-attr]
            if end < len(self._text):
                return self._text[end] == "{"
            if not self._more():
                return False

    def expect(self, characters: str) -> str:
        """Step over the next character, which must be one of ``characters``."""
        char = self.peek()
        if not char or char not in characters:
            raise self.error(f"{' or '.join(map(repr, characters))} is missing")
        self._go(self._position + 1)
        return char

    def value(self, limit: int | None = None) -> Any:
        """The value that comes next; None if it has more than about ``limit`` characters."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                near_end = error.pos >= len(self._text) - _BORDER
                if near_end or error.msg.startswith("Unterminated string"):
                    if limit is not None and len(self._text) - self._position > limit:
                        return None
                    if self._more():
                        continue
                raise self.error(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                raise self.error(str(error)) from error
            if end >= len(self._text) - 2 and self._more():
                continue  # a number may go on, even after "1." or "1e+"
            break
        # only an escape can make half a character
        self.half_characters = any(self._text.find(e, self._position, end) >= 0 for e in ("\\ud", "\\uD"))
        self._before = (self._position, self.line)
        self._go(end)
        return value

    def last(self) -> str:
        """The value read last, as it was written, in one line."""
        return " ".join(self._text[self._before[0] : self._position].split())

    def back(self) -> None:
        """Stand before the value read last again."""
        self._position, self.line = self._before

    def error(self, what: str, position: int | None = None) -> UserError:
        line = self.line
        if position is not None:
            line += self._text.count("\n", self._position, position)
        return UserError(f"{self.name}:{line}: not JSON: {what}")

    def _go(self, position: int) -> None:
        self.line += self._text.count("\n", self._position, position)
        self._position = position

    def _more(self) -> bool:
        """Read on, as much again as there is, so that a long value is not tried too often; False at the end."""
        rest = self._text[self._position :]
        pieces = []
        length = 0
        for piece in self._pieces:
            pieces.append(piece)
            length += len(piece)
            if length > len(rest):
                break
        if length:  # else positions in the text stay as they are
            self._text, self._position = rest + "".join(pieces), 0
        return length > 0
