"""Reports of an analysis: figures as text, JSON, terminal. The page has test_trace_page.py."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lit_llm.errors import UserError
from lit_llm.trace import look, units
from lit_llm.trace.json_report import to_json, write_json
from lit_llm.trace.results import Analysis, CollectiveKind, Health, Kernel, Verdict
from lit_llm.trace.terminal import choose_ranks, render
from tests.trace_samples import HOSTILE, MS, cpu_pair, gpus


def printed(analysis: Analysis, width: int = 80, encoding: str = "utf-8") -> str:
    """What a console that is no terminal gets."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    render(analysis, Console(file=file, width=width))
    file.flush()
    return raw.getvalue().decode(encoding)


# --- figures as text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0, "0"),
        (1, "1 ns"),
        (999, "999 ns"),
        (999.7, "1.00 µs"),
        (12_340, "12.3 µs"),
        (999_600, "1.00 ms"),
        (412_345_678, "412 ms"),
        (999_499_999, "999 ms"),
        (999_600_000, "1.00 s"),
        (4_321_000_000_000, "4,321 s"),
        (-37_123_000, "-37.1 ms"),
    ],
)
def test_durations(ns: float | None, text: str) -> None:
    assert units.duration(ns) == text


def test_shares_never_claim_the_whole_or_nothing() -> None:
    shares = [0, 0.00001, 0.0994, 0.0996, 0.5, 0.996, 0.99999, 1, None]
    assert [units.percent(value) for value in shares] == [
        "0%",
        "<0.1%",
        "9.9%",
        "10%",
        "50%",
        "99.6%",
        "99.9%",
        "100%",
        "–",
    ]
    assert units.share(1, 0) == units.share(None, 3) == "–"


def test_sizes_and_lists() -> None:
    assert [units.size(value) for value in (0, 999, 999_600, 42e9, None)] == ["0 B", "999 B", "1.00 MB", "42.0 GB", "–"]
    assert units.rate(171e9) == "171 GB/s"
    assert units.named("rank", [7, 3, 1, 2, 2]) == "ranks 1-3, 7"
    assert units.named("step", [5]) == "step 5"
    assert units.numbers(list(range(0, 40, 2)), limit=3) == "0, 2, 4 and 17 more"


def test_long_names_keep_both_ends_and_no_control_characters() -> None:
    short = units.shorten("begin" + "x" * 300 + "end", 20)
    assert len(short) == 20
    assert short.startswith("begin")
    assert short.endswith("end")
    assert units.clean("a\x1b[31m\nb\x9b\ud800") == "a?[31m b??"


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_json_has_the_fields_of_the_contract() -> None:
    found = to_json(gpus(8))
    split = {"compute_us", "comm_exposed_us", "comm_hidden_us", "mem_exposed_us", "idle_us", "dataloader_us"}
    rank = found["ranks"][0]
    more = {"rank", "file", "host", "device", "truncated", "clock_offset_us", "window_us", "comm_waiting_us"}
    assert split | more | {"comm_transfer_us", "idle_by_cause", "optimizer_us"} <= set(rank)
    assert split | {"step", "duration_us", "window_us", "lag_us"} <= set(rank["steps"][0])
    assert set(rank["idle_by_cause"]) == {"data_loading", "host_sync", "launch", "dependency", "other"}
    assert {"kind", "count", "total_us", "exposed_us", "hidden_us", "bytes"} <= set(found["collectives"][0])
    assert {"layer", "gather_us", "hidden_us", "exposed_us"} <= set(found["fsdp_layers"][0])
    assert {"name", "calls", "total_us", "mean_us", "share"} <= set(found["top_kernels"][0])
    assert set(found["straggler"]) == {"rank", "median_lag_us", "steps_led", "steps", "cause"}
    assert {"code", "severity", "ranks", "message", "evidence", "advice"} <= set(found["verdicts"][0])
    assert found["health"][0] == {"rank": 3, "message": "the file ends early: some kernels are lost"}


def test_json_buckets_add_up_to_the_nanosecond() -> None:
    for rank in to_json(gpus(8))["ranks"]:
        for part in (rank, *rank["steps"]):
            buckets = [part[f"{name}_us"] for name in ("compute", "comm_exposed", "mem_exposed", "idle")]
            assert sum(round(value * 1000) for value in buckets) == round(part["window_us"] * 1000)
            assert sum(buckets) == pytest.approx(part["window_us"], abs=1e-6)
            assert sum(round(v * 1000) for v in part["idle_by_cause"].values()) == round(part["idle_us"] * 1000)
    first = gpus(8).ranks[0]
    assert to_json(gpus(8))["ranks"][0]["compute_us"] == first.split.compute / 1000  # type: ignore[operator]


def test_json_says_null_for_what_a_trace_cannot_tell() -> None:
    analysis = replace(cpu_pair(), straggler=None)
    analysis.ranks[0].steps[0].lag = None
    analysis.top_kernels.append(Kernel("x", 1, 5, 5.0, 5, math.nan, 0, math.inf))
    found = json.loads(json.dumps(to_json(analysis), allow_nan=False))
    rank = found["ranks"][0]
    assert [rank[f"{name}_us"] for name in ("window", "compute", "mem_exposed", "idle")] == [None] * 4
    assert rank["idle_by_cause"] is None
    assert rank["steps"][0]["lag_us"] is None
    assert rank["steps"][1]["lag_us"] == 1000.0
    assert rank["dataloader_us"] == 6000.021
    assert found["straggler"] is None
    assert found["top_kernels"][-1]["share"] is None
    assert found["top_kernels"][-1]["slowest_ratio"] is None


