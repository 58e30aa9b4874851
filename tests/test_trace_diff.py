"""What changed between two runs: planted differences are named, equal runs are not told apart."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lit_llm.cli.main import main
from lit_llm.trace.analysis import analyze
from lit_llm.trace.diff import compare
from lit_llm.trace.diff_terminal import render_difference
from lit_llm.trace.diff_totals import compare_kernels, without_arguments, without_numbers
from lit_llm.trace.html import page
from lit_llm.trace.json_report import to_json
from lit_llm.trace.results import Analysis, Difference, Figure, Kernel, Verdict
from tests.synthetic_traces import write_set
from tests.trace_samples import HOSTILE, MS, cpu_pair, gpus

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"
Make = Callable[..., Analysis]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Analyses of made GPU sets, each made once."""
    kept: dict[str, Analysis] = {}

    def make(**fields: Any) -> Analysis:
        key = repr(sorted(fields.items()))
        if key not in kept:
            folder = tmp_path_factory.mktemp("set")
            write_set(folder, **{"ranks": 4, "layers": 4, "steps": 3, "seed": 1, **fields})
            kept[key] = analyze(folder, processes=1)
        return kept[key]

    return make


def printed(difference: Difference, width: int = 80, encoding: str = "utf-8") -> str:
    """What a console that is no terminal gets."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    render_difference(difference, Console(file=file, width=width))
    file.flush()
    return raw.getvalue().decode(encoding)


# --- planted differences ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{"seed": 2}, {"seed": 3}, {"seed": 4, "ranks": 8}, {"seed": 5, "skew_ns": {1: 37 * MS}}]
)
def test_equal_runs_are_not_told_apart(made: Make, fields: dict[str, Any]) -> None:
    found = compare(made(**fields), made(seed=0))
    assert found.summary.startswith("No change beyond the noise: 55 ms a step, 55 ms before")
    assert not any(one.clear for one in (found.step, found.exposed, *found.parts.values()))
    assert not any(row.clear for row in found.kernels)
    assert not any(row.exposed.clear for row in (*found.collectives, *found.layers))
    assert found.ranks == found.new == found.gone == []
    assert len(found.notes) == ("ranks" in fields)


@pytest.mark.parametrize(
    ("fields", "part", "words"),
    [
        ({"slow_rank": {2: 1.2}}, "waiting", "rank 2 has 10 ms more compute"),
        ({"uneven_work": {1: 0.3}}, "waiting", "rank 1 has 18 ms more compute"),
        ({"slow_loader": {3: 60.0}}, "waiting", "rank 3 has 45 ms more idling for data"),
        ({"slow_host": {1: 8.0}}, "waiting", "rank 1 has 70 ms more idling for launches"),
        ({"unhidden_layer": [2]}, "transfer", "Exposed gathers, a step and rank: layers.2 (2.1 ms more). Now: gathers"),
        ({"host_sync": 3}, "transfer", "us more idling while the host synchronises"),
        ({"transfer": 1.5}, "transfer", "Now: communication-bound"),
        ({"kernel_us": 600.0}, "compute", "Changed most, a step and rank: sm90_xmma_gemm"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_was_planted_is_named_and_gone_again(made: Make, fields: dict[str, Any], part: str, words: str) -> None:
    base, after = made(seed=0), made(**fields)
    found = compare(after, base)
    assert found.step.clear
    assert found.step.change is not None
    assert found.step.change > 0
    clear = {key: one.change or 0 for key, one in found.parts.items() if one.clear}
    assert max(clear, key=lambda key: clear[key]) == part
    assert words in found.summary
    # The parts tell where the time went, all of it.
    assert sum(one.change or 0 for one in found.parts.values()) == pytest.approx(found.step.change, rel=0.1)
    back = compare(base, after)
    assert back.step.change == -found.step.change
    assert " less: " in back.summary
    assert back.summary.count("No more: ") == found.summary.count("Now: ")


def test_a_stall_in_one_step_is_no_change_of_the_step(made: Make) -> None:
    found = compare(made(data_stall=[(1, 101, 80.0)]), made(seed=0))
    assert not found.step.clear
    assert [one.code for one in found.new] == ["one_off_stall"]
    assert "within the noise" in found.summary
    assert "Now: stall in one step, rank 1" in found.summary


def test_one_step_can_not_be_told_from_noise(made: Make) -> None:
    found = compare(made(steps=1, kernel_us=600.0), made(seed=0))
    assert found.step.clear is None
    assert found.step.change is not None
    assert "one step a rank can't be told from noise" in found.summary
    assert found.notes == ["3 steps a rank before, 1 after"]
    assert "noise unknown" in printed(found)


# --- runs that are not alike -----------------------------------------------------------------------------------------


def test_cpu_runs_name_the_rank_that_sleeps() -> None:
    before = cpu_pair()
    for rank in before.ranks:
        for step in rank.steps:
            step.duration -= 60 * MS
            if rank.rank == 1:
                step.split.dataloader = 2 * MS
            else:
                step.split.comm_waiting = 0
                step.split.comm_exposed = step.split.comm_transfer or 0
    before.verdicts = []
    before.source = "before"
    found = compare(cpu_pair(), before)
    start = "A step takes 60 ms (47%) longer: 30 ms more data loading, 29 ms more waiting for late ranks. Unlike the"
    assert found.summary.startswith(start)
    assert found.summary.endswith("rank 1 has 60 ms more data loading. Now: slow rank, rank 1.")
    assert [(row.rank, row.part) for row in found.ranks] == [(1, "loading")]
    assert list(found.parts) == ["transfer", "waiting", "loading", "optimizer", "rest"]


def test_a_cpu_run_against_a_gpu_run_compares_steps_and_communication() -> None:
    found = compare(gpus(2), cpu_pair())
    assert found.device is None
    assert found.parts == {}
    assert found.kernels == []
    assert found.step.before == 188 * MS + 123
    assert found.exposed.before == 36_500_004 + 0  # the mean of 65 and 8 ms
    assert found.notes[0] == "CPU before, GPU after: only the step and the communication are compared"
    assert "all_gather" in [row.kind for row in found.collectives]
    for text in (printed(found), page(gpus(2), found)):
        assert "only the step and the communication" in " ".join(text.split())


def test_other_ranks_hosts_and_steps_are_said() -> None:
    found = compare(gpus(16, steps=5), gpus(8, steps=4))
    assert found.notes == [
        "8 ranks before, 16 after: figures are a rank's, on average",
        "1 host before, 2 after",
        "4 steps a rank before, 5 after",
    ]
    assert compare(gpus(8), gpus(8)).notes == ["both are the same traces"]
    cut = gpus(8)
    cut.ranks[3].truncated = True
    assert "1 file of the run after cut off: left out of steps, not out of kernels" in compare(cut, gpus(8)).notes
    missing = replace(gpus(8), missing_ranks=[8, 9])
    assert "2 ranks of the run before missing" in compare(gpus(8), missing).notes


@pytest.mark.parametrize("bare", [True, False], ids=["no steps", "no ranks"])
def test_runs_without_steps_can_not_be_compared(bare: bool) -> None:
    empty = gpus(2) if bare else Analysis("empty", [])
    for rank in empty.ranks:
        rank.steps = []
    for one, other in ((empty, gpus(2)), (gpus(2), empty), (empty, empty)):
        found = compare(one, other)
        assert found.summary == "The steps can't be compared: one of the runs has none."
        assert any("has no step marks" in note for note in found.notes)
        assert "can't be compared" in printed(found)
        assert "can&#39;t be compared" in page(gpus(2), found)
        json.dumps(to_json(gpus(2), found), allow_nan=False)


def test_what_one_run_does_not_tell_is_left_out() -> None:
    before = cpu_pair()
    for rank in before.ranks:
        for step in rank.steps:
            step.split.comm_waiting = step.split.comm_transfer = step.split.dataloader = None
    found = compare(cpu_pair(), before)
    assert list(found.parts) == ["comm", "optimizer", "rest"]
    assert found.notes[1:] == [
        "the run before does not tell waits for late ranks: not compared",
        "the run before does not tell data loading: not compared",
    ]
    assert found.parts["comm"].before == found.parts["comm"].after


# --- kernels ---------------------------------------------------------------------------------------------------------


def kernels(*rows: tuple[str, int, float], whole: float | None = None) -> Analysis:
    """(name, calls, ms) of each, longest first; ``whole``: ms of all there are, listed or not."""
    total = whole or sum(row[2] for row in rows)
    found = [Kernel(name, calls, int(ms * MS), ms * MS / calls, 0, ms / total) for name, calls, ms in rows]
    return replace(gpus(2), top_kernels=sorted(found, key=lambda one: -one.total))


def changes(before: Analysis, after: Analysis, noise: float = 0.0) -> dict[str, Any]:
    """By name, for 2 steps before and 4 after."""
    return {one.name: one for one in compare_kernels((before, 2), (after, 4), lambda a, b: noise)}


def test_kernels_are_compared_a_step() -> None:
    found = changes(kernels(("a", 20, 10.0), ("b", 2, 4.0)), kernels(("a", 40, 40.0), ("b", 4, 8.0)), noise=1 * MS)
    assert list(found) == ["a", "b"]
    one = found["a"]
    assert (one.status, one.calls.before, one.calls.after) == ("same", 10, 10)
    assert (one.mean.before, one.mean.after) == (0.5 * MS, 1 * MS)
    assert (one.total.before, one.total.after, one.change, one.clear) == (5 * MS, 10 * MS, 5 * MS, True)
    assert found["b"].change == 0
    assert found["b"].clear is False


def test_kernels_with_other_numbers_or_arguments_are_alike_and_exact_names_come_first() -> None:
    before = kernels(
        ("triton_poi_fused_add_3", 2, 2.0), ("gemm_64x64", 2, 4.0), ("gemm_128x64", 2, 6.0), ("f<1, g<2>>(h)", 2, 8.0)
    )
    after = kernels(
        ("triton_poi_fused_add_5", 4, 4.0), ("gemm_64x64", 4, 8.0), ("gemm_256x64", 4, 12.0), ("f<bool>(x)", 4, 16.0)
    )
    found = changes(before, after)
    pairs = {name: (one.status, one.name_before, one.change) for name, one in found.items()}
    assert pairs == {
        "gemm_64x64": ("same", None, 0),
        "gemm_256x64": ("alike", "gemm_128x64", 0),
        "triton_poi_fused_add_5": ("alike", "triton_poi_fused_add_3", 0),
        "f<bool>(x)": ("alike", "f<1, g<2>>(h)", 0),
    }
    assert without_numbers("a1b22") == "a#b#"
    assert without_arguments("void k<1, m<2>>(int)") == "void k"
    assert without_arguments("f(a->b)") == "f"
    # Of PyTorch's own kernels the arguments say what is computed.
    own = "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor>"
    assert without_arguments(own) == own.replace("4", "#")
    found = changes(kernels((own, 2, 2.0)), kernels((own.replace("Mul", "Add"), 4, 4.0)))
    assert sorted(one.status for one in found.values()) == ["gone", "new"]


def test_new_and_gone_kernels_and_those_that_may_only_be_unlisted() -> None:
    found = changes(kernels(("a", 2, 6.0), ("old", 2, 2.0)), kernels(("a", 4, 12.0), ("new", 4, 8.0)))
    assert (found["new"].status, found["new"].change, found["new"].total.before) == ("new", 2 * MS, None)
    assert (found["old"].status, found["old"].change, found["old"].calls.after) == ("gone", -1 * MS, None)
    # The run before lists 6 of 10 ms; the shortest listed took 0.5 ms: another may have taken as much.
    found = changes(
        kernels(("a", 2, 5.5), ("b", 2, 0.5), whole=10.0), kernels(("a", 4, 12.0), ("c", 4, 8.0), ("b", 4, 1.0))
    )
    assert (found["c"].status, found["c"].at_most, found["c"].change) == ("unlisted", 0.25 * MS, 1.75 * MS)
    # Nor is it new where all that is unlisted is less than that.
    found = changes(kernels(("a", 2, 5.9), whole=6.0), kernels(("a", 4, 12.0), ("c", 4, 8.0)))
    assert found["c"].at_most == pytest.approx(0.05 * MS)


# --- reports ---------------------------------------------------------------------------------------------------------


def planted() -> Difference:
    """Rank 5 of 8 slow after, none before; a kernel new, one gone, a name that is hostile."""
    before = replace(gpus(8, slow=99), verdicts=[Verdict("host_sync", "warning", [], f"{HOSTILE}", "e", "a")])
    before.source = "runs/before <b>"
    after = gpus(8)
    after.top_kernels[4].total *= 3
    after.top_kernels[2].name = "brand_new"
    after.fsdp_layers[3].exposed += 900 * MS
    after.collectives[0].exposed += 9_000 * MS
    return compare(after, before)


def test_json_has_the_difference_and_null_only_where_nothing_is_known() -> None:
    assert "difference" not in to_json(gpus(2))
    found = json.loads(json.dumps(to_json(gpus(8), planted()), allow_nan=False))["difference"]
    step = found["step"]
    assert set(step) == {"before_us", "after_us", "change_us", "change_pct", "noise_us", "beyond_noise"}
    assert step["change_us"] == pytest.approx(step["after_us"] - step["before_us"], abs=0.002)
    assert {"compute", "transfer", "waiting", "memory", "data", "sync", "launch"} <= set(found["parts"])
    assert [row["rank"] for row in found["ranks"]] == [5]
    assert found["ranks"][0]["part"] == "compute"
    new = next(row for row in found["kernels"] if row["name"] == "brand_new")
    assert new["total"]["before_us"] is None
    assert new["status"] in ("new", "unlisted")
    assert [row["code"] for row in found["new_verdicts"]] == ["straggler", "prefetch_missing"]
    assert [row["code"] for row in found["gone_verdicts"]] == ["host_sync"]
    for part in (step, *found["parts"].values(), found["comm_exposed"], found["comm_hidden"]):
        assert None not in (part["before_us"], part["after_us"], part["change_us"], part["noise_us"])


@pytest.mark.parametrize("width", [80, 160])
def test_terminal_report_fits(width: int) -> None:
    text = printed(planted(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "Against runs/before <b>" in text
    assert "brand_new" in text
    assert "rank 5, compute" in text
    assert "+28.1 ms" in next(line for line in text.splitlines() if line.startswith("layers.3 "))  # 900 ms, 32 steps
    plain = printed(planted(), width, "ascii")
    assert "within noise" in plain


def test_page_has_a_section_with_bars_before_and_after() -> None:
    found = planted()
    text = page(gpus(8), found)
    section = text[text.index('<section id="difference">') :]
    section = section[: section.index("</section>")]
    assert section.count('<svg class="plot"') == 1
    assert ">before</text>" in section
    assert ">after</text>" in section
    assert "Before: runs/before &lt;b&gt;." in section
    assert "<script>" not in section
    assert "brand_new (" in section
    assert '<section id="difference">' not in page(gpus(8))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded traces are not here")
def test_recorded_runs_are_compared() -> None:
    ddp, fsdp = (analyze(SHARED / name, processes=1) for name in ("cpu_ddp_straggler", "cpu_fsdp2"))
    assert compare(ddp, ddp).summary.startswith("No change beyond the noise")
    found = compare(ddp, fsdp)
    assert "rank 1 has 62 ms more data loading" in found.summary
    assert found.layers
    assert all(row.exposed.after is None for row in found.layers)
    kinds = {row.kind: (row.count.before is None, row.count.after is None) for row in found.collectives}
    assert kinds["all_gather"] == (False, True)


def test_figures_of_nothing() -> None:
    assert Figure(None, 1.0, 2.0).clear is None
    assert Figure(0.0, 1.0, 0.5).ratio is None
    assert Figure(2.0, 1.0, 1.0).clear is False
    assert Figure(2.0, 0.5, 1.0).clear is True


def test_command_compares_two_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, fields in (("before", {}), ("after", {"slow_rank": {1: 1.3}})):
        write_set(tmp_path / name, ranks=2, layers=2, steps=3, **fields)
    words = ["trace", str(tmp_path / "after"), "--against", str(tmp_path / "before"), "--processes", "1"]
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    assert main([*words, *files]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "more compute" in out
    assert "Now: slow rank, rank 1" in out
    assert json.loads((tmp_path / "a.json").read_text())["difference"]["step"]["beyond_noise"] is True
    assert '<section id="difference">' in (tmp_path / "a.html").read_text()
    assert main([*words[:3], str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
