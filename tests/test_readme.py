"""The README's commands and Python run as they stand, on a small text and with fewer steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import write_texts

ROOT = Path(__file__).parent.parent
# A smaller model and fewer steps; nothing else is changed.
SMALLER = {
    "--model.config 3m": "--model.config 1m",
    "--vocab_size 4096": "--vocab_size 300",
    "--data.seq_len 256": "--data.seq_len 32",
    "seq_len=256": "seq_len=32",
    "max_steps 300": "max_steps 2",
    "val_check_interval 100": "val_check_interval 1",
    "max_steps 320": "max_steps 3",
    "max_steps=300": "max_steps=2",
    "max_steps 20": "max_steps 2",
    "max_steps 30": "max_steps 3",
    "callbacks.start 10": "callbacks.start 0",
    'config="3m"': 'config="1m"',
}


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    write_texts(folder / "texts", documents=40)
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


@pytest.mark.timeout(400)
def test_the_readme_runs(folder: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    commands = [block for block in blocks("bash") if "make " not in block]
    assert len(commands) == 10
    script = "\n".join(["set -e", *commands, "cat > readme.py <<'EOF'", *blocks("python"), "EOF", "python readme.py"])
    for old, new in SMALLER.items():
        assert old in script, f"the README no longer says {old!r}"
        script = script.replace(old, new)
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len((folder / "runs/mine/predictions.jsonl").read_text().splitlines()) == 2
    assert len(list((folder / "runs/traced/traces/step-000001").glob("rank-*.json.gz"))) == 2
    assert "<svg" in (folder / "runs/traced/trace.html").read_text(encoding="utf-8")


def test_the_readme_names_only_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
