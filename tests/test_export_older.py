"""Exports as the last transformers 4 reads them, which is fetched for it and runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from lit_llm.model import Transformer
from tests.assets import CACHE, wheel
from tests.hf_models import VARIANTS, made

pytestmark = pytest.mark.slow
_PACKAGES = {"transformers": "4.57.1", "tokenizers": "0.22.1", "huggingface_hub": "0.36.0"}
_READ = """
import json, sys, torch, transformers
assert transformers.__version__.startswith("4."), transformers.__version__
for folder in sys.argv[2:]:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), (folder, info)
    torch.save(model.eval()(torch.load(sys.argv[1])).logits.detach(), folder + "/logits.pt")
"""


def _older() -> Path:
    """A folder with the packages of ``_PACKAGES``."""
    folder = CACHE / f"transformers-{_PACKAGES['transformers']}"
    for name, version in _PACKAGES.items():
        marker = folder / f"{name}.json"
        if not marker.exists():
            with zipfile.ZipFile(wheel(name, version)) as archive:
                archive.extractall(folder)
            marker.write_text(json.dumps(version))
    return folder


@pytest.mark.timeout(600)
def test_transformers_4_reads_what_we_write(tmp_path: Path) -> None:
    older = _older()
    ids = torch.randint(0, 131, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.save(ids, tmp_path / "ids.pt")
    folders = []
    for name in VARIANTS:
        folders.append(tmp_path / name)
        Transformer.from_pretrained(made(name).folder).save_pretrained(folders[-1])
    environment = {**os.environ, "PYTHONPATH": str(older), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _READ, str(tmp_path / "ids.pt"), *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for folder in folders:
        with torch.no_grad():
            expected = Transformer.from_pretrained(folder).eval()(ids)
        torch.testing.assert_close(torch.load(folder / "logits.pt"), expected, atol=1e-4, rtol=0, msg=folder.name)
