"""Faults that are planted in made runs on GPUs are found, none is invented, and bad sets of files lose nothing."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lit_llm.errors import UserError
from lit_llm.trace.analysis import analyze
from lit_llm.trace.results import Analysis, Verdict
from tests.synthetic_traces import write_set

RUN: dict[str, Any] = {"ranks": 8, "steps": 4}


def _analysed(folder: Path, **fields: Any) -> Analysis:
    write_set(folder, **{**RUN, **fields})
    return analyze(folder)


def _grave(analysis: Analysis) -> list[Verdict]:
    return [one for one in analysis.verdicts if one.severity != "info"]


@pytest.mark.parametrize(
    "fields",
    [{}, {"seed": 7, "noise": 0.05}, {"noise": 0.1}, {"comm_args": False}, {"ranks": 2}, {"carry_over": False}],
    ids=str,
)
def test_nothing_is_found_in_an_even_run(tmp_path: Path, fields: dict[str, Any]) -> None:
    found = _analysed(tmp_path, **fields)
    assert {one.code for one in found.verdicts} == {"no_straggler", "healthy"}
    assert found.straggler is None


@pytest.mark.parametrize(
    ("fields", "rank", "cause"),
    [
        ({"slow_rank": {3: 1.25}}, 3, "slow_device"),
        ({"slow_rank": {3: 1.25}, "comm_args": False, "seed": 3}, 3, "slow_device"),
        ({"slow_rank": {0: 1.1}}, 0, "slow_device"),
        ({"slow_host": {5: 8.0}}, 5, "slow_host"),
        ({"slow_loader": {6: 20.0}}, 6, "data_loading"),
        ({"uneven_work": {1: 0.2}}, 1, "uneven_work"),
        ({"slow_rank": {1: 1.25}, "ranks": 2}, 1, "slow_device"),
    ],
    ids=str,
)
def test_a_slow_rank_is_named_with_its_cause(tmp_path: Path, fields: dict[str, Any], rank: int, cause: str) -> None:
    found = _analysed(tmp_path, **fields)
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.cause) == (rank, cause)
    assert found.straggler.steps_led == found.straggler.steps == 4
    assert [(one.code, one.ranks) for one in _grave(found)] == [("straggler", [rank])]


def test_a_clock_that_is_ahead_changes_no_answer(tmp_path: Path) -> None:
    skew = {1: 37_000_000, 4: -5_000_000, 3: 250_000}
    one = _analysed(tmp_path / "a", slow_rank={3: 1.25})
    other = _analysed(tmp_path / "b", slow_rank={3: 1.25}, skew_ns=skew)
    assert [(v.code, v.ranks, v.severity) for v in one.verdicts] == [
        (v.code, v.ranks, v.severity) for v in other.verdicts
    ]
    assert one.straggler is not None
    assert other.straggler is not None
    assert other.straggler.median_lag == pytest.approx(one.straggler.median_lag, abs=2_000)
    for rank in other.ranks:
        assert rank.clock_offset == pytest.approx(skew.get(rank.rank, 0), abs=2_000)  # ends differ by 0.5 us
        assert rank.clock_applied == (rank.rank in skew)


def test_several_slow_ranks_are_named_together(tmp_path: Path) -> None:
    found = _analysed(tmp_path, ranks=16, ranks_per_host=4, slow_rank={4: 1.3, 5: 1.3, 6: 1.3, 7: 1.3})
    (verdict,) = _grave(found)
    assert sorted(verdict.ranks) == [4, 5, 6, 7]
    assert "(node-1)" in verdict.message


def test_half_of_the_ranks_may_lag(tmp_path: Path) -> None:
    found = _analysed(tmp_path, ranks=16, ranks_per_host=8, slow_rank=dict.fromkeys(range(8, 16), 1.3))
    (verdict,) = _grave(found)
    assert sorted(verdict.ranks) == list(range(8, 16))
    assert verdict.message.startswith("Ranks 8-15 (node-1) compute the same more slowly")


def test_a_late_rank_that_was_not_recorded_leaves_the_question_open(tmp_path: Path) -> None:
    found = _analysed(tmp_path, slow_rank={3: 1.3}, only=[0, 2, 4, 6])
    assert found.straggler is None
    assert all(rank.split.comm_waiting is None for rank in found.ranks)  # not 0: it can't be told
    (verdict,) = [one for one in found.verdicts if one.code == "no_straggler"]
    assert verdict.confidence == "low"
    assert verdict.message.startswith("None of the 4 ranks")


def test_ranks_that_are_late_in_turn_are_no_stalls_and_no_straggler(tmp_path: Path) -> None:
    stalls = [(1 + step % 2, step, 30.0) for step in range(100, 106)]
    found = _analysed(tmp_path, ranks=4, steps=6, data_stall=stalls)
    assert found.straggler is None
    assert not [one for one in found.verdicts if one.code in ("one_off_stall", "healthy")]
    (verdict,) = [one for one in found.verdicts if one.code == "no_straggler"]
    assert "ranks 1-2" in verdict.message


def test_a_stall_of_all_ranks_is_told_once(tmp_path: Path) -> None:
    found = _analysed(tmp_path, ranks=4, steps=5, data_stall=[(rank, 102, 80.0) for rank in range(4)])
    assert [(one.code, one.steps, one.ranks) for one in _grave(found)] == [("one_off_stall", [102], [])]
    assert "fetching its data" in _grave(found)[0].message


def test_two_slow_loaders_of_four_are_not_every_rank(tmp_path: Path) -> None:
    found = _analysed(tmp_path, ranks=4, slow_loader={1: 40.0, 3: 40.0})
    assert [(one.code, sorted(one.ranks)) for one in _grave(found)] == [("straggler", [1, 3])]


def test_a_sequence_number_that_is_always_0_is_not_used(tmp_path: Path) -> None:
    write_set(tmp_path, **RUN, slow_rank={3: 1.25})
    for file in tmp_path.iterdir():
        text = gzip.decompress(file.read_bytes()).decode()
        text, count = re.subn(r'"Seq": \d+', '"Seq": 0', text)
        assert count > 10
        file.write_bytes(gzip.compress(text.encode(), 1))
    found = analyze(tmp_path)
    assert found.straggler is not None
    assert found.straggler.rank == 3
    assert all(abs(rank.clock_offset or 0) < 2_000 for rank in found.ranks)


def test_without_step_marks_nothing_is_said_of_steps(tmp_path: Path) -> None:
    write_set(tmp_path, **RUN, slow_rank={3: 1.25})
    for file in tmp_path.iterdir():
        text = gzip.decompress(file.read_bytes()).decode().replace("ProfilerStep#", "Step ")
        file.write_bytes(gzip.compress(text.encode(), 1))
    found = analyze(tmp_path, timeline=True)
    codes = {one.code for one in found.verdicts}
    assert "not_enough_evidence" in codes
    assert not codes & {"healthy", "prefetch_missing", "no_straggler", "straggler"}
    assert all(rank.steps == [] and rank.split.window for rank in found.ranks)


def test_a_layer_without_overlap_is_named_and_no_other(tmp_path: Path) -> None:
    found = _analysed(tmp_path, unhidden_layer=[2])
    (verdict,) = _grave(found)
    assert verdict.code == "prefetch_missing"
    assert "The gather of layers.2 does" in verdict.message
    layers = {one.layer: one for one in found.fsdp_layers}
    assert layers["layers.2"].exposed > 0.9 * layers["layers.2"].gather
    assert layers["layers.1"].exposed < 0.1 * layers["layers.1"].gather
    assert layers["layers.2"].early == 0


def test_a_single_stall_is_no_straggler(tmp_path: Path) -> None:
    found = _analysed(tmp_path, data_stall=[(2, 102, 60.0)])
    assert found.straggler is None
    (verdict,) = _grave(found)
    assert (verdict.code, verdict.ranks, verdict.steps) == ("one_off_stall", [2], [102])
    assert "fetching its data" in verdict.message


def test_reads_of_the_device_are_seen(tmp_path: Path) -> None:
    found = _analysed(tmp_path, host_sync=2, sync_return_us=2000.0)
    syncs = [one for one in found.verdicts if one.code == "host_sync"]
    assert len(syncs) == 1
    assert "aten::item 2.0 times a step" in syncs[0].evidence


def test_all_planted_faults_at_once(tmp_path: Path) -> None:
    faults = {"slow_rank": {11: 1.25}, "unhidden_layer": [2], "data_stall": [(5, 102, 60.0)]}
    found = _analysed(tmp_path, ranks=16, **faults)
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.cause) == (11, "slow_device")
    assert {one.code for one in _grave(found)} == {"straggler", "prefetch_missing", "one_off_stall"}


# Sets of files that are not as they should be


def _cut(file: Path, share: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])


def test_a_cut_rank_is_marked_and_judged_no_more(tmp_path: Path) -> None:
    write_set(tmp_path, **RUN, slow_rank={3: 1.25})
    _cut(tmp_path / "rank-00002.json.gz", 0.8)
    found = analyze(tmp_path, timeline=True)
    assert [one.rank for one in found.ranks if one.truncated] == [2]
    assert found.straggler is not None
    assert found.straggler.rank == 3
    assert [one.ranks for one in found.verdicts if one.code == "not_enough_evidence"] == [[2]]
    assert any(one.rank == 2 and "cut" in one.message for one in found.health)


def test_only_cut_ranks_give_no_verdict_on_time(tmp_path: Path) -> None:
    write_set(tmp_path, **RUN, slow_rank={3: 1.25})
    for file in tmp_path.iterdir():
        _cut(file, 0.8)
    assert {one.code for one in analyze(tmp_path).verdicts} == {"not_enough_evidence"}


def test_missing_ranks_are_named_and_the_rest_is_analysed(tmp_path: Path) -> None:
    write_set(tmp_path, **RUN, slow_rank={3: 1.25})
    for rank in (1, 5, 6):
        (tmp_path / f"rank-{rank:05d}.json.gz").unlink()
    found = analyze(tmp_path)
    assert found.missing_ranks == [1, 5, 6]
    assert any("ranks 1, 5-6 of 8 are missing" in one.message for one in found.health)
    assert found.straggler is not None
    assert found.straggler.rank == 3


def test_one_rank_alone_is_analysed_without_an_answer_on_lag(tmp_path: Path) -> None:
    write_set(tmp_path, **RUN, only=[4])
    found = analyze(tmp_path)
    assert [one.code for one in found.verdicts] == ["not_enough_evidence"]
    assert found.ranks[0].split.comm_waiting is None


def test_one_step_is_not_enough(tmp_path: Path) -> None:
    found = _analysed(tmp_path, steps=1, slow_rank={3: 1.25})
    assert found.straggler is None
    assert "not_enough_evidence" in {one.code for one in found.verdicts}


def test_two_runs_mixed_are_told_apart(tmp_path: Path) -> None:
    write_set(tmp_path / "a", ranks=4, steps=3)
    write_set(tmp_path / "b", ranks=2, steps=3, first_step=500)
    for file in (tmp_path / "b").iterdir():
        shutil.copy(file, tmp_path / "a" / f"other-{file.name}")
    found = analyze(tmp_path / "a")
    assert [one.rank for one in found.ranks] == [0, 1, 2, 3]
    assert any("mixed" in one.message and "other-rank" in one.message for one in found.health)


def test_ranks_with_different_steps_are_compared_on_the_common_ones(tmp_path: Path) -> None:
    write_set(tmp_path, **RUN, slow_rank={3: 1.25})
    file = tmp_path / "rank-00003.json.gz"
    text = gzip.decompress(file.read_bytes()).decode().replace("ProfilerStep#103", "ProfilerStep#999")
    file.write_bytes(gzip.compress(text.encode()))
    found = analyze(tmp_path)
    assert any("different steps" in one.message for one in found.health)
    assert found.straggler is not None
    assert found.straggler.rank == 3


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    write_set(tmp_path, **RUN)
    (tmp_path / "rank-00002.json.gz").write_bytes(b"no trace at all")
    (tmp_path / "notes.json").write_text(json.dumps({"a": 1}))
    found = analyze(tmp_path)
    assert [one.rank for one in found.ranks] == [0, 1, 3, 4, 5, 6, 7]
    assert any("rank-00002.json.gz" in one.message for one in found.health)


@pytest.mark.parametrize("content", [None, "{}", "[]", '{"traceEvents": []}', "x" * 1000])
def test_nothing_to_read_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "rank0.pt.trace.json").write_text(content)
    if content == '{"traceEvents": []}':  # a trace of nothing is one
        assert analyze(tmp_path).ranks[0].steps == []
        return
    with pytest.raises(UserError) as told:
        analyze(tmp_path)
    assert str(tmp_path) in str(told.value)
    assert "\n" not in str(told.value)


def test_processes_give_the_same_as_one(tmp_path: Path) -> None:
    write_set(tmp_path, **RUN, slow_rank={3: 1.25})
    (tmp_path / "rank-00006.json.gz").write_bytes(b'{"traceEvents": 5')
    one, two = (analyze(tmp_path, processes=number, timeline=True) for number in (1, 2))
    one.seconds = two.seconds = 0.0
    assert one == two