def test_json_file_is_whole_and_replaces_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    write_json(gpus(2), path)
    write_json(cpu_pair(), path)
    assert json.loads(path.read_text()) == to_json(cpu_pair())
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file" / "report.json", tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match="can't write the report to") as caught:
            write_json(cpu_pair(), path)
        assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "x"


def test_half_a_surrogate_in_a_name_does_no_harm(tmp_path: Path) -> None:
    analysis = cpu_pair()
    analysis.top_kernels[0].name = "broken \ud800"
    assert json.loads(write_json(analysis, tmp_path / "a.json").read_text())["top_kernels"][0]["name"]
    assert "broken ?" in printed(analysis)


# --- bars ------------------------------------------------------------------------------------------------------------


def test_bars_add_up_to_the_window_or_the_steps() -> None:
    for rank in gpus(8).ranks:
        assert sum(part.value for part in look.parts(rank)) == rank.split.window
    for rank in cpu_pair().ranks:
        assert sum(part.value for part in look.parts(rank)) == sum(step.duration for step in rank.steps)


def test_bars_without_a_split_of_waiting_or_causes() -> None:
    rank = gpus(2).ranks[0]
    rank.split.comm_waiting = rank.split.comm_transfer = rank.split.idle_by_cause = None
    assert [part.key for part in look.parts(rank)] == ["compute", "comm", "memory", "idle"]
    assert sum(part.value for part in look.parts(rank)) == rank.split.window


# --- terminal --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("analysis", [cpu_pair(), gpus(8), gpus(128)], ids=["2", "8", "128"])
def test_terminal_report_fits(analysis: Analysis, width: int) -> None:
    text = printed(analysis, width)
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    places = [
        text.index(words) for words in ("CRITICAL", "What to do", "Ranks\n", "Collectives", "Top ", "Health of the")
    ]
    assert places == sorted(places)
    assert f"rank {analysis.straggler.rank}" in text  # type: ignore[union-attr]


def test_terminal_report_of_many_ranks_is_short_and_shows_the_slow_one() -> None:
    text = printed(gpus(128))
    assert len(text.splitlines()) < 90
    row = next(line for line in text.splitlines() if line.strip().startswith("80 "))
    assert row.rstrip().endswith("43.3 ms")
    assert "... 120 more alike: 352 ms to 353 ms a step" in text
    chosen = [rank.rank for rank in choose_ranks(gpus(128), 12)]
    assert chosen == sorted(chosen)
    assert 80 in chosen
    by_lag = sorted(gpus(128).ranks, key=lambda rank: look.lag_time(rank) or 0)
    assert by_lag[0].rank in chosen  # the best, beside the worst


def test_terminal_report_names_many_flagged_ranks_within_the_limit() -> None:
    analysis = gpus(128)
    analysis.verdicts.append(Verdict("launch_bound", "warning", list(range(40)), "m", "e", "a"))
    assert len(choose_ranks(analysis, 12)) == 12
    assert 80 in [rank.rank for rank in choose_ranks(analysis, 12)]


def test_terminal_report_in_plain_letters() -> None:
    text = printed(gpus(8), encoding="ascii")
    assert "###" in text
    assert "==ww" in text
    assert "908 us" in text


def test_terminal_report_takes_names_literally() -> None:
    analysis = cpu_pair()
    analysis.health.append(Health(0, "[bold]not markup[/] \x1b[2J"))
    analysis.collectives.append(CollectiveKind("[/broken", "[red]", None, 1, 0, 0, 0, None))
    text = printed(analysis, 200)
    assert "[bold]not markup[/] ?[2J" in text
    assert "[/broken [[red]]" in text
    assert HOSTILE[-20:] in text


@pytest.mark.parametrize("analysis", [Analysis("empty", []), Analysis("x", [cpu_pair().ranks[0]])], ids=["none", "one"])
def test_reports_of_nearly_nothing(analysis: Analysis) -> None:
    from lit_llm.trace.html import page

    assert analysis.source in printed(analysis)
    assert f"<h1>{analysis.source}</h1>" in page(analysis)
    json.dumps(to_json(analysis), allow_nan=False)


def test_ranks_without_steps_are_reported() -> None:
    from lit_llm.trace.html import page

    analysis = replace(gpus(8), straggler=None, timeline=None, gaps=[], fsdp_layers=[], collectives=[], verdicts=[])
    for rank in analysis.ranks:
        rank.steps = []
    assert "no step marks" in printed(analysis)
    text = page(analysis)
    assert "no step marks" in text
    assert "Nothing to compare" in text


def test_the_worst_verdict_comes_first() -> None:
    analysis = gpus(2)
    analysis.verdicts.reverse()
    assert [verdict.severity for verdict in look.by_severity(analysis)] == ["critical", "warning", "info"]
    text = printed(analysis)
    assert text.index("CRITICAL") < text.index("WARNING") < text.index("INFO")


def test_the_summary_says_what_is_missing() -> None:
    analysis = replace(gpus(8), world_size=16, missing_ranks=list(range(8, 16)))
    assert look.summary(analysis) == "8 of 16 ranks on 1 host, GPU, steps 2000-2003, missing: ranks 8-15"


def test_reports_need_no_torch() -> None:
    script = (
        "import sys; import lit_llm.trace.html, lit_llm.trace.terminal, lit_llm.trace.json_report\n"
        "print([m for m in ('torch', 'lightning', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_lag_and_step_medians() -> None:
    rank = cpu_pair().ranks[1]
    assert look.lag_time(rank) == 61 * MS
    rank.steps[0].lag = None
    assert look.lag_time(rank) == 61.5 * MS
    assert look.median([]) is None
