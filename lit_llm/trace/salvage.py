"""What can be had of text that is not quite JSON."""

from __future__ import annotations

import re

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}"]', re.DOTALL)  # a quotation mark alone: of a string without an end
_NUMBER = re.compile(rb'((?<!\\)"\s*:\s*)[-+]?(?:nan|inf(?:inity)?)\b', re.IGNORECASE)
_ESCAPE = re.compile(rb'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')
_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_LONGEST = 1 << 20
_CONTROL = bytes(32 if byte < 32 else byte for byte in range(256))
EVENT = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts)"\s*:)')


def repair(data: bytes) -> tuple[bytes, int]:
    """Makes JSON of what writers of traces get wrong, and leaves JSON as it is.

    NaN and infinities become null, unknown escapes a backslash, invalid UTF-8 the replacement character, control
    characters inside strings a blank.

    Returns:
        The text, and how many places were mended.
    """
    data, count = _NUMBER.subn(rb"\1null", data)
    try:
        data.decode()
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        count += text.count("\ufffd") - data.count("\ufffd".encode())
        data = text.encode()

    def escape(match: re.Match[bytes]) -> bytes:
        nonlocal count
        if match[1]:
            return match[0]
        count += 1
        return rb"\\"

    def half(match: re.Match[bytes]) -> bytes:
        nonlocal count
        if len(match[0]) == 12:
            return match[0]
        count += 1
        return rb"\ufffd"

    if b"\\" in data:
        data = _SURROGATE.sub(half, _ESCAPE.sub(escape, data))
    return data.translate(_CONTROL), count


def object_end(data: bytes, start: int) -> int | None:
    """Where the object ends whose ``{`` stands at ``start``; None if it does not end."""
    depth = 0
    for match in _TOKEN.finditer(data, start):
        token = match[0]
        if token == b"{":
            depth += 1
        elif token == b"}":
            depth -= 1
            if depth == 0:
                return match.end()
        elif token == b'"':
            break
    return None


def split(data: bytes, sure: bool) -> tuple[list[bytes], bytes]:
    """Objects of a list whose text does not decode as a whole.

    Args:
        data: objects with commas between them.
        sure: that ``data`` is not cut inside an object.

    Returns:
        The objects, and the beginning of one that does not end here (empty if there is none).
    """
    objects: list[bytes] = []
    depth = begin = 0
    for match in _TOKEN.finditer(data):
        token = match[0]
        if token == b"{":
            if depth == 0:
                begin = match.start()
            depth += 1
        elif token == b"}" and depth:
            depth -= 1
            if depth == 0:
                objects.append(data[begin : match.end()])
        elif token == b'"':
            sure = True  # strings and the text between them have changed places
            break
    if depth == 0:
        return objects, b""
    rest = data[begin:]
    if sure or len(rest) > _LONGEST:
        return objects + resplit(rest), b""
    return objects, rest


def resplit(data: bytes) -> list[bytes]:
    """Cuts where events seem to begin, of text whose quotation marks can't be trusted."""
    at, pieces = 0, []
    for match in EVENT.finditer(data):
        pieces.append(data[at : match.start() + 1])
        at = match.end()
    return [*pieces, data[at:]]
