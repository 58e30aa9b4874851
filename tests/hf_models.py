"""Tiny random models of every family, made with transformers: what the tests of Hugging Face folders compare with.

Every parameter is away from its initial value, so that a norm's gain, a bias or a factor that is dropped shows in the
logits. `made(name)` makes a variant once per process, in a folder with config.json as transformers 5 writes it and in
one with the same weights and the older words of the hub.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_llm import Transformer
from tests.hf_variants import ORIGINAL, VARIANTS, VOCAB, Variant

__all__ = ["ORIGINAL", "VARIANTS", "VOCAB", "Variant", "made"]

# One of each layout: transposed, interleaved by heads, plain, tied, fused, by groups, experts one by one and stacked.
FEW = ("gpt2", "gpt_neox_parallel", "llama_gqa", "gemma", "phi3", "falcon_new", "mixtral", "granitemoe")
every = pytest.mark.parametrize("name", VARIANTS)
few = pytest.mark.parametrize("name", FEW)


def perturb(model: Any, seed: int = 0) -> None:
    """Random weights under which every part counts: norms, biases and positions away from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    gemma = model.config.model_type.startswith("gemma")
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                # Gemma's embedding is small (see below); a large gain of its last norm makes up for it.
                parameter.add_(0.3 * noise + 2 * (gemma and name == "model.norm.weight"))
            elif parameter is model.get_input_embeddings().weight:
                # A tied head must not see the token itself above all: the layers then say more than the embedding.
                parameter.copy_(noise * (0.06 if gemma else 0.2 if tied else 0.6))
            elif "lm_head" in name or "embed_out" in name:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(1.5 * noise / max(32, min(parameter.shape[-2:])) ** 0.5)


@dataclass(frozen=True)
class Made:
    """A variant on disk.

    Args:
        folder: as transformers 5 writes it.
        v4: the same weights under a configuration of the hub's style.
        model: transformers' model.
    """

    name: str
    folder: Path
    v4: Path
    model: Any

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.name]


@functools.cache
def made(name: str) -> Made:
    """The variant, once per process; nobody may change its files."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = _root() / name
    model = _model(name)
    model.save_pretrained(folder)
    v4 = copied(folder, _root() / f"{name}_v4")
    write_v4(v4, name)
    return Made(name, folder, v4, model)


def _model(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    # Where a family drops something in training (GPT-2: a tenth), evaluation must show nothing of it.
    model = AutoModelForCausalLM.from_config(VARIANTS[name].config(), attn_implementation="eager").eval()
    perturb(model, zlib.crc32(name.encode()))
    return model


def write_v4(folder: Path, name: str) -> None:
    """Rewrites the config.json of a variant's folder in the hub's older style."""
    write_keys(folder, VARIANTS[name].keys_v4(read_keys(folder)))


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="hf_models"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def copied(folder: Path, to: Path) -> Path:
    """A copy of a folder whose files may be rewritten."""
    return Path(shutil.copytree(folder, to))


def read_keys(folder: Path) -> dict[str, Any]:
    """config.json."""
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def write_keys(folder: Path, keys: Mapping[str, Any]) -> None:
    """config.json."""
    (folder / "config.json").write_text(json.dumps(keys, indent=2), encoding="utf-8")


def load_theirs(folder: Path, dtype: Any = torch.float32) -> Any:
    """The folder as transformers loads it: every tensor of it used, none made up."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    model, info = loaded
    left = {name: value for name, value in info.items() if value}
    assert not left, left
    return model.eval()


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    """(rows, length) random ids, none of them special."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def their_logits(model: Any, ids: Tensor) -> Tensor:
    """(rows, length, vocabulary) of a full forward, without a cache; float32."""
    return model(input_ids=ids, use_cache=False).logits.float()


@torch.no_grad()
def their_tokens(model: Any, prompt: Sequence[int], new: int) -> list[int]:
    """Greedy continuation by transformers' own generate; nothing ends it early."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return [int(i) for i in out[0, len(prompt) :]]


@functools.cache
def ours(name: str) -> Transformer:
    """Our model of a variant's folder, in float32, as its file is."""
    return Transformer.from_pretrained(made(name).folder).eval()


@torch.no_grad()
def our_logits(model: Transformer, ids: Tensor) -> Tensor:
    """(rows, length, vocabulary), float32."""
    return model.eval()(ids).float()


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def same_tensors(folder: Path, original: Path) -> None:
    """The two folders' weights have the same names, dtypes and bits."""
    new, old = (load_file(one / "model.safetensors") for one in (folder, original))
    assert new.keys() == old.keys()
    for tensor_name, tensor in old.items():
        assert new[tensor_name].dtype == tensor.dtype
        assert torch.equal(new[tensor_name], tensor), tensor_name


def changed(name: str, folder: Path, add: dict[str, Tensor] | None = None, drop: str = "") -> Path:
    """A copy of a variant's folder with other tensors."""
    copied(made(name).folder, folder)
    tensors = load_file(folder / "model.safetensors") | (add or {})
    tensors.pop(drop, None)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
