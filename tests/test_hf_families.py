"""Hugging Face folders of every family, in and out, against transformers; the models are tests/hf_models.py's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_llm import GenerationConfig, ModelConfig, Transformer, generate
from lit_llm.generation.decode import decode_one_token, prefill
from tests.hf_models import (
    ORIGINAL,
    VARIANTS,
    VOCAB,
    copied,
    difference,
    every,
    few,
    load_theirs,
    made,
    our_logits,
    ours,
    read_keys,
    same_tensors,
    their_logits,
    their_tokens,
    tokens,
    write_keys,
)

NEW = 20
# The last one is three windows long; the model with a scaled embedding has seen 16 positions before.
PROMPTS = [row[:n].tolist() for row, n in zip(tokens(4, 24, seed=1), (13, 7, 1, 24), strict=True)]
GREEDY = GenerationConfig(max_new_tokens=NEW, temperature=0.0, eos_token_id=[])


@every
def test_logits_at_every_position(name: str) -> None:
    ids = tokens(2, 24)
    theirs = their_logits(made(name).model, ids)
    assert theirs.abs().max() > 1, "the logits are too small for a tolerance of 1e-4 to say much"
    assert difference(our_logits(ours(name), ids), theirs) < 1e-4


@every
def test_both_styles_of_configuration(name: str) -> None:
    """The hub's older words, without what equals a family's default, mean the same model."""
    new, old = (ModelConfig.from_hf(folder) for folder in (made(name).folder, made(name).v4))
    assert old == new
    ids = tokens(2, 24)
    assert torch.equal(our_logits(Transformer.from_pretrained(made(name).v4), ids), our_logits(ours(name), ids))


@every
def test_greedy_tokens_of_a_ragged_batch(name: str) -> None:
    """One call of ours for four lengths, against transformers' generate of each prompt alone."""
    results = generate(ours(name), PROMPTS, GREEDY)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.finish_reason == "length"
        assert result.tokens == their_tokens(made(name).model, prompt, NEW), f"prompt of {len(prompt)}"


@every
def test_logits_of_a_ragged_prefill(name: str) -> None:
    """Behind the last token of each row, and behind one more that is decoded."""
    short = PROMPTS[:3]
    lengths, longest = [len(prompt) for prompt in short], max(map(len, short))
    model, more = ours(name), torch.tensor([5, 6, 7])
    cache = model.new_cache(len(short), longest + 1, torch.float32)
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in short])
    for new in (None, more):
        logits = prefill(model, ids, lengths, cache) if new is None else decode_one_token(model, new, cache)
        for row, prompt in enumerate(short):
            alone = torch.tensor([prompt + ([] if new is None else [int(new[row])])])
            assert difference(logits[row], their_logits(made(name).model, alone)[0, -1]) < 1e-4


@every
def test_export(name: str, tmp_path: Path) -> None:
    """What was loaded comes out bit-equal, under its own names, and transformers computes the same with it."""
    ours(name).save_pretrained(tmp_path / "out")
    keys, before = read_keys(tmp_path / "out"), read_keys(made(name).folder)
    assert keys["model_type"] == before["model_type"]
    assert keys["architectures"] == before["architectures"]
    for key in ("bos_token_id", "eos_token_id"):
        assert keys[key] == before[key]
    theirs = load_theirs(tmp_path / "out")
    ids = tokens(2, 24)
    assert difference(their_logits(theirs, ids), their_logits(made(name).model, ids)) < 1e-5
    same_tensors(tmp_path / "out", made(name).folder)
    assert ModelConfig.from_hf(tmp_path / "out") == ours(name).config
    # What transformers 4 reads: the same without the words that only 5 knows.
    for word in ("rope_parameters", "dtype"):
        keys.pop(word, None)
    write_keys(tmp_path / "out", {**keys, "transformers_version": "4.44.0"})
    assert difference(their_logits(load_theirs(tmp_path / "out"), ids), their_logits(made(name).model, ids)) < 1e-5


@few
def test_sharded_files(name: str, tmp_path: Path) -> None:
    made(name).model.save_pretrained(tmp_path / "in", max_shard_size="60KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    ids = tokens(1, 24)
    assert torch.equal(our_logits(Transformer.from_pretrained(tmp_path / "in"), ids), our_logits(ours(name), ids))


@few
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_files(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """They load in their own dtype, or in the one that is asked for, and are written as they were."""
    narrow = narrowed(name, tmp_path / "in", dtype)
    model = Transformer.from_pretrained(narrow)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    model.save_pretrained(tmp_path / "out")
    same_tensors(tmp_path / "out", narrow)
    ids = tokens(1, 24)
    wide = Transformer.from_pretrained(narrow, dtype=torch.float32)
    assert difference(our_logits(wide, ids), their_logits(load_theirs(narrow), ids)) < 1e-4


def narrowed(name: str, folder: Path, dtype: torch.dtype) -> Path:
    copied(made(name).folder, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v.to(dtype) for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    write_keys(folder, {**read_keys(folder), "dtype": str(dtype).removeprefix("torch.")})
    return folder


def test_phi3_under_the_older_name_of_longrope(tmp_path: Path) -> None:
    """Which transformers 5 can't read without an original length among its fields."""
    ids, folder = tokens(1, 24), copied(made("phi3_longrope").v4, tmp_path / "in")
    keys = read_keys(folder)
    write_keys(folder, {**keys, "rope_scaling": {**keys["rope_scaling"], "type": "su"}})
    assert torch.equal(our_logits(Transformer.from_pretrained(folder), ids), our_logits(ours("phi3_longrope"), ids))


@pytest.mark.parametrize("length", [ORIGINAL, ORIGINAL + 1])
def test_longrope_on_both_sides_of_the_original_length(length: int) -> None:
    ids = tokens(1, length)
    theirs = their_logits(made("phi3_longrope").model, ids)
    assert difference(our_logits(ours("phi3_longrope"), ids), theirs) < 1e-4


def test_the_vocabulary_of_the_tests() -> None:
    """Prompts hold no special id, and every variant is asked for by name."""
    assert all(3 <= i < VOCAB for prompt in PROMPTS for i in prompt)
    assert len(VARIANTS) >= 45
