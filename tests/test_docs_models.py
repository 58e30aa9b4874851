"""What docs/models.md says: the table is the families and their variants, its commands and code run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lit_llm.checkpoint.families import FAMILIES
from lit_llm.checkpoint.families.phi import PHI
from lit_llm.model import ModelConfig
from tests.conftest import write_texts
from tests.hf_variants import VARIANTS

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
SMALLER = {
    "--data.seq_len 256": "--data.seq_len 32",
    "--data.global_batch_size 16": "--data.global_batch_size 4",
    "max_steps 20": "max_steps 2",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)


def test_the_table_is_the_families_and_their_variants() -> None:
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    rows = [row for row in rows if len(row) == 3 and "model_type" not in row[0]]
    types = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(types) == sorted({family.model_type for family in FAMILIES})
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row[2])]
    assert sorted(told) == sorted(VARIANTS)
    for row in rows:
        kinds = set(re.findall(r"`(\w+)`", row[0]))
        assert {VARIANTS[name].model_type for name in re.findall(r"`(\w+)`", row[2])} == kinds


def test_the_mixture_is_one() -> None:
    [text] = blocks("yaml")
    config = ModelConfig(vocab_size=64, **yaml.safe_load(text)["model"]["config"])
    assert config.is_sparse(0)
    assert config.router_z_loss_coef == 0.001


def test_what_is_shown_of_phi_is_in_its_file() -> None:
    [code] = [block for block in blocks("python") if "PHI = Family" in block]
    for ours, theirs in re.findall(r'"(\w+)": "(\w+)"', code.split("fields=")[1].split("fixed=")[0]):
        assert PHI.fields[ours] == theirs
    for key in re.findall(r'"(\w+)":', code.split("defaults=")[1].split("\n")[0]):
        assert key in PHI.defaults
    assert PHI.names.modules["mlp.fc1"] == ("mlp.up_proj",)
    assert PHI.names.outer == {"norm": "final_layernorm"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_and_the_code_run(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", documents=40)
    make = (
        "lit-llm prepare texts --output stores/mine --vocab_size 300\n"
        "lit-llm fit --data.store stores/mine --model.config 1m --data.seq_len 32 --data.global_batch_size 4 "
        "--trainer.max_steps 1 --trainer.default_root_dir runs/mine\nlit-llm export runs/mine --output hf/mine"
    )
    [commands] = blocks("bash")
    [code] = [block for block in blocks("python") if "from_pretrained" in block]
    script = "\n".join([make, commands, "cat > models.py <<'EOF'", code, "EOF", "python models.py"])
    for old, new in SMALLER.items():
        assert old in script, f"the page no longer says {old!r}"
        script = script.replace(old, new)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("4 ")
    weights = (tmp_path / "hf/mine/model.safetensors").read_bytes()
    assert (tmp_path / "hf/copy/model.safetensors").read_bytes() == weights
    assert (tmp_path / "hf/tuned/model.safetensors").stat().st_size < len(weights)
