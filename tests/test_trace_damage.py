"""Traces that are ill-formed, cut or no traces at all."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lit_llm.errors import UserError
from lit_llm.trace.reader import read
from tests.trace_text import BASE, event, expected, layout, load, made_up, names, rows, trace

BAD = {
    "nan": ('{"ph":"X","name":"bad","ts":5,"dur":1,"args":{"bandwidth": NaN, "o": -inf}}', True),
    "utf8": (b'{"ph":"X","name":"bad\xff","ts":5,"dur":1}', True),
    "escape": ('{"ph":"X","name":"bad\\x","ts":5,"dur":1}', True),
    "newline": ('{"ph":"X","name":"bad\nline","ts":5,"dur":1}', True),
    "dur": ('{"ph":"X","name":"bad","ts":5,"dur":null}', False),
    "ts": ('{"ph":"X","name":"bad","ts":"5","dur":1}', False),
    "no ts": ('{"ph":"X","name":"bad","dur":1}', False),
    "digits": ('{"ph":"X","name":"bad","ts":' + "1" * 5000 + ',"dur":1}', False),
    "deep": ('{"ph":"X","name":"bad","ts":1,"args":' + "[" * 20000 + "]" * 20000 + "}", False),
    "range": ('{"ph":"X","name":"bad","ts":1e400,"dur":1}', False),
    "late": ('{"ph":"X","name":"bad","ts":99999999999999999999999,"dur":1}', False),
    "number": ("17", False),
    "quote": ('{"ph":"X","name":"bad"","ts":5,"dur":1}', False),
    "quotes": ('{"ph":"X","name":"a "bad" b","ts":5,"dur":1}', False),
    "brace": ('{"ph":"X","name":"bad","ts":5,"args":{"a":1}', False),
    "value": ('{"ph":"X","name":"bad","ts":5,"dur":}', False),
    "surrogate": ('{"ph":"X","name":"bad\\ud800","ts":5,"dur":1}', True),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("place", [0, 100, 199])
@pytest.mark.parametrize("chunk_bytes", [1000, 1 << 20])
def test_an_ill_formed_event_costs_no_other(tmp_path: Path, kind: str, place: int, chunk_bytes: int) -> None:
    text, stays = BAD[kind]
    bad = text if isinstance(text, bytes) else text.encode()
    good = [json.dumps(event(float(i), name=f"good{i}")).encode() for i in range(200)]
    listed = [*good[:place], bad, *good[place:]]
    content = b'{"schemaVersion": 1, "traceEvents": [' + b",\n".join(listed) + b'], "baseTimeNanoseconds": 7}'
    found = load(tmp_path, content, chunk_bytes=chunk_bytes)
    kept = [name for name in names(found) if name.startswith("good")]
    assert kept == [f"good{i}" for i in range(200)]
    assert any("bad" in name for name in names(found)) == stays
    if kind != "number":
        assert len(found.problems) == 1
        assert ("mended" in found.problems[0]) == stays
    assert not found.truncated
    assert found.events.start.min() == 7


def damaged(kind: str, text: bytes) -> tuple[bytes, str]:
    packed = bytearray(gzip.compress(text, 6))
    if kind == "checksum":
        packed[-6] ^= 1
    if kind == "length":
        packed[-2] ^= 1
    if kind == "flip":
        packed[len(packed) // 2] ^= 0x55
    if kind == "cut":
        del packed[len(packed) * 9 // 10 :]
    if kind == "cut text":
        return text[: len(text) * 9 // 10], "a_r1.json"
    return bytes(packed), "a_r1.json.gz"


@pytest.mark.parametrize("kind", ["checksum", "length", "flip", "cut", "cut text"])
def test_damaged_files_are_saved_as_far_as_they_go(tmp_path: Path, kind: str) -> None:
    text, base = layout(made_up(3, 4000, "ns"), "compact")
    content, name = damaged(kind, text.encode())
    found = load(tmp_path, content, name, chunk_bytes=50_000)
    assert found.truncated
    assert f"{len(found.events):,} events were saved" in found.problems[-1] or "ill-formed" in found.problems[-1]
    want = expected(text, base)
    share = len(found.events) / len(want)
    assert share == 1 if kind in ("checksum", "length") else 0.3 < share < 0.95
    if kind != "flip":  # flipped bits give other text before zlib sees that something is wrong
        assert not Counter(rows(found)) - Counter(want)
        assert not any("ill-formed events" in problem for problem in found.problems)
    assert found.rank == 1


@pytest.mark.parametrize("how", ["bare", "compact", "indented", "kineto"])
def test_cut_anywhere(tmp_path: Path, how: str) -> None:
    text, _ = layout(made_up(5, 151, "ns"), how)
    data = text.encode()
    want = Counter(row[1:] for row in expected(text, 0))
    starts = Counter(row[0] for row in expected(text, 0))
    draw = random.Random(6)
    packed = gzip.compress(data, 1)
    early: list[int] = []
    for name, whole in (("a.json", data), ("a.json.gz", packed)):
        for _ in range(120):
            cut = draw.randrange(len(whole))
            try:
                found = load(tmp_path, whole[:cut], name, chunk_bytes=draw.choice([500, 3000, 1 << 20]))
            except UserError:
                early.append(cut)  # before the first event, or nothing of it could be inflated
                continue
            read_rows = rows(found)
            assert not Counter(row[1:] for row in read_rows) - want
            base = 0 if found.clock == "unknown" else BASE
            assert not Counter(row[0] - base for row in read_rows) - starts
            assert found.truncated or len(found.events) == sum(want.values()) or how == "bare"
            assert not any("ill-formed events" in problem for problem in found.problems)
    assert max(early, default=0) < 700


def test_damage_of_any_kind_is_told_or_saved(tmp_path: Path) -> None:
    """Bytes changed, left out, doubled and put in: a trace comes back, or one line that there is none."""
    draw = random.Random(8)
    saved = 0
    for _ in range(200):
        text, _ = layout(made_up(draw.randrange(1 << 30), 60, draw.choice(["ns", "us", "wall"])), "indented")
        data = bytearray(text.encode())
        packed = draw.random() < 0.3
        if packed and draw.random() < 0.7:
            data = bytearray(gzip.compress(bytes(data), 1))
        for _ in range(draw.choice([1, 3, 20])):
            at = draw.randrange(len(data))
            change = draw.choice(
                [b"", bytes([draw.randrange(256)]), b'"', b"{", b"}", b"]", b"\\", b"0", data[at : at + 9]]
            )
            data[at : at + draw.choice([0, 1, 9])] = change
        name = "a.json.gz" if packed else "a.json"
        try:
            found = load(tmp_path, bytes(data), name, chunk_bytes=draw.choice([300, 2000, 1 << 20]))
        except UserError:
            continue
        assert all(len(column) == len(found.events) for column in vars(found.events).values())
        assert (np.diff(found.events.start) >= 0).all()
        saved += len(found.events) > 0
    assert saved > 120


def test_what_stands_around_the_events_may_be_broken(tmp_path: Path) -> None:
    events = json.dumps([event(1.0), event(2.0)])[1:-1]
    cut = f'{{"traceEvents": [{events}], "distributedInfo": {{"rank": 3}}, "baseTimeNanoseconds": 70, "traceNa'
    found = load(tmp_path, cut.encode())
    assert (found.rank, found.events.start.tolist(), found.truncated) == (3, [1070, 2070], False)
    assert ["lost" in problem for problem in found.problems] == [True]
    bad = f'{{"INFO": ["a "quoted" word"], "distributedInfo": {{"rank": 3}}, "traceEvents": [{events}]}}'
    assert load(tmp_path, bad.encode()).rank == 3
    more = json.dumps(trace([event()])) + '{"again": 1}'
    assert ["behind its end" in problem for problem in load(tmp_path, more.encode()).problems] == [True]
    info = {"rank": 5, "x": "\t", "nan": float("nan")}
    assert load(tmp_path, trace([event()], distributedInfo=info)).rank == 5


def test_long_text_behind_the_events(tmp_path: Path) -> None:
    config = [{"pg_name": str(i), "pg_size": 1, "ranks": [i]} for i in range(3000)]
    content = {"traceEvents": [event(float(i)) for i in range(50)], "distributedInfo": {"rank": 1, "pg_config": config}}
    found = load(tmp_path, content, chunk_bytes=2000)
    assert (len(found.events), found.rank, len(found.groups), found.problems) == (50, 1, 3000, [])
    swapped = {key: content[key] for key in reversed(content)}
    assert len(load(tmp_path, swapped, chunk_bytes=2000).events) == 50


def test_gzip_of_all_kinds(tmp_path: Path) -> None:
    text = json.dumps(trace([event(float(i)) for i in range(300)])).encode()
    pieces = [gzip.compress(text[at : at + 999]) for at in range(0, len(text), 999)]
    several = load(tmp_path, b"".join(pieces), "a.json.gz")
    assert (len(several.events), several.problems, several.truncated) == (300, [], False)
    padded = load(tmp_path, gzip.compress(text) + bytes(512), "a.json.gz")
    assert (len(padded.events), padded.problems) == (300, [])
    trailing = load(tmp_path, gzip.compress(text) + b"garbage", "a.json.gz")
    assert (len(trailing.events), trailing.truncated) == (300, False)
    assert "ignored" in trailing.problems[0]
    plain = load(tmp_path, text, "a.json.gz")
    assert (len(plain.events), plain.truncated) == (300, False)
    assert "not gzip" in plain.problems[0]
    assert len(load(tmp_path, gzip.compress(text), "a.json").events) == 300
    marked = load(tmp_path, b"\xef\xbb\xbf" + text)
    assert (len(marked.events), marked.problems) == (300, [])
    half = load(tmp_path, b"".join(pieces[:-1]) + pieces[-1][:12], "a.json.gz")
    assert 280 < len(half.events) < 300
    assert half.truncated


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b" \n", b"hello", b"{}", b"[]", b"[1, 2, 3]", b'{"a": [{"b": 1}]}', b"\x00\x01\x02" * 50, b"null"),
        *(b'{"schemaVersion": 1, "other": 2}', b"\x1f\x8b\x08", b"\x1f\x8bnothing", gzip.compress(b"")),
        *(gzip.compress(b"plain words"), b'{"model_type": "llama", "hidden_size": 64', b'[{"a": 1}, {"b": 2}]'),
    ],
)
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_what_is_no_trace(tmp_path: Path, content: bytes, name: str) -> None:
    with pytest.raises(UserError, match=r"a\.json(\.gz)? is no trace of the PyTorch profiler \(.+\)$") as caught:
        load(tmp_path, content, name)
    assert "\n" not in str(caught.value)


def test_what_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.json can't be read \(No such file or directory\)$"):
        read(tmp_path / "gone.json")
    with pytest.raises(UserError, match="can't be read"):
        read(tmp_path)


def test_a_trace_without_events(tmp_path: Path) -> None:
    empty = load(tmp_path, trace([]))
    assert (len(empty.events), empty.truncated, empty.problems) == (0, False, ["holds no events"])
    begun = load(tmp_path, b'{"schemaVersion": 1, "deviceProperties": [], "distributedInfo": {"rank": 2}, "trac')
    assert (len(begun.events), begun.truncated, begun.rank) == (0, True, 2)
    other = load(tmp_path, trace([{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "x"}}]))
    assert len(other.events) == 0
    for column in vars(empty.events).values():
        assert len(column) == 0


def test_an_open_list_is_a_trace(tmp_path: Path) -> None:
    listed = json.dumps([event(1.0), event(2.0)])
    for text in (listed, listed[:-1], listed[:-1] + ",\n"):
        found = load(tmp_path, text.encode())
        assert (len(found.events), found.truncated, found.problems) == (2, False, [])
    assert load(tmp_path, listed[:-2].encode()).truncated
