"""What docs/traces.md says: options, figures, verdicts and thresholds are those of the code, and its examples run."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lit_llm.callbacks import RankMonitor, TraceCapture
from lit_llm.cli import trace
from lit_llm.trace import shares, stalls, straggler
from lit_llm.trace.conditions import FIGURES, Condition
from tests.conftest import write_texts
from tests.synthetic_traces import write_set

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")
SMALLER = {"--model.config 3m": "--model.config 1m", "--data.seq_len 256": "--data.seq_len 32"}


def section(title: str) -> str:
    return re.split(r"^## ", TEXT.split(f"\n## {title}\n")[1], flags=re.M)[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.M | re.S)


def rows(title: str) -> list[list[str]]:
    """Of the table of a section, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def defaults(callback: type) -> dict[str, object]:
    return {name: one.default for name, one in inspect.signature(callback).parameters.items()}


def test_the_table_has_all_options_of_the_callback() -> None:
    known = {name: "null" if value is None else str(value).lower() for name, value in defaults(TraceCapture).items()}
    assert {row[0].strip("`"): row[1] for row in rows("Record")} == known


def test_the_yaml_is_what_the_callback_takes() -> None:
    [text] = blocks("yaml")
    [callback] = yaml.safe_load(text)["trainer"]["callbacks"]
    assert callback["class_path"] == "lit_llm.callbacks.TraceCapture"
    TraceCapture(**callback["init_args"])


def test_the_commands_options_are_all_told() -> None:
    told = {row[0].strip("`").split()[0] for row in rows("Read")}
    assert told == {option for option in trace.parser()._option_string_actions if option.startswith("--")} - {"--help"}


def test_each_figure_of_a_condition_is_named() -> None:
    assert {name for name in re.findall(r"`(\w+)`", section("Read")) if name in FIGURES} == set(FIGURES)
    conditions = re.findall(r'--fail_on "(.*?)"', TEXT)
    assert conditions
    for one in conditions:
        Condition(one)


def test_the_verdicts_are_those_of_the_code() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "lit_llm" / "trace").glob("*.py"))
    codes = set(re.findall(r'\bVerdict\(\s*"(\w+)"', source))
    assert {"straggler", "host_sync", "healthy"} <= codes
    assert {row[0].strip("`") for row in rows("The verdicts")} == codes


def test_the_thresholds_are_those_of_the_code() -> None:
    said = {row[0].strip("`"): re.findall(r"([\d.]+)%", row[1]) for row in rows("The verdicts")}

    def percent(levels: tuple[float, ...]) -> list[str]:
        return [f"{100 * one:g}" for one in levels]

    assert said["communication_bound"] == percent(shares.EXPOSED)
    assert said["launch_bound"] == percent(shares.LAUNCH)
    assert said["dependency_wait"] == percent(shares.DEPENDENCY)
    assert said["host_sync"] == percent(shares.SYNC)
    assert said["memory_copies"] == percent(shares.COPIES)
    assert said["data_starved"] == percent(shares.STARVED) + percent(tuple(one / 2 for one in shares.STARVED))
    assert said["one_off_stall"] == percent((stalls.STALL,))
    assert f"took {stalls.LONG:g} times the usual" in TEXT
    assert shares.GATHER == 0.5
    gpu, cpu = (f"{straggler.LEAST[device] / 1e6:g} ms" for device in ("gpu", "cpu"))
    assert f"{100 * straggler.SHARE:g}% of a step and more than {gpu} on a GPU ({cpu} on a CPU)" in TEXT
    assert pytest.approx(2 / 3) == straggler.LED
    assert "latest in two thirds of the steps" in TEXT


def test_what_is_said_of_the_monitor() -> None:
    known = defaults(RankMonitor)
    said = section("While the run goes on")
    assert f"every `every_n_steps` ({known['every_n_steps']}) steps" in said
    assert f"`threshold` ({known['threshold']:g}) of a step and `min_ms` ({known['min_ms']:g})" in said


def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path / "runs/two/traces/step-000100", ranks=2, layers=2, kernels=4, steps=2, slow_loader={1: 60.0})
    monkeypatch.chdir(tmp_path)
    [code] = blocks("python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "traces.md", "exec"), {})
    assert "straggler [1] Rank 1 (node-0) waits for its data" in printed.getvalue()
    assert len(printed.getvalue().splitlines()) >= 1 + 2 * 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_run(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", documents=40)
    [script] = blocks("bash")
    for old, new in SMALLER.items():
        assert old in script, f"the page no longer says {old!r}"
        script = script.replace(old, new)
    script = f"lit-llm prepare texts --output stores/mine --vocab_size 300\n{script}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    traces = tmp_path / "runs/two/traces/step-000011"
    assert sorted(path.name for path in traces.iterdir()) == [
        "rank-00000.json.gz",
        "rank-00001.json.gz",
        "report.html",
        "report.json",
    ]
    assert "2 ranks on 1 host, CPU, steps 11-13" in done.stdout
    assert (tmp_path / "runs/two/trace.html").exists()
