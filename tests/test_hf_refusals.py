"""What a Hugging Face folder may hold beside a model, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_llm import ModelConfig, Transformer
from tests.hf_models import (
    changed,
    copied,
    difference,
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

EXTRAS: dict[str, dict[str, Tensor]] = {
    "llama_gqa": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    "gpt2": {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    },
    "gpt_neox_parallel": {
        "gpt_neox.layers.2.attention.bias": torch.ones(1, 1, 64, 64),
        "gpt_neox.layers.2.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.2.attention.rotary_emb.inv_freq": torch.ones(2),
    },
}
HEADS = {"llama_tied": "model.embed_tokens", "gpt2": "transformer.wte", "falcon_mqa": "transformer.word_embeddings"}


@pytest.mark.parametrize("name", EXTRAS)
def test_old_buffers_are_passed_over(name: str, tmp_path: Path) -> None:
    ids = tokens(1, 24)
    model = Transformer.from_pretrained(changed(name, tmp_path / "in", EXTRAS[name]))
    assert torch.equal(our_logits(model, ids), our_logits(ours(name), ids))


@pytest.mark.parametrize("name", HEADS)
def test_a_tied_head_in_the_file(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Equal to the embedding it is passed over; another one is taken, as transformers does, and a line says so."""
    tensors, ids = load_file(made(name).folder / "model.safetensors"), tokens(1, 24)
    head = tensors[f"{HEADS[name]}.weight"].clone()
    model = Transformer.from_pretrained(changed(name, tmp_path / "same", {"lm_head.weight": head}))
    assert torch.equal(our_logits(model, ids), our_logits(ours(name), ids))
    assert caplog.text == ""
    other = changed(name, tmp_path / "other", {"lm_head.weight": head * 1.5})
    model = Transformer.from_pretrained(other)
    assert "config.json ties the head" in caplog.text
    assert not model.config.tie_word_embeddings
    assert difference(our_logits(model, ids), their_logits(load_theirs(other), ids)) < 1e-4
    model.save_pretrained(tmp_path / "out")
    assert difference(our_logits(model, ids), their_logits(load_theirs(tmp_path / "out"), ids)) < 1e-4


