"""Traces of all layouts, whole and broken, against a plain `json.loads`."""

from __future__ import annotations

import gc
import gzip
import json
import random
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_llm.errors import UserError
from lit_llm.trace import chunks, salvage
from lit_llm.trace.columns import Category, RankTrace
from lit_llm.trace.facts import rank_in_name, rank_list
from lit_llm.trace.reader import read

SHARED = Path(__file__).parents[1].parent / "shared" / "traces"
BASE = 1_790_857_026_000_000_000
KEYS = {
    "cpu_op": Category.CPU_OP,
    "user_annotation": Category.ANNOTATION,
    "gpu_user_annotation": Category.GPU_ANNOTATION,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "cuda_sync": Category.SYNC,
    "python_function": Category.PYTHON,
    "overhead": Category.OVERHEAD,
    "Trace": Category.OTHER,
}
Row = tuple[int, int, str, str, str, str, int, int, int, int]


def event(ts: Any = 10.5, dur: Any = 2.25, cat: str = "cpu_op", name: str = "aten::add", **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 8, "ts": ts, "dur": dur, **more}


def trace(events: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"schemaVersion": 1, "baseTimeNanoseconds": BASE, **more, "traceEvents": events}


def write(path: Path, content: Any) -> Path:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" and not isinstance(content, bytes) else data)
    return path


def load(tmp_path: Path, content: Any, name: str = "trace.json", chunk_bytes: int = 8 << 20) -> RankTrace:
    return read(write(tmp_path / name, content), chunk_bytes=chunk_bytes)


def rows(found: RankTrace) -> list[Row]:
    e = found.events
    return [
        (
            *(int(e.start[i]), int(e.duration[i]), Category(int(e.category[i])).name, found.names[e.name[i]]),
            *found.threads[e.thread[i]],
            *(int(e.device[i]), int(e.stream[i]), int(e.correlation[i]), int(e.bytes[i])),
        )
        for i in range(len(e))
    ]


def names(found: RankTrace) -> list[str]:
    return [found.names[i] for i in found.events.name]


def expected(text: str, base: int) -> list[Row]:
    """The same by the standard library, with times as decimal numbers."""
    document = json.loads(text, parse_float=Decimal)
    listed = document["traceEvents"] if isinstance(document, dict) else document
    whole = all(isinstance(item["ts"], int) for item in listed)
    result: list[Row] = []
    for item in listed:
        if item["ph"] != "X":
            continue
        args, category = item.get("args", {}), KEYS.get(item.get("cat", ""), Category.OTHER)
        start, duration = round(Decimal(item["ts"]) * 1000), max(0, round(Decimal(item.get("dur", 0)) * 1000))
        if category is Category.GPU_ANNOTATION:
            start, duration = start + (1000 if whole else 1), max(0, duration - (1000 if whole else 2))
        gpu = category in (Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.GPU_ANNOTATION)
        linked = gpu or category not in (Category.CPU_OP, Category.ANNOTATION, Category.PYTHON)
        result.append(
            (
                *(start + base, duration, category.name, item["name"], str(item["pid"]), str(item["tid"])),
                *((args.get("device", item["pid"]), args.get("stream", item["tid"])) if gpu else (-1, -1)),
                args.get("correlation", -1) if linked else -1,
                args.get("bytes", -1) if gpu else -1,
            )
        )
    return result


