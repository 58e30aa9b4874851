"""Traces as text, in the layouts of several writers, and what a plain `json.loads` makes of them."""

from __future__ import annotations

import gzip
import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

from lit_llm.trace.columns import Category, RankTrace
from lit_llm.trace.reader import read

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
