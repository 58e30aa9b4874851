"""Traces of all layouts, against a plain `json.loads`."""

from __future__ import annotations

import gc
import gzip
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_llm.trace import chunks, salvage
from lit_llm.trace.columns import Category
from lit_llm.trace.facts import rank_in_name, rank_list
from lit_llm.trace.reader import read
from tests.trace_text import BASE, KEYS, event, expected, layout, load, made_up, names, rows, trace, write

SHARED = Path(__file__).parents[1].parent / "shared" / "traces"


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