def made_up(seed: int, count: int, times: str) -> list[dict[str, Any]]:
    """Events with all that makes them hard to cut apart."""
    draw = random.Random(seed)
    odd = [
        "aten::mm",
        "a},{b",
        '},{"ph":"X"',
        "void f<int, {lambda()#1}>(x[])",
        "Größe \\ 層",
        "",
        "]}",
        '"',
        "{",
        "tab\t",
    ]
    nested = [{"a": 1}, {"ph": "no event"}, {"b": [{}, {"c": "},\n  {"}]}]
    events = []
    for index in range(count):
        ns = draw.randrange(10**12, 2 * 10**12)
        ts = {"ns": ns / 1000, "us": 1_683_564_901_548_726 + ns // 1000, "wall": 0}[times]
        item = event(ts, draw.randrange(0, 10**6) / 1000 if times != "us" else draw.randrange(1000))
        item["name"], item["cat"] = draw.choice(odd), draw.choice([*KEYS, "something_new"])
        item["pid"], item["tid"] = draw.choice([0, 1]), draw.choice([7, 20])
        args = {"device": 3, "stream": 9, "correlation": index, "bytes": 512, "other": nested, "name": "x"}
        item["args"] = {key: value for key, value in args.items() if draw.random() < 0.5}
        if times == "wall":  # nanoseconds since 1970, which a double does not hold
            item["ts"] = f"TS1790857026{ns % 10**9:09d}"[:18] + f".{draw.randrange(1000):03d}TS"
        if draw.random() < 0.1:
            del item["dur"]
        if draw.random() < 0.2:
            item = {"ph": draw.choice("sfiM"), "name": "fwdbwd", "pid": 0, "tid": 0, "ts": item["ts"], "id": index}
        events.append(item)
    return events


def layout(events: list[dict[str, Any]], how: str) -> tuple[str, int]:
    """Text of a trace and its base."""

    def dump(value: Any, **options: Any) -> str:
        text = json.dumps(value, ensure_ascii=len(events) % 2 == 0, **options)
        return text.replace('"TS', "").replace('TS"', "")

    before = {"schemaVersion": 1, "distributedInfo": {"rank": 1, "world_size": 2, "pg_config": [{"ranks": [0, 1]}, {}]}}
    after = {"traceName": "x", "displayTimeUnit": "ms", "baseTimeNanoseconds": BASE}
    if how == "bare":
        return dump(events), 0
    if how == "compact":
        return dump({**before, **after, "traceEvents": events}, separators=(",", ":")), BASE
    if how == "indented":
        return dump({**before, "traceEvents": events, **after}, indent=2), BASE
    body = ",\n".join("  " + dump(item, indent=2).replace("\n", "\n  ") for item in events)
    return dump(before, indent=2)[:-2] + ',\n  "traceEvents": [\n' + body + "\n  ],\n" + dump(after)[1:], BASE


@pytest.mark.parametrize("how", ["bare", "compact", "indented", "kineto"])
@pytest.mark.parametrize("times", ["ns", "us", "wall"])
def test_every_layout_is_read_exactly(tmp_path: Path, how: str, times: str) -> None:
    for seed, chunk_bytes in enumerate((8 << 20, 700, 4000)):
        text, base = layout(made_up(seed, 301 + seed, times), how)
        found = load(tmp_path, text.encode(), chunk_bytes=chunk_bytes)
        wall = times != "ns" or base > 0
        want = expected(text, base if times == "ns" else 0)
        assert Counter(rows(found)) == Counter(want)
        assert [(row[0], -row[1]) for row in rows(found)] == sorted((row[0], -row[1]) for row in want)
        assert not found.problems
        assert not found.truncated
        assert found.clock == ("wall" if wall else "unknown")
        assert found.rank == (None if how == "bare" else 1)


def test_a_double_would_not_do_for_absolute_nanoseconds(tmp_path: Path) -> None:
    text = '{"traceEvents": [{"ph":"X","name":"a","ts":1712867402348256.123,"dur":0.001},{"ph":"X","name":"b","ts":5}]}'
    found = load(tmp_path, text.encode())
    assert sorted(found.events.start.tolist()) == [5000, 1_712_867_402_348_256_123]
    assert found.events.duration.tolist() == [0, 1]
    bad = '{"ph":"X","name":"c","dur":1},{"ph":"X","name":"d","ts":1e99},{"ph":"X","name":"e","ts":1,"dur":"NaN"},'
    found = load(tmp_path, text.replace("[", "[" + bad, 1).encode())
    assert (sorted(names(found)), len(found.problems)) == (["a", "b"], 1)
    # A base that the times do not count from is not added to them.
    text = '{"traceEvents": [{"ph":"X","name":"a","ts":1712867402348256}], "baseTimeNanoseconds": 1700000000000000000}'
    assert load(tmp_path, text.encode()).events.start.tolist() == [1_712_867_402_348_256_000]


def test_a_boundary_in_an_event_is_none(tmp_path: Path) -> None:
    """A nested list whose members look like events, at every place of the cut."""
    inner = [event(float(i), name=f"inner{i}") for i in range(30)]
    events = [event(float(i), name=f"outer{i}", args={"list": inner, "text": json.dumps(inner)}) for i in range(4)]
    text = json.dumps(trace(events)).encode()
    for chunk_bytes in range(300, 9000, 97):
        found = load(tmp_path, text, chunk_bytes=chunk_bytes)
        assert names(found) == ["outer0", "outer1", "outer2", "outer3"]
        assert not found.problems


def test_a_chunk_is_all_that_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = layout(made_up(1, 3000, "ns"), "kineto")
    sizes = []
    take = chunks.Chunks._take

    def spy(self: chunks.Chunks, end: int) -> bytes:
        sizes.append(len(self._buffer))
        return take(self, end)

    monkeypatch.setattr(chunks.Chunks, "_take", spy)
    for name in ("a.json", "a.json.gz"):
        sizes.clear()
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
        assert len(read(path, chunk_bytes=20_000).events) > 2000
        assert len(sizes) > 20
        assert max(sizes) < 45_000


def test_the_collector_is_left_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", trace([event()]))
    assert gc.isenabled()
    read(path)
    assert gc.isenabled()
    gc.disable()
    try:
        read(path)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("name", "category"),
    [
        *KEYS.items(),
        *(("Kernel", Category.KERNEL), ("Runtime", Category.RUNTIME), ("Memcpy", Category.MEMCPY)),
        *(("Memset", Category.MEMSET), ("Operator", Category.CPU_OP), ("hpu_op", Category.KERNEL)),
        *(("xpu_runtime", Category.RUNTIME), ("xpu_driver", Category.RUNTIME), ("mtia_runtime", Category.RUNTIME)),
        *(("privateuse1_runtime", Category.RUNTIME), ("privateuse1_driver", Category.RUNTIME)),
        *(("mtia_ccp_events", Category.KERNEL), ("cpu_instant_event", Category.OTHER), ("", Category.OTHER)),
        ("what_next", Category.OTHER),
    ],
)
def test_categories(tmp_path: Path, name: str, category: Category) -> None:
    assert load(tmp_path, trace([event(cat=name)])).events.category.tolist() == [category]


