"""`lit-llm trace` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_llm.cli.main import main
from lit_llm.errors import UserError
from lit_llm.trace.analysis import analyze
from lit_llm.trace.conditions import FIGURES, Condition
from tests.synthetic_traces import write_set

_SPLIT = {"compute_us", "comm_exposed_us", "comm_hidden_us", "mem_exposed_us", "idle_us", "dataloader_us"}
_RANK = {"rank", "file", "host", "device", "truncated", "clock_offset_us", "steps", "window_us", "idle_by_cause"}
RANK = _SPLIT | _RANK | {"comm_waiting_us", "comm_transfer_us", "optimizer_us"}
STEP = _SPLIT | {"step", "duration_us"}
ROWS = {
    "collectives": {"kind", "count", "total_us", "exposed_us", "hidden_us", "bytes"},
    "fsdp_layers": {"layer", "gather_us", "hidden_us", "exposed_us"},
    "top_kernels": {"name", "calls", "total_us", "mean_us", "share"},
    "verdicts": {"code", "severity", "ranks", "message", "evidence", "advice"},
    "health": {"rank", "message"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks of a run whose rank 2 is slow, in a window of a run's folder."""
    run = tmp_path_factory.mktemp("run")
    (run / "traces" / "step-000100").mkdir(parents=True)
    write_set(run / "traces" / "step-000100", ranks=4, steps=3, layers=2, slow_rank={2: 1.5})
    return run


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("even")
    write_set(path, ranks=4, steps=3, layers=2)
    return path


def _run(*words: Any) -> int:
    return main(["trace", *map(str, words)])


def test_json_has_the_fields_of_the_contract(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert _run(folder, "--json", file) == 0
    report = json.loads(file.read_text())
    assert set(report) >= {"ranks", "straggler", *ROWS}
    for rank in report["ranks"]:
        assert set(rank) >= RANK
        assert rank["device"] == "gpu"
        assert set(rank["idle_by_cause"]) == {"data_loading", "host_sync", "launch", "dependency", "other"}
        for step in rank["steps"]:
            assert set(step) >= STEP
    for name, fields in ROWS.items():
        assert all(set(row) >= fields for row in report[name]), name
    for name in ("collectives", "fsdp_layers", "top_kernels", "verdicts"):
        assert report[name], name
    straggler = report["straggler"]
    assert {"rank", "median_lag_us", "steps_led", "steps", "cause"} <= set(straggler)
    assert (straggler["rank"], straggler["cause"]) == (2, "slow_device")
    told = capsys.readouterr().out
    assert "Rank 2 (node-0) computes the same more slowly" in told
    assert f"written: {file}" in told


def test_page_shows_a_step(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    assert _run(folder, "--html", file) == 0
    text = file.read_text()
    assert "default-src 'none'" in text  # nothing is fetched
    assert "GPU stream 7" in text


def test_timeline_is_of_the_same_time_on_all_ranks(folder: Path) -> None:
    found = analyze(folder, timeline=True).timeline
    assert found is not None
    assert [one.rank for one in found.ranks] == [0, 1, 2, 3]
    for one in found.ranks:
        spans = [span for lane in one.lanes for span in lane.spans]
        assert all(found.start <= span.start < span.end <= found.end for span in spans)
        compute = [span for lane in one.lanes for span in lane.spans if span.kind == "compute"]
        assert sum(span.end - span.start for span in compute) > 0.4 * (found.end - found.start)


@pytest.mark.parametrize(
    ("condition", "code"),
    [
        ("straggler_lag_us>1000", 1),
        ("straggler_lag_us > 1e9", 0),
        ("comm_exposed_pct>0", 1),
        ("comm_exposed_pct>99%", 0),
        ("warnings>0 and idle_pct<100", 1),
        ("idle_pct>100 or missing_ranks==0", 1),
        ("criticals>=99,step_us<0", 0),
    ],
)
def test_fail_on_gives_the_exit_code(
    folder: Path, condition: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(folder, "--fail_on", condition) == code
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("fail_on: " if code else "fail_on does not hold: ")


def test_every_figure_can_be_named(folder: Path) -> None:
    analysis = analyze(folder)
    for name in FIGURES:
        assert Condition(f"{name}>=-1").holds(analysis), name


def test_a_figure_that_the_traces_do_not_tell_is_no_answer(tmp_path: Path) -> None:
    write_set(tmp_path, ranks=2, steps=2, layers=1, only=[0])
    with pytest.raises(UserError, match="do not tell comm_waiting_pct"):
        Condition("comm_waiting_pct>5").holds(analyze(tmp_path))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--fail_on", "comm_exposed>5"], "did you mean comm_exposed_pct?"),
        (["--fail_on", "comm_exposed_pct"], "'comm_exposed_pct' compares nothing"),
        (["--fail_on", ""], "compares nothing"),
        (["--processes", "0"], "--processes must be at least 1; got 0"),
        (["--json", "/no/such/folder/x.json"], "its folder does not exist"),
        (["--json", "same", "--html", "same"], "are both same; name two files"),
        (["--jsn", "x"], "--json"),
        (["--against", "/no/such/run"], "/no/such/run"),
    ],
)
def test_a_mistake_is_one_line(folder: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(folder, *words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("lit-llm: error: ")
    assert told in last


def test_no_traces_is_one_line_with_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tmp_path) == 2
    assert _run(tmp_path / "nowhere") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "TraceCapture" in lines[0]
    assert "nowhere" in lines[1]


def test_against_names_what_changed(
    folder: Path, even: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert _run(folder, "--against", even, "--json", file, "--html", tmp_path / "page.html") == 0
    assert "longer" in capsys.readouterr().out
    assert json.loads(file.read_text())["difference"]


def test_files_are_written_though_the_reader_of_the_report_has_gone(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "lit_llm", "trace", str(folder), "--json", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    assert process.wait(60) == 141  # not 1, which is a verdict
    assert json.loads(file.read_text())["ranks"]


def test_json_on_stdout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(folder, "--json", "-") == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert report["straggler"]["rank"] == 2
    assert report["figures"]["warnings"] >= 1
    assert "Slow rank" in told.err


def test_what_was_not_read_is_told_first(folder: Path, even: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(folder, even) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("note: ") for line in lines[:4]), lines[:6]


def test_help_needs_no_torch() -> None:
    code = "import sys; from lit_llm.cli.main import main; main(['trace', '--help']); "
    code += "print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"
    code = (
        "import sys; from lit_llm.trace.analysis import analyze; print('torch' in sys.modules, 'rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