def test_gpt2_without_the_prefix_of_its_names(tmp_path: Path) -> None:
    """As in the file of the hub's gpt2."""
    folder = copied(made("gpt2").folder, tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare |= {name.removeprefix("transformer."): tensor for name, tensor in EXTRAS["gpt2"].items()}
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    ids = tokens(1, 24)
    assert torch.equal(our_logits(Transformer.from_pretrained(folder), ids), our_logits(ours("gpt2"), ids))


WEIGHTS = {
    "gpt2": ["transformer.h.1.attn.c_attn.weight", "transformer.ln_f.bias", "transformer.wpe.weight"],
    "llama_gqa": ["model.layers.2.self_attn.k_proj.weight", "lm_head.weight", "model.norm.weight"],
    "phi3": ["model.layers.0.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"],
    "mixtral": ["model.layers.1.block_sparse_moe.experts.3.w2.weight", "model.layers.0.block_sparse_moe.gate.weight"],
}
weights = pytest.mark.parametrize(("name", "tensor"), [(name, one) for name, ones in WEIGHTS.items() for one in ones])


@weights
def test_a_missing_tensor_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    refused(changed(name, tmp_path / "in", drop=tensor), tensor)


@weights
@pytest.mark.parametrize("dim", [0, -1])
def test_a_misshapen_tensor_is_named(name: str, tensor: str, dim: int, tmp_path: Path) -> None:
    whole = load_file(made(name).folder / "model.safetensors")[tensor]
    cut = whole.narrow(dim, 0, whole.shape[dim] - 1).contiguous()
    refused(changed(name, tmp_path / "in", {tensor: cut}), tensor)


@few
@pytest.mark.parametrize("tensor", ["model.layers.3.extra.weight", "layers.0.self_attn.q_proj.weight", "lora.bias"])
def test_an_unexpected_tensor_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    refused(changed(name, tmp_path / "in", {tensor: torch.ones(3)}), tensor)


def test_a_bias_that_the_configuration_denies_is_named(tmp_path: Path) -> None:
    """The file of a model with biases under a configuration without: not a model that lacks them."""
    folder = copied(made("llama_bias").folder, tmp_path / "in")
    write_keys(folder, {**read_keys(folder), "attention_bias": False})
    refused(folder, "bias")


def refused(folder: Path, *words: str) -> None:
    """One line that says all the words."""
    with pytest.raises(ValueError) as caught:
        Transformer.from_pretrained(folder)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    for model_type, keys in (("rwkv", {}), ("mamba", {"architectures": ["MambaForCausalLM"]})):
        folder = tmp_path / model_type
        folder.mkdir()
        write_keys(folder, {"vocab_size": 11, "hidden_size": 64, "model_type": model_type, **keys})
        with pytest.raises(ValueError, match=model_type):
            ModelConfig.from_hf(folder)


@pytest.mark.parametrize("kind", ["spiral", "dynamic", "longrope", "mrope"])
@pytest.mark.parametrize("style", ["new", "rope_type", "type"])
def test_an_unknown_rope_type_is_named(kind: str, style: str, tmp_path: Path) -> None:
    """Of Llama, whose files have factors and original lengths as well: never ignored."""
    folder = copied(made("llama_gqa").folder, tmp_path / "in")
    keys, scaling = read_keys(folder), {"factor": 2.0, "original_max_position_embeddings": 16}
    if style == "new":
        keys["rope_parameters"] = {**keys["rope_parameters"], **scaling, "rope_type": kind}
    else:
        keys["rope_theta"] = keys.pop("rope_parameters")["rope_theta"]
        keys["rope_scaling"] = {**scaling, style: kind}
    write_keys(folder, keys)
    refused(folder, kind)


@pytest.mark.parametrize(
    ("name", "keys", "word"),
    [
        ("llama_gqa", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ("llama_gqa", {"hidden_act": "mish"}, "mish"),
        ("falcon_mqa", {"alibi": True}, "alibi"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("qwen3_swa", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
def test_what_we_cannot_compute_is_named(name: str, keys: dict[str, Any], word: str, tmp_path: Path) -> None:
    folder = copied(made(name).folder, tmp_path / "in")
    write_keys(folder, {**read_keys(folder), **keys})
    refused(folder, word)


def test_a_pickle_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = copied(made("llama_gqa").folder, tmp_path / "in")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, "pytorch_model.bin", "safetensors")


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    folder = copied(made("llama_gqa").folder, tmp_path / "in")
    (folder / "model.safetensors").unlink()
    refused(folder, "safetensors")
    (folder / "config.json").unlink()
    refused(folder, "config.json")
    refused(tmp_path / "nowhere", "nowhere")


def test_a_truncated_file_is_refused_with_its_path(tmp_path: Path) -> None:
    folder = copied(made("llama_gqa").folder, tmp_path / "in")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(folder, "model.safetensors")


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    made("llama_gqa").model.save_pretrained(tmp_path / "in", max_shard_size="60KB")
    index = json.loads((tmp_path / "in" / "model.safetensors.index.json").read_text())
    gone = sorted(set(index["weight_map"].values()))[1]
    (tmp_path / "in" / gone).unlink()
    refused(tmp_path / "in", gone)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe"])
def test_stacked_experts_are_read(name: str, tmp_path: Path) -> None:
    """As transformers 5 holds them in memory."""
    made(name).model.save_pretrained(tmp_path, save_original_format=False)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.experts.gate_up_proj" in file.keys()  # noqa: SIM118
    stacked, usual = Transformer.from_pretrained(tmp_path), Transformer.from_pretrained(made(name).folder)
    for key, tensor in usual.state_dict().items():
        assert torch.equal(stacked.state_dict()[key], tensor)


def test_a_head_of_gpt_neox_under_its_other_name(tmp_path: Path) -> None:
    folder = made("gpt_neox_parallel").folder
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    shutil.copy(folder / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    head = Transformer.from_pretrained(tmp_path).head_weight
    assert torch.equal(head, Transformer.from_pretrained(folder).head_weight)


def test_a_tied_gpt_neox(tmp_path: Path) -> None:
    """Its files may hold the head even so, equal to the embedding or not, under the family's own name of it."""
    folder = made("gpt_neox_parallel").folder
    tensors = load_file(folder / "model.safetensors")
    keys = {**json.loads((folder / "config.json").read_text()), "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    save_file(tensors, tmp_path / "model.safetensors")
    assert not Transformer.from_pretrained(tmp_path).config.tie_word_embeddings  # as the heads differ
    tensors["embed_out.weight"] = tensors["gpt_neox.embed_in.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert Transformer.from_pretrained(tmp_path).config.tie_word_embeddings
    del tensors["embed_out.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert Transformer.from_pretrained(tmp_path).config.tie_word_embeddings
