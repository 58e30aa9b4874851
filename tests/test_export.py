"""Hugging Face folders out of our models: loaded by transformers, which must compute the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from lit_llm.checkpoint.families import FAMILIES, family_of
from lit_llm.checkpoint.hf import export, save_pretrained, shard_bytes
from lit_llm.checkpoint.tensor_files import Planned, write_shards
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError
from lit_llm.model import ModelConfig, Transformer
from tests.test_model import LLAMA3_ROPE, TINY, perturb

LINEAR_ROPE = {"type": "linear", "factor": 4}
QKV = {"attention_bias": True, "attention_output_bias": False}
MIXED = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
LAST = {"sliding_window": 5, "layer_types": ["full_attention", "full_attention", "sliding_attention"]}
ALL = {"sliding_window": 5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"bos_token_id": 3, "eos_token_id": [5, 9], "rms_norm_eps": 1e-3, "rope_theta": 500.0}),
    "llama_tied_gelu": ("llama", {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "hidden_act": "relu"}),
    "llama_rope3": ("llama", {"rope_scaling": LLAMA3_ROPE}),
    "llama_linear": ("llama", {"rope_scaling": LINEAR_ROPE, "rope_theta": 700.0, "num_key_value_heads": 4}),
    "mistral": ("mistral", {**ALL, "head_dim": 32}),
    "mistral_heads": ("mistral", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}),
    "qwen2": ("qwen2", {**QKV, "head_dim": 32}),
    "qwen2_windows": ("qwen2", {**QKV, **LAST, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"use_qk_norm": True, "head_dim": 32}),
    "qwen3_windows": ("qwen3", {"use_qk_norm": True, "attention_bias": True, **MIXED}),
    "smollm3": ("smollm3", MIXED),
    "smollm3_biases": ("smollm3", {**ALL, "attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3_ROPE}),
    "seed_oss": ("seed_oss", {**QKV, "mlp_bias": True, "hidden_act": "gelu"}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5, **ALL}),
    "stablelm": ("stablelm", {"norm_type": "layer_norm", "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-3}),
    "stablelm_bias": ("stablelm", {"norm_type": "layer_norm", **QKV, "rope_scaling": LINEAR_ROPE}),
}


def transformer(**fields: Any) -> Transformer:
    """Small, with norms and biases away from 1 and 0; the weights large enough that all layers count."""
    model = Transformer(ModelConfig(**{**TINY, **fields}))
    perturb(model)
    return model.eval()


def loaded(folder: Path, dtype: Any = "auto") -> Any:
    """The folder as transformers loads it, every tensor of it used and none made up."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
def logits(model: Any, length: int = 24, vocab: int = 131) -> torch.Tensor:
    ids = torch.randint(0, vocab, (2, length), generator=torch.Generator().manual_seed(0))
    out = model(ids)
    return getattr(out, "logits", out)


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_same(case: str, tmp_path: Path) -> None:
    model_type, fields = CASES[case]
    model = transformer(**fields)
    model.save_pretrained(tmp_path / "out")
    theirs = loaded(tmp_path / "out")
    assert theirs.config.model_type == model_type
    assert type(theirs).__name__ == json.loads((tmp_path / "out/config.json").read_text())["architectures"][0]
    ours = logits(model)
    assert ours.abs().max() > 1  # so that the tolerance says something
    torch.testing.assert_close(logits(theirs), ours, atol=1e-4, rtol=0)
    for name in ("bos_token_id", "eos_token_id"):
        for config in (theirs.config, theirs.generation_config):
            assert getattr(config, name) == model.config.to_dict()[name]
    assert theirs.config.initializer_range == 0.02
    assert theirs.config.max_position_embeddings == 64


def test_the_cases_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    # The others are in test_hf_families.py, which goes the way in as well.
    assert {kind for kind, _ in CASES.values()} <= {family.model_type for family in FAMILIES}
    model = transformer(**CASES["smollm3"][1])
    model.save_pretrained(tmp_path / "out")
    path = tmp_path / "out/config.json"
    right = logits(loaded(tmp_path / "out"))
    for key, wrong in {"layer_types": ["full_attention"] * 3, "rope_theta": 33.0, "rms_norm_eps": 0.1}.items():
        content = json.loads(path.read_text())
        changed = {**content, key: wrong}
        if key == "rope_theta":
            changed["rope_parameters"] = {**content["rope_parameters"], key: wrong}
        path.write_text(json.dumps(changed))
        assert (logits(loaded(tmp_path / "out")) - right).abs().max() > 1e-3, key
        path.write_text(json.dumps(content))