def test_devices_and_streams(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], tuple[int, int]]] = [
        ({"cat": "kernel", "pid": 2, "tid": 9, "args": {}}, (2, 9)),
        ({"cat": "kernel", "pid": 2, "tid": 9}, (2, 9)),
        ({"cat": "kernel", "args": {"device": 1, "stream": 0}}, (1, 0)),
        ({"cat": "kernel", "args": {"device": "1", "stream": "0x0"}}, (1, 0)),
        ({"cat": "gpu_memcpy", "args": {"device": 1, "stream": "0x1f"}}, (1, 31)),
        ({"cat": "gpu_memset", "pid": "GPU 3", "tid": "stream 7 "}, (3, 7)),
        ({"cat": "Kernel", "pid": "host", "tid": ""}, (-1, -1)),
        ({"cat": "kernel", "args": {"device": 1 << 40, "stream": 1 << 70}}, (-1, -1)),
        ({"cat": "gpu_user_annotation", "pid": 4, "tid": 20, "args": {"External id": 3}}, (4, 20)),
        ({"cat": "cuda_runtime", "args": {"stream": "0x0", "correlation": "12"}}, (-1, -1)),
        ({"cat": "cuda_sync", "args": {"device": 0, "stream": 7}}, (-1, -1)),
    ]
    for more, (device, stream) in cases:
        found = load(tmp_path, trace([event(**more)])).events
        assert (found.device.tolist(), found.stream.tolist()) == ([device], [stream]), more
    assert load(tmp_path, trace([event(cat="cuda_runtime", args={"correlation": "12"})])).events.correlation == [12]


