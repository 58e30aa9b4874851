"""What a trace says about itself: everything around its events."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_KEYS = (
    "distributedInfo",
    "baseTimeNanoseconds",
    "host_name",
    "lit_llm",
    "schemaVersion",
    "deviceProperties",
    "trace_id",
    "traceName",
)
_decoder = json.JSONDecoder(strict=False)
_NEXT = re.compile(r"\s*[,}]")
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)|(?:^|[-_.])r[-_]?(\d+)(?=[-_.]|$)", re.IGNORECASE)


@dataclass
class Facts:
    """Of a file; None is what it does not tell."""

    known: dict[str, Any] = field(default_factory=dict)
    """The keys of the file that were understood, by name."""
    problems: list[str] = field(default_factory=list)
    cut: bool = False
    """The text is no whole JSON object, but keys of a trace are in it."""

    @property
    def distributed(self) -> dict[str, Any]:
        return _table(self.known.get("distributedInfo"))

    @property
    def meta(self) -> dict[str, Any]:
        return _table(self.known.get("lit_llm"))

    @property
    def rank(self) -> int | None:
        return _first(whole(self.distributed.get("rank")), whole(self.meta.get("rank")))

    @property
    def world_size(self) -> int | None:
        return _first(whole(self.distributed.get("world_size")), whole(self.meta.get("world_size")))

    @property
    def host(self) -> str | None:
        return _first(text(self.known.get("host_name")), text(self.meta.get("host")))

    @property
    def base(self) -> int:
        """ns that the times of the file count from; 0 if it has none."""
        value = whole(self.known.get("baseTimeNanoseconds"))
        return value if value is not None and 0 < value < 1 << 62 else 0

    def groups(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Global ranks of each process group whose list is whole, and descriptions, by the group's name."""
        members: dict[str, tuple[int, ...]] = {}
        descriptions: dict[str, str] = {}
        config = _loaded(self.distributed.get("pg_config"))
        for group in config if isinstance(config, list) else []:
            name = text(_table(group).get("pg_name"))
            if name is None:
                continue
            if (description := text(group.get("pg_desc"))) is not None:
                descriptions[name] = description
            ranks = rank_list(group.get("ranks"))
            if ranks is None and self.world_size and whole(group.get("pg_size")) == self.world_size:
                ranks = tuple(range(self.world_size))
            if ranks is not None:
                members[name] = ranks
        return members, descriptions


def parse(head: bytes, tail: bytes, *, listed: bool = False) -> Facts:
    """Facts from the text before and behind the events' array.

    Args:
        head: up to the array's opening bracket, which is not part of it.
        tail: from behind its closing bracket.
        listed: the file is a bare list of events, with nothing around it.
    """
    if listed:
        return Facts({}, ["has text behind its end; it was ignored"] if tail.strip() else [])
    source = head.decode(errors="replace") + "[]" + tail.decode(errors="replace")
    try:
        known, end = _decoder.raw_decode(source, len(source) - len(source.lstrip()))
        if isinstance(known, dict):
            problems = ["has text behind its end; it was ignored"] if source[end:].strip() else []
            return Facts(known, problems)
    except (ValueError, RecursionError):
        pass
    known = {}
    for key in _KEYS:
        match = re.search(rf'(?<!\\)"{key}"\s*:\s*', source)
        if match:
            try:
                value, end = _decoder.raw_decode(source, match.end())
            except (ValueError, RecursionError):
                continue
            # A number that nothing follows may have been cut itself.
            if not isinstance(value, int | float) or _NEXT.match(source, end):
                known[key] = value
    return Facts(known, ["what stands around its events is cut or ill-formed; some of it may be lost"], bool(known))


def rank_in_name(path: Path) -> int | None:
    """The rank that a file's name tells, such as ``rank-00003.json.gz`` or ``step_r1.json``; else its folder's name."""
    for name in (path.name, path.parent.name):
        found = [whole(match[1] or match[2]) for match in _RANK_IN_NAME.finditer(name)]
        if found:
            return found[-1]
    return None


def rank_list(value: Any) -> tuple[int, ...] | None:
    """Ranks from a list, or its text; None if it is shortened (``[0, 1, ..., 7]``) or no list of ranks."""
    ranks = _loaded(value)
    if not isinstance(ranks, list) or any(whole(rank) is None for rank in ranks):
        return None
    return tuple(int(rank) for rank in ranks)


def whole(value: Any) -> int | None:
    """A number of at least 0, or its text."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def text(value: Any) -> str | None:
    """Text, or a number as text; None for anything else and for empty text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    return value if isinstance(value, str) and value else None


def _loaded(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value


def _table(value: Any) -> dict[str, Any]:
    value = _loaded(value)
    return value if isinstance(value, dict) else {}


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
