"""The made traces are what kineto would write of a run that could have been, and the faults are really in the files."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.synthetic_traces import write_set

SMALL: dict[str, Any] = {"ranks": 4, "layers": 3, "steps": 2, "kernels": 6, "compress": False}


def _events(file: str) -> list[dict[str, Any]]:
    data = Path(file).read_bytes()
    return json.loads(gzip.decompress(data) if file.endswith(".gz") else data)["traceEvents"]


def _written(folder: Path, **fields: Any) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    plan = write_set(folder, **{**SMALL, **fields})
    return [[e for e in _events(file) if e["ph"] == "X" and e["cat"] != "Trace"] for file in plan["files"]], plan


def _ns(event: dict[str, Any]) -> tuple[int, int]:
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def _named(events: list[dict[str, Any]], start: str, category: str | None = None) -> list[dict[str, Any]]:
    return [e for e in events if e["name"].startswith(start) and category in (None, e["cat"])]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    return _written(tmp_path_factory.mktemp("healthy"))


def test_files_are_whole_and_told_apart(healthy: Any) -> None:
    ranks, plan = healthy
    assert [Path(f).name for f in plan["files"]] == [f"rank-0000{r}.json" for r in range(4)]
    for rank, file in enumerate(plan["files"]):
        trace = json.loads(Path(file).read_text())
        assert trace["distributedInfo"]["rank"] == trace["lit_llm"]["rank"] == rank
        assert trace["distributedInfo"]["pg_config"][0]["ranks"] == [0, 1, 2, 3]
        assert trace["host_name"] == "node-0"
        marks = _named(ranks[rank], "ProfilerStep#", "user_annotation")
        assert [m["name"] for m in marks] == ["ProfilerStep#100", "ProfilerStep#101"]


def test_a_stream_runs_one_kernel_at_a_time_and_after_its_launch(healthy: Any) -> None:
    for events in healthy[0]:
        calls = {e["args"]["correlation"]: _ns(e) for e in events if e["cat"] == "cuda_runtime"}
        streams, without_call = defaultdict(list), 0
        for event in events:
            if event["cat"] in ("kernel", "gpu_memcpy"):
                streams[event["tid"]].append(_ns(event))
                if event["args"]["correlation"] in calls:
                    assert _ns(event)[0] >= calls[event["args"]["correlation"]][0] + 4000
                else:
                    without_call += 1
        assert set(streams) == {7, 16, 20, 24, 28}
        assert 0 < without_call < 60  # of the step before the window
        for spans in streams.values():
            spans.sort()
            assert all(a[1] < b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_what_a_host_thread_does_is_nested(healthy: Any) -> None:
    for events in healthy[0]:
        threads = defaultdict(list)
        for event in events:
            if event["cat"] in ("cpu_op", "user_annotation", "cuda_runtime"):
                threads[event["tid"]].append(_ns(event))
        assert len(threads) == 2
        for spans in threads.values():
            spans.sort(key=lambda s: (s[0], -s[1]))
            open_until: list[int] = []
            for start, end in spans:
                while open_until and open_until[-1] <= start:
                    open_until.pop()
                assert not open_until or end <= open_until[-1]
                open_until.append(end)


def _collectives(events: list[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    return {e["args"]["Seq"]: _ns(e) for e in _named(events, "ncclDevKernel", "kernel")}


@pytest.mark.parametrize("skew", [0, 37_000_000])
def test_ends_of_a_collective_are_equal_in_true_time(tmp_path: Path, skew: int) -> None:
    ranks, _ = _written(tmp_path, skew_ns={1: skew}, slow_rank={2: 1.5})
    every = [_collectives(events) for events in ranks]
    shared = set.intersection(*map(set, every))
    assert len(shared) >= 2 * (2 * 4 + 3 + 1)  # two steps' gathers, reduce-scatters and the norm
    for sequence in shared:
        spans = np.array([c[sequence] for c in every]) - np.array([[0], [skew], [0], [0]])
        assert np.ptp(spans[:, 1]) <= 501
        assert (spans[:, 1] - spans[:, 0]).min() >= 10_000
    waits = [sum(c[s][1] - c[s][0] for s in shared) for c in every]
    assert waits[2] < 0.75 * min(waits[0], waits[1], waits[3])  # nobody waits longer for the slow one than the others


def test_the_slow_ranks_kernels_are_slow(tmp_path: Path) -> None:
    ranks, plan = _written(tmp_path, slow_rank={2: 1.25})
    means = [np.mean([e["dur"] for e in _named(events, "sm90_xmma_gemm_bf16")]) for events in ranks]
    others = np.median([means[0], means[1], means[3]])
    assert means[2] / others == pytest.approx(1.25, rel=0.02)
    assert np.ptp([means[0], means[1], means[3]]) < 0.02 * others
    lag = np.array(plan["lag_us"])
    assert (lag[:, 2] > 3000).all()
    assert (np.delete(lag, 2, axis=1) < 1000).all()


def test_the_slow_host_starves_its_device(tmp_path: Path) -> None:
    ranks, plan = _written(tmp_path, slow_host={1: 8})
    busy, ahead = [], []
    for events in ranks:
        kernels = [e for e in events if e["cat"] == "kernel" and e["tid"] == 7]
        calls = {e["args"]["correlation"]: e["ts"] for e in events if e["cat"] == "cuda_runtime"}
        spans = np.array([_ns(e) for e in kernels])
        busy.append((spans[:, 1] - spans[:, 0]).sum() / np.ptp(spans))
        leads = [e["ts"] - calls[e["args"]["correlation"]] for e in kernels if e["args"]["correlation"] in calls]
        ahead.append(np.median(leads))
    assert busy[1] < 0.75
    assert ahead[1] < 20  # us: a kernel runs as soon as it is launched
    assert min(ahead[0], ahead[2], ahead[3]) > 1000
    assert (np.argmax(plan["lag_us"], axis=1) == 1).all()


def test_slow_data_is_in_the_loader_rows_and_late_only_beyond_the_hosts_lead(tmp_path: Path) -> None:
    ranks, plan = _written(tmp_path / "a", slow_loader={3: 60}, data_stall=[(0, 101, 200)], steps=3)
    rows = [[e["dur"] / 1000 for e in _named(events, "enumerate(DataLoader)#")] for events in ranks]
    assert np.allclose(rows[3], 60, atol=1)
    assert np.allclose(rows[0], [0.3, 200, 0.3], atol=1)
    assert max(rows[1] + rows[2]) < 1
    lag = np.array(plan["lag_us"])
    assert lag.argmax(axis=1).tolist() == [3, 0, 3]
    assert (lag.max(axis=1) > 30_000).all()
    hidden = _written(tmp_path / "b", data_stall=[(0, 101, 3.0)])[1]
    assert np.max(hidden["lag_us"]) < 1000


def test_only_the_unhidden_layers_gather_waits(tmp_path: Path) -> None:
    hidden_share: dict[str, list[float]] = defaultdict(list)
    for events in _written(tmp_path, unhidden_layer=[1], layers=4)[0]:
        calls = {e["args"]["correlation"]: e for e in _named(events, "cudaLaunchKernelExC")}
        gathers = _named(events, "FSDP::all_gather (", "user_annotation")
        compute = np.array([_ns(e) for e in events if e["cat"] == "kernel" and e["tid"] == 7])
        for kernel in _named(events, "ncclDevKernel_AllGather", "kernel"):
            call = calls.get(kernel["args"]["correlation"])
            if call is None:
                continue
            inside = [g for g in gathers if g["tid"] == call["tid"] and _ns(g)[0] < _ns(call)[0] < _ns(g)[1]]
            if inside:
                start, end = _ns(kernel)
                shared = (np.minimum(compute[:, 1], end) - np.maximum(compute[:, 0], start)).clip(0).sum()
                hidden_share[inside[0]["name"].split()[1]].append(shared / (end - start))
    assert set(hidden_share) == {f"(layers.{i})" for i in range(4)}
    assert max(hidden_share["(layers.1)"]) < 0.1
    assert min(hidden_share["(layers.2)"]) > 0.9
    prefetched = _named(_written(tmp_path / "b", unhidden_layer=[1])[0][0], "FSDP::backward_prefetch")
    assert {e["name"].split()[-1] for e in prefetched} == {"layers.2", "layers.0"}


def test_uneven_work_is_more_kernels_of_the_same_speed(tmp_path: Path) -> None:
    ranks, plan = _written(tmp_path, uneven_work={0: 0.5}, carry_over=False)
    counts = [len([e for e in events if e["cat"] == "kernel" and e["tid"] == 7]) for events in ranks]
    assert counts[1] == counts[2] == counts[3]
    assert counts[0] - counts[1] == 2 * (3 * 3 + 3 * 6 + 1)  # steps x (forwards + backwards + the loss's backward)
    means = [np.mean([e["dur"] for e in _named(events, "nvjet_tst_256")]) for events in ranks]
    assert np.ptp(means) < 0.02 * means[0]
    assert (np.argmax(plan["lag_us"], axis=1) == 0).all()


def test_host_syncs_drain_the_queue(tmp_path: Path, healthy: Any) -> None:
    assert not _named(healthy[0][0], "cudaStreamSynchronize")
    for events in _written(tmp_path, host_sync=2)[0]:
        syncs = _named(events, "cudaStreamSynchronize")
        assert len(syncs) == len(_named(events, "aten::item")) == 4
        compute = np.array([_ns(e) for e in events if e["cat"] in ("kernel", "gpu_memcpy") and e["tid"] == 7])
        for sync in syncs:
            start, end = _ns(sync)
            assert end - start > 1_000_000
            last, following = compute[compute[:, 0] < end][-1], compute[compute[:, 0] > end]
            assert last[1] < end
            assert following[:, 0].min() - last[1] > 100_000


def test_without_a_carry_over_every_kernel_has_its_call(tmp_path: Path) -> None:
    for events in _written(tmp_path, carry_over=False)[0]:
        calls = {e["args"]["correlation"] for e in events if e["cat"] == "cuda_runtime"}
        assert {e["args"]["correlation"] for e in events if e["cat"] in ("kernel", "gpu_memcpy")} <= calls


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    texts = []
    for name, seed, processes in (("a", 0, 1), ("b", 0, 2), ("c", 1, 1)):
        plan = write_set(tmp_path / name, **{**SMALL, "compress": True}, seed=seed, processes=processes)
        assert plan["files"][0].endswith("rank-00000.json.gz")
        texts.append([Path(f).read_bytes() for f in plan["files"]])
    assert texts[0] == texts[1]
    assert all(a != c for a, c in zip(texts[0], texts[2], strict=True))


def test_files_that_are_not_whole_or_not_there_and_old_ones(tmp_path: Path) -> None:
    plan = write_set(tmp_path, **SMALL, only=[0, 2], truncated={2: 0.9}, comm_args=False)
    assert [Path(f).name for f in plan["files"]] == ["rank-00000.json", "rank-00002.json"]
    with pytest.raises(json.JSONDecodeError):
        _events(plan["files"][1])
    kernels = _named(_events(plan["files"][0]), "ncclDevKernel", "kernel")
    assert kernels
    assert not any("Seq" in e["args"] or "Collective name" in e["args"] for e in kernels)
    cut = write_set(tmp_path, **{**SMALL, "compress": True}, only=[1], truncated={1: 0.9})["files"][0]
    with pytest.raises((EOFError, zlib.error)):
        _events(cut)