def test_annotations_of_the_gpu_are_drawn_wider_than_they_are(tmp_path: Path) -> None:
    new = load(tmp_path, trace([event(9.999, 5.002, "gpu_user_annotation"), event(10.0, 5.0, "kernel")])).events
    assert (new.start - BASE).tolist() == [10_000, 10_000]
    assert new.duration.tolist() == [5000, 5000]
    old = load(tmp_path, {"traceEvents": [event(9, 6, "gpu_user_annotation"), event(10, 5, "kernel")]}).events
    assert (old.start.tolist(), old.duration.tolist()) == ([10_000, 10_000], [5000, 5000])


def test_durations(tmp_path: Path) -> None:
    gone = event()
    del gone["dur"]
    assert load(tmp_path, trace([event(dur=-3), event(dur=0), gone])).events.duration.tolist() == [0, 0, 0]


def test_threads_that_differ_in_type_only_are_one(tmp_path: Path) -> None:
    named = {"ph": "M", "name": "thread_name", "pid": 7, "tid": 8, "args": {"name": "main"}}
    found = load(tmp_path, trace([event(1.0), event(2.0, pid="7", tid="8"), event(3.0, tid="Trace x"), named]))
    threads = [found.threads[i] for i in found.events.thread]
    assert threads == [("7", "8"), ("7", "8"), ("7", "Trace x")]
    assert {found.threads[i]: name for i, name in found.thread_names.items()} == {("7", "8"): "main"}


def test_details_of_collectives(tmp_path: Path) -> None:
    nccl = {
        "Collective name": "allreduce",
        "In msg nelems": 5,
        "Out msg nelems": "6",
        "Group size": 2,
        "dtype": "Float",
        "Process Group Name": "3",
        "Process Group Ranks": "[0, 4]",
        "Seq": 17,
    }
    shapes = {"Input Dims": [[[2, 3]], []], "Input type": ["float", ""]}
    events = [
        event(1.0, cat="kernel", args=nccl),
        event(2.0, cat="kernel", args=nccl),
        event(3.0, name="c10d::allreduce_", args=shapes),
        event(4.0, name="gloo:all_reduce", cat="user_annotation", args=shapes),
        event(5.0, name="record_param_comms", args={**nccl, **shapes}),
        event(6.0, name="nccl:all_reduce", cat="user_annotation", args={"External id": 1}),
        event(7.0, name="aten::add", args=shapes),
        event(8.0, cat="kernel", args={"dtype": "Float"}),
        event(9.0, cat="kernel", args={**nccl, "Process Group Name": "4", "Process Group Ranks": "[0, 1, ..., 7]"}),
    ]
    found = load(tmp_path, trace(events))
    ids = found.events.detail.tolist()
    assert ids[0] == ids[1] != -1
    assert ids[2] == ids[3] != -1
    assert ids[4] not in (-1, ids[0], ids[2])
    assert ids[5:8] == [-1, -1, -1]
    first, host = found.details[ids[0]], found.details[ids[2]]
    assert (first.collective, first.group, first.sequence, first.dtype) == ("allreduce", "3", 17, "Float")
    assert (first.in_elements, first.out_elements, first.group_size, first.shapes) == (5, 6, 2, None)
    assert (host.shapes, host.types, host.collective) == ([[[2, 3]], []], ["float", ""], None)
    assert len(found.details) == 4
    assert found.groups == {"3": (0, 4)}