def test_both_styles_of_configuration_are_written(tmp_path: Path) -> None:
    transformer(rope_scaling={**LLAMA3_ROPE, "factor": 8, "more": 1}, rope_theta=700).save_pretrained(tmp_path / "out")
    content = json.loads((tmp_path / "out/config.json").read_text())
    assert content["rope_scaling"] == LLAMA3_ROPE
    assert content["rope_parameters"] == {**LLAMA3_ROPE, "rope_theta": 700.0}
    assert isinstance(content["rope_scaling"]["factor"], float)
    assert content["rope_theta"] == 700.0
    assert content["dtype"] == content["torch_dtype"] == "float32"
    assert {"bos_token_id", "eos_token_id", "pad_token_id"} <= set(content)  # null, or a family's own would count


def test_a_tied_head_is_one_tensor_in_the_file(tmp_path: Path) -> None:
    model = transformer(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert len(file.keys()) == len(model.state_dict())
        assert file.metadata() == {"format": "pt"}
    theirs = loaded(tmp_path / "out")
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_are_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    model = transformer()
    done = save_pretrained(model, tmp_path / "out", dtype=dtype)
    assert done.dtype == dtype
    assert done.bytes == 2 * model.num_parameters()
    theirs = loaded(tmp_path / "out")
    assert theirs.dtype == dtype
    for name, weight in model.state_dict().items():
        found = theirs.get_parameter(name if name.startswith("lm_head") else f"model.{name}")
        assert torch.equal(found, weight.to(dtype))
    assert next(model.parameters()).dtype == torch.float32


def test_what_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = transformer()
    with torch.no_grad():
        model.layers[1].mlp.up_proj.weight[0, 0] = -7e4
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight holds 7e\+04, more than --dtype float16"):
        model.save_pretrained(tmp_path / "out", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []  # neither the folder nor what was on the way to it
    model.save_pretrained(tmp_path / "out", dtype=torch.bfloat16)


def test_shards_by_size_hold_what_one_file_does(tmp_path: Path) -> None:
    model = transformer()
    one = save_pretrained(model, tmp_path / "one")
    many = save_pretrained(model, tmp_path / "many", max_shard_size="100KB")
    assert (one.files, one.bytes, one.parameters) == (1, many.bytes, many.parameters)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-{i:05d}-of-{many.files:05d}.safetensors" for i in range(1, 6 + 1)]
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == one.bytes
    sizes = {}
    for path in files:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            assert names
            assert {index["weight_map"].pop(name) for name in names} == {path.name}
            sizes[path.name] = sum(file.get_tensor(name).nbytes for name in names)
    assert not index["weight_map"]
    assert max(sizes.values()) <= 100_000
    assert torch.equal(logits(loaded(tmp_path / "many")), logits(loaded(tmp_path / "one")))
    # A larger tensor than a file may be has one to itself.
    assert save_pretrained(model, tmp_path / "each", max_shard_size=1).files == len(model.state_dict())
    # The second export replaced nothing of the first but its folder, and a third leaves no old shard behind.
    save_pretrained(model, tmp_path / "each")
    assert sorted(p.name for p in (tmp_path / "each").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_one_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []

    def read(tensor: Planned) -> torch.Tensor:
        assert not any(ref() is not None for ref in alive)
        value = torch.full(tensor.shape, float(len(alive)), dtype=tensor.dtype)
        alive.append(weakref.ref(value))
        return value

    shapes: list[tuple[int, ...]] = [(3, 5), (), (0, 4), (7,), (2, 2, 2)]
    planned = [Planned(f"t{i}", shape, torch.bfloat16) for i, shape in enumerate(shapes)]
    assert write_shards(tmp_path, planned, 10**9, read) == 1
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        for i, shape in enumerate(shapes):
            assert torch.equal(file.get_tensor(f"t{i}"), torch.full(shape, float(i), dtype=torch.bfloat16))
    with pytest.raises(UserError, match=r"t0 is int64, which no export holds"):
        write_shards(tmp_path, [Planned("t0", (1,), torch.int64)], 10, read)


def test_sizes_of_files() -> None:
    assert [shard_bytes(size) for size in (7, "7", "5GB", "1.5 kb", "500MiB", "2kib")] == [
        7,
        7,
        5 * 10**9,
        1500,
        500 * 2**20,
        2048,
    ]
    for wrong in ("", "GB", "5 GBB", "-1", "0", 0, "1e3", True, "5 apples"):
        with pytest.raises(UserError, match="max_shard_size .* is no size"):
            shard_bytes(wrong)


def test_padding_of_the_vocabulary_is_kept_and_never_generated(tmp_path: Path, trained: Path) -> None:
    ours = Tokenizer(trained)
    size = ours.vocab_size
    model = transformer(vocab_size=size + 6, unpadded_vocab_size=size)
    prompt = torch.tensor([[5, 6, 7]])
    with torch.no_grad():  # one of the padding's ids wins at the prompt's end
        best = int(model(prompt)[0, -1].argmax())
        model.lm_head.weight[size + 2] = 2 * model.lm_head.weight[best]
    save_pretrained(model, tmp_path / "out", tokenizer=ours)
    theirs = loaded(tmp_path / "out")
    assert theirs.config.vocab_size == size + 6
    assert theirs.config.unpadded_vocab_size == size
    assert theirs.generation_config.suppress_tokens == list(range(size, size + 6))
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-4, rtol=1e-4)
    assert int(theirs(prompt).logits[0, -1].argmax()) == size + 2
    made = theirs.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert made.shape == (1, 11)
    assert int(made.max()) < size


def test_configurations_without_a_family_are_refused(tmp_path: Path) -> None:
    for fields, said in {
        "soft caps": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 beside"),
        "experts": (
            {"num_experts": 4, "num_experts_per_tok": 2, "use_parallel_residual": True},
            "use_parallel_residual true beside",
        ),
        "learned": ({"position_embedding": "learned", "num_key_value_heads": 4}, " beside"),
        "cap of logits": ({"final_logit_softcapping": 30}, "final_logit_softcapping 30.0 beside"),
        "norms of layers per head": ({"norm_type": "layer_norm", "use_qk_norm": True}, "norm_type layer_norm beside"),
        "window with biases of Qwen 2": ({**QKV, **ALL, "mlp_bias": True}, "mlp_bias true beside"),
        "both caps": (
            {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            "attn_logit_softcapping 50.0 with final_logit_softcapping 30.0 beside",
        ),
        "scaled part": ({"partial_rotary_factor": 0.5, "attention_bias": True}, "partial_rotary_factor 0.5 beside"),
        "heads of other width": (
            {"norm_type": "layer_norm", "head_dim": 32},
            "norm_type layer_norm beside",
        ),
    }.values():
        with pytest.raises(UserError) as refused:
            transformer(**fields).save_pretrained(tmp_path / "out")
        line = str(refused.value)
        assert "no model class of transformers has model.config." in line
        assert "\n" not in line
        assert said in line
    assert list(tmp_path.iterdir()) == []


def test_a_field_that_families_do_not_know_must_have_its_default() -> None:
    """What ModelConfig learns later is refused until a family says how it is called."""
    known = set(ModelConfig(**TINY).to_dict())
    for family in FAMILIES:
        assert set(family.fields) | set(family.fixed) <= known
        assert {"hidden_size", "norm_type", "rms_norm_eps"} & (set(family.fields) | set(family.fixed))
    bare = replace(FAMILIES[0], fields={"vocab_size": "v", **{n: n for n in ("hidden_size", "num_hidden_layers")}})
    bare = replace(bare, fields={**bare.fields, "num_attention_heads": "num_attention_heads"})
    misfits = bare.misfits(ModelConfig(**{**TINY, "mlp_bias": True, "intermediate_size": 96}))
    assert {"mlp_bias true", "intermediate_size 96", "num_key_value_heads 2"} <= set(misfits)
    assert family_of(ModelConfig(**TINY)).model_type == "llama"


GEMMA3 = {"norm_zero_centered": True, "embedding_multiplier": 8.0, "norm_placement": "sandwich", "use_qk_norm": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LEARNED = {"norm_type": "layer_norm", "position_embedding": "learned", "mlp_type": "plain", "mlp_bias": True}


@pytest.mark.parametrize(
    ("fields", "model_type"),
    [
        ({"no_rope_layers": [0, 1, 1]}, "smollm3"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}, "mistral"),
        ({"attention_multiplier": 0.3}, "granite"),
        (GEMMA3, "gemma3_text"),
        ({**GEMMA3, "attention_multiplier": 0.5, "sliding_window": 5}, "gemma3_text"),
        ({**LEARNED, "attention_bias": True, "num_key_value_heads": 4, "attention_multiplier": 1.0}, "gpt2"),
        ({**LEARNED, "attention_bias": True, "num_key_value_heads": 1}, "gpt_bigcode"),
        ({**EXPERTS, "moe_intermediate_size": 32}, "mixtral"),
        ({**EXPERTS, "mlp_layer_types": ["sparse", "dense", "sparse"], "use_qk_norm": True}, "qwen3_moe"),
    ],
)
def test_models_from_scratch_find_their_family(fields: dict[str, Any], model_type: str, tmp_path: Path) -> None:
    model = transformer(**fields)
    model.save_pretrained(tmp_path / "out")
    theirs = loaded(tmp_path / "out")
    assert theirs.config.model_type == model_type
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-4, rtol=1e-5)
    assert torch.equal(logits(Transformer.from_pretrained(tmp_path / "out")), logits(model))


def test_what_a_class_would_not_take_is_refused(tmp_path: Path) -> None:
    for fields in ({**GEMMA3, "attention_multiplier": 0.3}, {"no_rope_layers": [0, 1, 1], "clip_qkv": 1}):
        with pytest.raises(UserError, match="no model class of transformers has"):
            transformer(**fields).save_pretrained(tmp_path / "out")


def test_the_family_that_a_model_came_from_is_preferred() -> None:
    """A Mistral without a window is a Llama to the letter, but whoever loaded one expects one back."""
    assert family_of(ModelConfig(**TINY)).model_type == "llama"
    assert family_of(ModelConfig(**TINY, model_type="mistral")).model_type == "mistral"
    assert family_of(ModelConfig(**TINY, model_type="mistral", mlp_bias=True)).model_type == "llama"


def test_models_that_have_no_weights_here_are_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Transformer(ModelConfig(**TINY))
    with pytest.raises(UserError, match="meta device"):
        model.save_pretrained(tmp_path / "out")


class Broken:
    """Weights of a model with something changed."""

    def __init__(self, model: Transformer, **changes: torch.Tensor | None) -> None:
        self.tensors = dict(model.state_dict())
        for name, tensor in changes.items():
            name = name.replace("__", ".")
            if tensor is None:
                del self.tensors[name]
            else:
                self.tensors[name] = tensor

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError(name)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = transformer()
    for changes, said in (
        ({"norm__weight": None}, r"1 missing tensors, such as norm\.weight"),
        ({"lora__weight": torch.ones(1)}, r"1 unexpected tensors, such as lora\.weight"),
        ({"norm__weight": torch.ones(3)}, r"norm\.weight is \(3,\), not \(64,\)"),
    ):
        with pytest.raises(UserError, match=said):
            export(Broken(model, **changes), model.config, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_no_export_are_left_alone(tmp_path: Path, small_disk: Path) -> None:
    model = transformer()
    save_pretrained(model, tmp_path / "out")
    (tmp_path / "out/notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("{}")
    (tmp_path / "file").write_text("mine")
    for name, said in (
        ("out", "is an export that holds 'notes.txt' too"),
        ("other", "is not empty and no earlier export"),
        ("file", "is a file"),
        ("file/below", "cannot write"),
        ("disk", "is a mount point"),
    ):
        with pytest.raises(UserError, match=said) as refused:
            save_pretrained(model, tmp_path / name)
        assert "\n" not in str(refused.value)
    (tmp_path / "out/notes.txt").unlink()
    before = (tmp_path / "out/model.safetensors").read_bytes()
    # A full disk changes nothing, and what was written of the new folder goes.
    done = save_pretrained(transformer(hidden_size=8, intermediate_size=8, num_hidden_layers=1), small_disk / "out")
    assert done.bytes < 100_000
    with pytest.raises(UserError, match="writing .* failed: No space left.*nothing was changed"):
        save_pretrained(model, small_disk / "out")
    assert [p.name for p in small_disk.iterdir()] == ["out"]
    loaded(small_disk / "out")
    perturb(model)
    save_pretrained(model, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() != before


def test_a_shared_expert_is_no_choice_of_qwen2_moe(tmp_path: Path) -> None:
    """Its class builds one whatever config.json says, so a mixture without one is none of its."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}
    with pytest.raises(UserError, match="no model class of transformers has"):
        transformer(**experts).save_pretrained(tmp_path / "out")
    transformer(**experts, **QKV, shared_expert_intermediate_size=32).save_pretrained(tmp_path / "out")
    assert loaded(tmp_path / "out").config.model_type == "qwen2_moe"
