"""The figures of real traces, those that `shared/traces/expected.json` lists, and the identities that always hold."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_llm.trace.analysis import analyze, summarize_file
from lit_llm.trace.json_report import to_json
from lit_llm.trace.per_rank import RankSummary
from tests.synthetic_traces import write_set

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"
GPU_SETS = ("nccl_args", "dlrm_multistream", "amd", "cuda_sync", "old_categories")
SETS = (*GPU_SETS, "cpu_only_gloo", "cpu_ddp_straggler", "cpu_fsdp2")
needs_shared = pytest.mark.skipif(not (SHARED / "expected.json").exists(), reason="the real traces are not here")


def _expected(name: str) -> dict[str, Any]:
    return json.loads((SHARED / "expected.json").read_text())[name]


@needs_shared
@pytest.mark.parametrize("name", SETS)
def test_figures_of_real_traces(name: str) -> None:
    expected = _expected(name)
    report = to_json(analyze(SHARED / expected["folder"]))
    assert len(report["ranks"]) == len(expected["ranks"])
    for rank, want in zip(report["ranks"], expected["ranks"], strict=True):
        assert want["rank"] in (rank["rank"], None)
        steps = {f"ProfilerStep#{step['step']}": step["duration_us"] for step in rank["steps"]}
        assert steps == pytest.approx(want["profiler_steps"], abs=1)
        if want["gpu"] is None:
            assert rank["device"] == "cpu"
            assert [rank[key] for key in ("window_us", "compute_us", "mem_exposed_us", "idle_us")] == [None] * 4
        else:
            for key, value in want["gpu"].items():
                if key != "n":
                    assert rank[key] == pytest.approx(value, abs=1), key
            parts = ("compute_us", "comm_exposed_us", "mem_exposed_us", "idle_us")
            for one in (rank, *rank["steps"]):  # exactly, as decimals of a nanosecond
                assert round(one["window_us"] * 1000) == sum(round(one[part] * 1000) for part in parts)
        if "cpu" in expected:
            for key, value in expected["cpu"][str(rank["rank"])].items():
                assert rank[key] == pytest.approx(value, abs=1), key
    for step, lags in expected.get("first_collective_lag_us_per_step", {}).items():
        for rank, want in lags.items():
            found = next(s for s in report["ranks"][int(rank)]["steps"] if f"ProfilerStep#{s['step']}" == step)
            assert found["lag_us"] == pytest.approx(want["lag_max_us"], abs=1)


@needs_shared
def test_straggler_of_real_traces() -> None:
    slow = analyze(SHARED / "cpu_ddp_straggler")
    assert slow.straggler is not None
    assert (slow.straggler.rank, slow.straggler.cause) == (1, "data_loading")
    balanced = analyze(SHARED / "cpu_fsdp2")
    assert balanced.straggler is None
    assert all(one.severity == "info" for one in balanced.verdicts)


@needs_shared
@pytest.mark.parametrize("name", SETS)
def test_events_are_of_the_kinds_that_are_listed(name: str) -> None:
    expected = _expected(name)
    for want, file in zip(expected["ranks"], sorted((SHARED / expected["folder"]).iterdir()), strict=True):
        found = summarize_file(str(file))
        assert found.gpu_events == (want["gpu"] or {"n": {}})["n"]


# Identities on made traces, which every machine has


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[RankSummary]:
    folder = tmp_path_factory.mktemp("made")
    write_set(folder, ranks=3, layers=3, steps=3, host_sync=1, noise=0.05)
    return [summarize_file(str(file)) for file in sorted(folder.iterdir())]


def _reference(file: str) -> dict[str, int]:
    """The four parts by marking each nanosecond... of a grid: every time between two edges is looked at by itself."""
    events = [one for one in json.loads(_text(file))["traceEvents"] if one.get("ph") == "X"]
    gpu = [one for one in events if one["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = []
    for one in gpu:
        start = round(float(one["ts"]) * 1000)
        kind = "copy" if one["cat"] != "kernel" else "comm" if "nccl" in one["name"] else "compute"
        spans.append((start, start + round(float(one["dur"]) * 1000), kind))
    edges = sorted({edge for start, end, _ in spans for edge in (start, end)})
    place = {edge: number for number, edge in enumerate(edges)}
    busy = {kind: np.zeros(len(edges), dtype=bool) for kind in ("compute", "comm", "copy")}
    for start, end, kind in spans:
        busy[kind][place[start] : place[end]] = True
    width = np.append(np.diff(edges), 0)
    comm_alone = busy["comm"] & ~busy["compute"]
    return {
        "window": edges[-1] - edges[0],
        "compute": int(width[busy["compute"]].sum()),
        "comm_exposed": int(width[comm_alone].sum()),
        "comm_hidden": int(width[busy["comm"] & busy["compute"]].sum()),
        "mem_exposed": int(width[busy["copy"] & ~busy["comm"] & ~busy["compute"]].sum()),
        "idle": int(width[~busy["compute"] & ~busy["comm"] & ~busy["copy"]].sum()),
    }


def _text(file: str) -> str:
    return gzip.decompress(Path(file).read_bytes()).decode()


def test_split_is_that_of_a_short_reference(made: list[RankSummary]) -> None:
    for rank in made:
        for name, value in _reference(rank.path).items():
            assert getattr(rank.split, name) == value, name


def test_parts_add_up_exactly(made: list[RankSummary]) -> None:
    for rank in made:
        assert len(rank.step_splits) == 3
        for split in (rank.split, *rank.step_splits):
            assert split.window == split.compute + split.comm_exposed + split.mem_exposed + split.idle
            assert split.idle == sum(split.idle_by_cause.values())
            assert min(split.idle_by_cause.values()) >= 0
        windows = rank.windows
        assert (windows[1:, 0] == windows[:-1, 1]).all()  # steps follow one another: nothing counts twice or not at all
        assert rank.split.window >= sum(split.window for split in rank.step_splits)


def test_a_mirror_of_the_step_marks_on_the_gpu_counts_once(made: list[RankSummary]) -> None:
    assert made[0].marks.numbers.tolist() == [100, 101, 102]