def test_what_a_trace_says_about_itself(tmp_path: Path) -> None:
    config = [
        {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": "[0, 1, ..., 3]"},
        {"pg_name": "1", "pg_desc": "fsdp", "pg_size": 2, "ranks": [0, 2]},
        {"pg_name": 2, "pg_size": 2, "ranks": "[1, 3]"},
        {"pg_name": "3", "pg_size": 3, "ranks": "[0, ..., 3]"},
    ]
    info = {"backend": "nccl", "rank": "3", "world_size": 4, "pg_config": config}
    content = {
        "traceEvents": [event()],
        "distributedInfo": info,
        "host_name": "h",
        "lit_llm": {"run": "ab", "steps": 3},
    }
    for name in ("rank-9.json", "rank-9.json.gz"):
        found = load(tmp_path, content, name)
        assert (found.rank, found.rank_from, found.world_size, found.host) == (3, "trace", 4, "h")
        assert found.backend == "nccl"
        assert found.groups == {"0": (0, 1, 2, 3), "1": (0, 2), "2": (1, 3)}
        assert found.group_descriptions == {"0": "default_pg", "1": "fsdp"}
        assert found.meta == {"run": "ab", "steps": 3}
        assert found.clock == "unknown"
    own = load(tmp_path, {**content, "distributedInfo": None, "lit_llm": {"rank": 2, "world_size": 8, "host": "i"}})
    assert (own.rank, own.rank_from, own.world_size) == (2, "trace", 8)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        *(("rank-00003.json.gz", 3), ("rank3.pt.trace.json", 3), ("rank_12.json", 12), ("dlrm_w16_r1.json.gz", 1)),
        *(("host_1234.1712867402348256123.pt.trace.json", None), ("worker0.1.json", None), ("trace.json", None)),
        *(("step-000100_r-7.json", 7), ("r2.json", 2), ("for4.json", None)),
    ],
)
def test_ranks_in_names(tmp_path: Path, name: str, rank: int | None) -> None:
    found = load(tmp_path, trace([event()], distributedInfo={"backend": "nccl"}), name)
    assert (found.rank, found.rank_from) == (rank, "none" if rank is None else "file name")


def test_small_things() -> None:
    assert rank_in_name(Path("a/rank_5/trace.json")) == 5
    assert rank_list("[0, 1, ..., 7]") is None
    assert rank_list([0, True]) is None
    assert rank_list("7") is None
    text, count = salvage.repair(b'{"a": "nan: \\" nan", "b": -Infinity, "c": "x\\y\\\\z\\u00e4"}')
    assert json.loads(text) == {"a": 'nan: " nan', "b": None, "c": "x\\y\\zä"}
    assert count == 2


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


def shared() -> list[Path]:
    return sorted(SHARED.rglob("*.json.gz")) if SHARED.is_dir() else []


def test_real_traces() -> None:
    if not shared():
        pytest.skip("the real traces are not here")
    for path in shared():
        document = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
        base = document.get("baseTimeNanoseconds", 0)
        found = read(path, chunk_bytes=1 << 20)
        assert not found.problems
        assert not found.truncated
        listed = [item for item in document["traceEvents"] if item["ph"] == "X"]
        assert len(found.events) == len(listed)
        early = found.events.category == Category.GPU_ANNOTATION  # by 1 ns, in the traces that have them
        assert sorted((found.events.start - early).tolist()) == sorted(base + round(i["ts"] * 1000) for i in listed)
        assert sorted((found.events.duration + 2 * early).tolist()) == sorted(round(i["dur"] * 1000) for i in listed)
        assert Counter(names(found)) == Counter(item["name"] for item in listed)
        assert found.clock == "wall"


def test_real_traces_have_the_kernels_that_were_counted() -> None:
    if not shared():
        pytest.skip("the real traces are not here")
    figures = json.loads((SHARED / "expected.json").read_text())
    for name, case in figures.items():
        if name == "_":
            continue
        files = sorted((SHARED / case["folder"]).glob("*.gz"))
        for path, rank in zip(files, case["ranks"], strict=True):
            found = read(path)
            count = Counter(found.events.category.tolist())
            assert (found.rank, found.world_size) == (rank["rank"], rank["world_size"])
            n = rank["gpu"]["n"] if rank["gpu"] else {"compute": 0, "comm": 0, "memory": 0}
            assert count[Category.KERNEL] == n["compute"] + n["comm"]
            assert count[Category.MEMCPY] + count[Category.MEMSET] == n["memory"]
            marks = np.flatnonzero(found.events.category == Category.ANNOTATION)
            steps = {found.names[found.events.name[i]]: int(found.events.duration[i]) for i in marks}
            for step, us in rank["profiler_steps"].items():
                assert steps[step] == round(us * 1000)
