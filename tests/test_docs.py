"""What docs/ says: options exist, commands parse and run, figures and tables are what the code gives."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_llm import LitLLM, TokenDataModule
from lit_llm.callbacks import ReplicaCheck, RunCheckpoint
from lit_llm.cli import export
from lit_llm.cli.main import main
from lit_llm.cli.options import OptionParser
from lit_llm.data import prepare
from lit_llm.parallel import DataParallelStrategy, MeshStrategy
from lit_llm.parallel.activation_checkpointing import check_checkpointing
from lit_llm.parallel.dtypes import as_markdown
from tests.conftest import write_texts

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "parallel.md"
SMALLER = {
    "--vocab_size 4096": "--vocab_size 300",
    "--model.config 3m": "--model.config 1m",
    "--data.seq_len 256": "--data.seq_len 32",
    "max_steps 20": "max_steps 2",
    "max_steps 25": "max_steps 3",
}
# Where an option's name begins, what takes the rest of it.
SPACES = {
    "--trainer.strategy.": (MeshStrategy, DataParallelStrategy),
    "--trainer.callbacks.": (ReplicaCheck,),
    "--checkpoint.": (RunCheckpoint,),
    "--data.": (TokenDataModule,),
    "--model.": (LitLLM,),
}


def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(), flags=re.M | re.S)


def commands() -> list[list[str]]:
    """Of the page's shell block, each as words."""
    [script] = blocks("bash")
    return [shlex.split(line) for line in script.replace("\\\n", " ").splitlines()]


def prepare_parser() -> OptionParser:
    parser = OptionParser("prepare", "")
    prepare.add_arguments(parser)
    return parser


def names(options: type) -> set[str]:
    return set(inspect.signature(options).parameters)


def section(title: str) -> str:
    return re.split(r"^## ", text().split(f"\n## {title}\n")[1], flags=re.M)[0]


@pytest.fixture(scope="module")
def known() -> set[str]:
    """What fit, prepare and export take."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main(["fit", "--help"])
    ours = {option for parser in (prepare_parser(), export.parser()) for option in parser._option_string_actions}
    return ours | set(re.findall(r"--[\w.]+", shown.getvalue()))


def test_every_option_exists(known: set[str]) -> None:
    found = set(re.findall(r"--[a-z_][\w.]*[\w]", text()))
    assert len(found) >= 20
    for option in found:
        space = next((space for space in SPACES if option.startswith(space)), None)
        if space is None:
            assert option in known, option
        else:
            assert any(option.removeprefix(space) in names(one) for one in SPACES[space]), option
    assert "--trainer.no_such_option" not in known


@pytest.mark.parametrize("strategy", [MeshStrategy, DataParallelStrategy])
def test_each_option_of_a_strategy_stands_in_its_table(strategy: Any) -> None:
    rows = [line for line in section(strategy.__name__).splitlines() if line.startswith("| `")]
    told: dict[str, str] = {}
    for row in rows:
        name, default, _ = (cell.strip() for cell in row.strip("|").split("|"))
        options, defaults = re.findall(r"`(\w+)`", name), default.replace("`", "").split(", ")
        told |= dict(zip(options, defaults * (len(options) if len(defaults) == 1 else 1), strict=True))
    defaults = {name: one.default for name, one in inspect.signature(strategy).parameters.items()}
    words = {None: "null", True: "true", False: "false"}
    assert told == {
        name: "30 min" if name == "timeout" else words[value] if value is None or value is True or value is False
        else f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in defaults.items()
    }  # fmt: skip


def test_the_modes_of_checkpointing_exist() -> None:
    modes = re.findall(r"^\| `(\w+)` \|", section("Activation checkpointing"), flags=re.M)
    assert modes == ["none", "selective", "full"]
    assert [check_checkpointing(mode) for mode in (*modes, 3)] == [*modes, 3]


def test_the_table_of_dtypes_is_the_codes() -> None:
    assert as_markdown() in text()


def figures(models: list[str]) -> None:
    """Runs the page's dry runs of some models, and looks for the rows in its table."""
    [code] = [block for block in blocks("python") if "dry_run" in block]
    assert code.count("in LAYOUTS.items():") == 1
    chosen = f"in ((name, LAYOUTS[name]) for name in {models}):"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code.replace("in LAYOUTS.items():", chosen), str(PAGE), "exec"), {})
    rows = printed.getvalue().splitlines()
    assert rows == [line for line in text().splitlines() if line.startswith(tuple(f"| {m} |" for m in models))]
    assert len(rows) >= 4 * len(models)


def test_the_figures_are_what_the_dry_run_gives() -> None:
    figures(["llama-3.2-1b"])


@pytest.mark.slow
def test_the_figures_of_large_models() -> None:
    figures(["llama-3-8b", "llama-3-70b"])


def test_the_picture_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs/pictures/parallel.py"))["picture"]()
    assert (ROOT / "docs/pictures/parallel.svg").read_text(encoding="utf-8") == drawn


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    content = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", content):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path) if path else page
        assert other.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", other.read_text(encoding="utf-8"), flags=re.M)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], target


def test_the_laptops_commands_parse(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared, first, second, exported = commands()
    assert [words[:2] for words in (prepared, first, second, exported)] == [
        ["lit-llm", command] for command in ("prepare", "fit", "fit", "export")
    ]
    config = tmp_path / "config.yaml"
    capsys.readouterr()
    assert main([store if word == "stores/mine" else word for word in first[1:]] + ["--print_config"]) == 0
    config.write_text(capsys.readouterr().out)
    assert yaml.safe_load(config.read_text())["trainer"]["strategy"] == "fsdp"
    again = [str(config) if word == "runs/two/config.yaml" else word for word in second[1:]]
    assert main([*again, "--print_config"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["trainer"]["strategy"] == "auto"
    assert resolved["data"]["init_args"]["store"] == store
    prepare_parser().parse(prepared[2:])
    export.parser().parse(exported[2:])


@pytest.mark.slow
def test_the_laptops_commands_run(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", documents=40)
    [script] = blocks("bash")
    for old, new in SMALLER.items():
        assert old in script, f"the page no longer says {old!r}"
        script = script.replace(old, new)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs/two/checkpoints/step-2.ckpt/complete.json").exists()
    assert (tmp_path / "runs/two/checkpoints/step-3.ckpt").is_file()
    assert (tmp_path / "hf/two/model.safetensors").exists()
    code = blocks("python")[0]
    for old, new in {"seq_len=256": "seq_len=32", "max_steps=20": "max_steps=2", '"3m"': '"1m"'}.items():
        assert old in code, f"the page no longer says {old!r}"
        code = code.replace(old, new)
    (tmp_path / "two.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "two.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "mesh: shard 2; " in done.stderr
