"""What is said of runs that were really recorded, on two and four ranks of this machine."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from lit_llm.trace.analysis import analyze
from lit_llm.trace.results import Analysis
from tests.distributed import run_ranks

TWO = {
    "ddp-sleep": {"strategy": "ddp", "fault": "sleep"},
    "fsdp-sleep": {"strategy": "fsdp", "fault": "sleep", "late": 0},
    "ddp-compute": {"strategy": "ddp", "fault": "compute"},
    "ahead": {"strategy": "fsdp", "hidden_size": 384, "layers": 3},
    "blocking": {"strategy": "fsdp", "hidden_size": 384, "layers": 3, "prefetch": 0},
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of :data:`TWO`."""
    folder = tmp_path_factory.mktemp("two")
    run_ranks("tests.trace_recorded_runs:record_all", 2, folder=str(folder), cases=TWO, timeout=240)
    return folder


def _named(found: Analysis) -> tuple[int, str]:
    assert found.straggler is not None, [(one.code, one.message) for one in found.verdicts]
    return found.straggler.rank, found.straggler.cause


@pytest.mark.parametrize(("name", "late"), [("ddp-sleep", 1), ("fsdp-sleep", 0)])
def test_a_rank_with_slow_data_is_named(two: Path, name: str, late: int) -> None:
    found = analyze(two / name)
    assert _named(found) == (late, "data_loading")
    slow, other = found.ranks[late].split.dataloader, found.ranks[1 - late].split.dataloader
    assert slow is not None
    assert other is not None
    assert slow - other > 3 * 55_000_000  # three steps of 60 ms, less a little noise


def test_a_rank_with_more_to_compute_is_named(two: Path) -> None:
    rank, cause = _named(analyze(two / "ddp-compute"))
    assert rank == 1
    assert cause in ("slow_host", "slow_device", "uneven_work")


def _skewed(source: Path, target: Path, rank: int, ns: int) -> None:
    """A copy of a window in which one rank's clock is ahead."""
    target.mkdir()
    for file in source.iterdir():
        text = gzip.decompress(file.read_bytes()).decode()
        if file.name == f"rank-{rank:05d}.json.gz":
            text, count = re.subn(r'("baseTimeNanoseconds": )(\d+)', lambda m: f"{m[1]}{int(m[2]) + ns}", text)
            assert count == 1
        (target / file.name).write_bytes(gzip.compress(text.encode(), 1))


@pytest.mark.parametrize("name", ["ddp-sleep", "fsdp-sleep"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_clock_that_is_37_ms_ahead_changes_no_answer(two: Path, tmp_path: Path, name: str, rank: int) -> None:
    (window,) = (two / name / "traces").iterdir()
    _skewed(window, tmp_path / "skewed", rank, 37_000_000)
    straight, skewed = analyze(window), analyze(tmp_path / "skewed")
    assert _named(skewed) == _named(straight)
    offset = skewed.ranks[1].clock_offset
    assert offset is not None
    assert abs(offset - (37_000_000 if rank else -37_000_000)) < 10_000_000  # of gloo's own ends; see TRACES.md
    assert skewed.ranks[1].clock_applied


def test_prefetch_shows_in_the_table_of_layers(two: Path) -> None:
    shares = {}
    for name in ("ahead", "blocking"):
        layers = {one.layer: one for one in analyze(two / name).fsdp_layers}
        assert set(layers) == {"(root)", "layers.0", "layers.1", "layers.2"}
        rest = [layers[f"layers.{number}"] for number in (1, 2)]  # those with a layer before them
        phases = [one.phases["forward"] for one in rest]
        shares[name] = sum(one.exposed for one in phases) / sum(one.gather for one in phases)
        assert all(
            one.early == (1.0 if name == "ahead" else 0.5) for one in rest
        )  # torch itself does so in the backward
    assert shares["blocking"] > 0.9
    assert shares["ahead"] < 0.6


def test_every_rank_recorded_the_same_steps(two: Path) -> None:
    for name in TWO:
        found = analyze(two / name)
        assert [[step.step for step in rank.steps] for rank in found.ranks] == [[4, 5, 6]] * 2
        assert not found.missing_ranks
        assert [line.message for line in found.health] == []
        for rank in found.ranks:
            assert rank.split.optimizer
            assert rank.split.comm_waiting is not None
            assert rank.split.comm_waiting + (rank.split.comm_transfer or 0) == rank.split.comm_exposed


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
@pytest.mark.parametrize("late", [0, 2, 3])
def test_four_sharded_ranks(tmp_path: Path, strategy: str, late: int) -> None:
    cases = {"run": {"strategy": strategy, "fault": "sleep", "late": late}}
    run_ranks("tests.trace_recorded_runs:record_all", 4, folder=str(tmp_path), cases=cases, timeout=240)
    assert _named(analyze(tmp_path / "run")) == (late, "data_loading")


@pytest.mark.slow
def test_ten_even_runs_give_one_false_alarm_at_most(tmp_path: Path) -> None:
    cases = {f"{strategy}-{run}": {"strategy": strategy} for strategy in ("ddp", "fsdp") for run in range(5)}
    run_ranks("tests.trace_recorded_runs:record_all", 2, folder=str(tmp_path), cases=cases, timeout=400)
    found = {name: analyze(tmp_path / name) for name in cases}
    verdicts = {name: [(v.code, v.severity, v.message) for v in one.verdicts] for name, one in found.items()}
    assert not any(severity != "info" for rows in verdicts.values() for _, severity, _ in rows), verdicts
    assert sum(one.straggler is not None for one in found.values()) <= 1, verdicts
