"""Every tensor and every key that matters is used: what changes transformers' logits changes ours in the same way."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_llm import Transformer
from tests.hf_keys import MORE, REFUSED, SAME, changes
from tests.hf_models import (
    VARIANTS,
    copied,
    difference,
    every,
    few,
    load_theirs,
    made,
    our_logits,
    ours,
    read_keys,
    their_logits,
    tokens,
    write_keys,
)

IDS = tokens(2, 24, seed=3)
# Below phi3_longrope's original length and above it.
SHORT, LONG = IDS[:, :12], IDS
NEAR, MOVED = 1e-4, 5e-4


def kind_of(tensor: str) -> str:
    """The name without numbers."""
    return re.sub(r"\.\d+\.", ".N.", re.sub(r"\.\d+\.", ".N.", tensor))


def perturbed(tensor: Tensor, seed: int) -> Tensor:
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return tensor + 0.3 * noise * tensor.std(correction=0).clamp(min=0.1)


def check_tensor(name: str, tensor: str, tensors: dict[str, Tensor], folder: Path) -> None:
    changed = {**tensors, tensor: perturbed(tensors[tensor], len(tensor))}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    theirs, mine = load_theirs(folder), Transformer.from_pretrained(folder)
    assert moved(theirs, name) > MOVED, f"{tensor} does not matter to transformers"
    assert apart(mine, theirs) < NEAR, tensor
    assert difference(our_logits(mine, IDS), our_logits(ours(name), IDS)) > NEAR, tensor


def moved(theirs: Any, name: str) -> float:
    """How far transformers' logits are from what they were."""
    return max(difference(their_logits(theirs, ids), their_logits(made(name).model, ids)) for ids in (SHORT, LONG))


def apart(mine: Transformer, theirs: Any) -> float:
    """How far ours are from theirs."""
    return max(difference(our_logits(mine, ids), their_logits(theirs, ids)) for ids in (SHORT, LONG))


@every
def test_each_kind_of_tensor_matters(name: str) -> None:
    """To transformers: as our logits are equal to its own (tests/test_hf_families.py), we use them all as well."""
    model = made(name).model
    before = their_logits(model, IDS)
    for tensor, parameter in {kind_of(tensor): parameter for tensor, parameter in model.named_parameters()}.items():
        whole = parameter.data
        parameter.data = perturbed(whole, len(tensor))
        try:
            assert difference(their_logits(model, IDS), before) > MOVED, tensor
        finally:
            parameter.data = whole


@few
def test_a_changed_tensor_changes_our_logits(name: str, tmp_path: Path) -> None:
    """One of the last layer; the slow test below tries all."""
    folder = copied(made(name).folder, tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    check_tensor(name, sorted(tensor for tensor in tensors if ".2." in tensor)[0], tensors, folder)


@pytest.mark.slow
@every
def test_every_tensor_is_used(name: str, tmp_path: Path) -> None:
    folder = copied(made(name).folder, tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors:
        check_tensor(name, tensor, tensors, folder)


def is_fast(name: str, key: str) -> bool:
    """What only this variant has, and what its family has, once, without every activation and rotation there is."""
    model_type = VARIANTS[name].model_type
    first = next(other for other, variant in VARIANTS.items() if variant.model_type == model_type)
    return key in MORE.get(name, {}) or (name == first and "=" not in key)


FAST = [(name, key) for name in VARIANTS for key in changes(name) if is_fast(name, key)]
REST = [(name, key) for name in VARIANTS for key in changes(name) if (name, key) not in FAST]


@pytest.mark.parametrize(
    ("name", "key"), [*FAST, *(pytest.param(name, key, marks=pytest.mark.slow) for name, key in REST)]
)
def test_every_key_is_used(name: str, key: str, tmp_path: Path) -> None:
    """Transformers' logits change and ours with them; or we refuse, naming the key, where REFUSED says so."""
    folder = copied(made(name).folder, tmp_path / "in")
    write_keys(folder, changed_keys(read_keys(folder), changes(name)[key]))
    theirs = load_theirs(folder)
    assert (moved(theirs, name) > MOVED) == ((name, key) not in SAME), "transformers' logits"
    if (name, key) in REFUSED:
        with pytest.raises(ValueError, match=key.split(".")[-1].split("=")[0]):
            Transformer.from_pretrained(folder)
    else:
        assert apart(Transformer.from_pretrained(folder), theirs) < NEAR


def changed_keys(keys: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Dots in a key lead into mappings."""
    for key, value in change.items():
        *path, last = key.split(".")
        place = keys
        for step in path:
            place = place[step]
        place[last] = value
    return keys


# transformers 5 lets Phi-3's default at the top overrule what rope_parameters say; we go by the file.
OVERRULED = {("phi3_longrope", "original_max_position_embeddings")}


@pytest.mark.slow
@every
def test_a_key_that_is_not_there(name: str, tmp_path: Path) -> None:
    """Where transformers has a default under which the weights still fit, so do we; or the line names the key."""
    folder = copied(made(name).folder, tmp_path / "in")
    keys = read_keys(folder)
    agree = 0
    for key in [key for key in keys if key != "model_type" and (name, key) not in OVERRULED]:
        write_keys(folder, {k: v for k, v in keys.items() if k != key})
        try:
            theirs = load_theirs(folder)
            their_logits(theirs, IDS)
        except Exception:
            continue  # its default makes another shape of it
        mine, refusal = tried(folder)
        if mine is None:
            assert key in refusal
        else:
            assert apart(mine, theirs) < NEAR, key
            agree += 1
    assert agree > 8


def tried(folder: Path) -> tuple[Transformer | None, str]:
    """Our model, or the line that refuses it."""
    try:
        return Transformer.from_pretrained(folder), ""
    except ValueError as error:
        return None, str(error)
