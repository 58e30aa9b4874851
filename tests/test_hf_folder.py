"""Hugging Face folders in: every value, whatever part of it is read, and what does not fit."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_llm.checkpoint import hub
from lit_llm.checkpoint.hf_folder import config_from_hf, config_like, from_pretrained, open_folder
from lit_llm.checkpoint.pretrained import Pretrained
from lit_llm.errors import UserError
from lit_llm.model import ModelConfig, Transformer
from tests.distributed import run_ranks
from tests.test_export import loaded, logits, transformer
from tests.test_export_command import peak

GPT2 = {
    "norm_type": "layer_norm",
    "position_embedding": "learned",
    "mlp_type": "plain",
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "model_type": "gpt2",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "fused": {"model_type": "phi3"},
    "transposed": GPT2,
    "grouped": {**GPT2, "position_embedding": "rotary", "tie_word_embeddings": False, "model_type": "gpt_neox"}
    | {"partial_rotary_factor": 0.5, "use_parallel_residual": True, "hidden_act": "gelu"},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral", "moe_intermediate_size": 48}
    | {"intermediate_size": 48},
}
LLAMA = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Transformer]]:
    """A folder of each layout, and its model."""
    folder = tmp_path_factory.mktemp("hf")
    models = {name: transformer(**fields) for name, fields in LAYOUTS.items()}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        assert json.loads((folder / name / "config.json").read_text())["model_type"] == (
            LAYOUTS[name].get("model_type", "llama")
        )
    return {name: (folder / name, model) for name, model in models.items()}


def changed(folder: Path, target: Path, change: Callable[[dict[str, Tensor]], Any], **keys: Any) -> Path:
    """A copy of a folder with other tensors, and other keys in config.json."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | keys
    (target / "config.json").write_text(json.dumps(config))
    return target


def weights_of(folder: Path) -> Pretrained:
    return open_folder(folder).weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_comes_back_bit_by_bit(layout: str, made: Any, tmp_path: Path) -> None:
    folder, model = made[layout]
    back = from_pretrained(folder)
    assert not back.training
    assert all(p.requires_grad for p in back.parameters())
    assert {name: t.shape for name, t in back.state_dict().items()} == {
        n: t.shape for n, t in model.state_dict().items()
    }
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    torch.testing.assert_close(logits(back), logits(model), atol=0, rtol=0)
    assert config_from_hf(folder) == back.config
    assert back.config.model_type == LAYOUTS[layout].get("model_type", "llama")
    theirs = loaded(folder)  # and it is what transformers makes of it
    torch.testing.assert_close(logits(back), logits(theirs), atol=1e-4, rtol=0)


def test_shards_and_dtypes_are_as_asked_for(made: Any, tmp_path: Path) -> None:
    model = made["llama"][1]
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB", dtype=torch.bfloat16)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    for dtype in (None, torch.bfloat16, torch.float16, torch.float32):
        back = from_pretrained(tmp_path / "sharded", dtype)
        for name, tensor in back.state_dict().items():
            assert tensor.dtype == (dtype or torch.bfloat16)
            assert torch.equal(tensor, model.state_dict()[name].bfloat16().to(tensor.dtype)), name
    mixed = changed(made["llama"][0], tmp_path / "mixed", lambda t: t.update({LLAMA: t[LLAMA].bfloat16()}))
    assert {p.dtype for p in from_pretrained(mixed).parameters()} == {torch.float32}
    assert weights_of(mixed).dtype("layers.1.self_attn.k_proj.weight") == torch.bfloat16
    with torch.device("meta"):
        assert all(p.is_meta for p in from_pretrained(made["llama"][0]).parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_part_is_read_and_rows_cost_no_more_than_themselves(layout: str, made: Any) -> None:
    folder, model = made[layout]
    weights = weights_of(folder)
    assert set(weights.names()) == set(model.state_dict())
    for name, whole in model.state_dict().items():
        assert weights.shape(name) == tuple(whole.shape)
        assert torch.equal(weights.read(name), whole)
        for parts in (2, 3, 7):
            for part in whole.chunk(parts):
                start = part.storage_offset() // (whole.stride(0) or 1)
                before, target = weights.tensors.bytes_read, torch.empty_like(part)
                weights.read_into(name, target, (start, *(0,) * (whole.ndim - 1)))
                assert torch.equal(target, part), (name, parts)
                read = weights.tensors.bytes_read - before
                turned = layout == "transposed" and whole.ndim == 2 and not name.startswith("embed")
                assert read == part.numel() * 4 if not turned else read >= part.numel() * 4
        if whole.ndim < 2:
            continue
        for part in whole.chunk(3, dim=1):
            start = (part.storage_offset() - whole.storage_offset()) // whole.stride(1)
            weights.read_into(name, target := torch.empty_like(part), (0, start, *(0,) * (whole.ndim - 2)))
            assert torch.equal(target, part), name
        corner = whole[1:3, 2:5]
        weights.read_into(name, target := torch.empty_like(corner).bfloat16(), (1, 2, *(0,) * (whole.ndim - 2)))
        assert torch.equal(target, corner.bfloat16())
    weights.read_into("norm.weight", torch.empty(0), (64,))  # of a process that holds nothing


def peaks(folder: str) -> list[int]:
    """Bytes by which a fresh process grows for a model in float32, and for one in bfloat16."""
    from_pretrained(f"{folder}/small")  # what is imported on the way
    kept: list[Transformer] = []

    def load(dtype: torch.dtype) -> None:
        kept.append(from_pretrained(f"{folder}/big", dtype))

    return [peak(lambda: load(torch.float32)), peak(lambda: load(torch.bfloat16))]


def test_reading_holds_one_copy(tmp_path: Path) -> None:
    config = ModelConfig(vocab_size=4000, hidden_size=512, num_hidden_layers=6, intermediate_size=2048)
    Transformer(config).save_pretrained(tmp_path / "big", max_shard_size="50MB")
    transformer().save_pretrained(tmp_path / "small")
    size = sum(path.stat().st_size for path in (tmp_path / "big").glob("*.safetensors"))
    assert size > 100e6
    (same, half) = run_ranks("tests.test_hf_folder:peaks", 1, folder=str(tmp_path))[0]
    assert 0.95 * size < same < 1.03 * size
    assert 0.45 * size < half < 0.5 * size + 12e6  # a buffer of 4 MiB and its conversion


def test_ids_are_those_that_generate_goes_by(made: Any, tmp_path: Path) -> None:
    folder = changed(made["llama"][0], tmp_path / "a", lambda t: None, eos_token_id=5, bos_token_id=1)
    assert open_folder(folder).generation is None
    assert (config_from_hf(folder).eos_token_id, config_from_hf(folder).bos_token_id) == (5, 1)
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [5, 7], "bos_token_id": None}))
    assert (config_from_hf(folder).eos_token_id, config_from_hf(folder).bos_token_id) == ((5, 7), 1)
    generation.write_text(json.dumps({"temperature": 0.5}))
    assert config_from_hf(folder / "config.json").eos_token_id == 5
    generation.write_text("[1]")
    with pytest.raises(UserError, match="generation_config.json holds no JSON object"):
        open_folder(folder)


def test_a_shape_without_weights_is_found_by_any_name(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = made["grouped"]
    expected = {**model.config.to_dict(), "model_type": "gpt_neox"}
    for name in ("bos_token_id", "eos_token_id", "unpadded_vocab_size"):
        del expected[name]
    assert config_like(str(folder)) == config_like(str(folder / "config.json")) == expected
    assert config_like("1m") == {**config_like("1m"), "hidden_size": 96}
    monkeypatch.chdir(folder.parent)
    assert config_like("grouped") == expected
    with pytest.raises(UserError, match="no preset is called '4m'"):
        config_like("4m")


def test_files_may_hold_what_is_no_weight_and_lack_the_prefix(made: Any, tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        for layer in range(3):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["model.rotary_emb.inv_freq"] = torch.ones(8)

    def strip(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    for layout, change in (("llama", add), ("transposed", strip)):
        folder, model = made[layout]
        back = from_pretrained(changed(folder, tmp_path / layout, change))
        assert all(torch.equal(t, model.state_dict()[name]) for name, t in back.state_dict().items())


def test_a_tied_head_in_the_file_is_never_dropped_unseen(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = made["tied"]
    embedding = model.embed_tokens.weight.detach()
    same = changed(folder, tmp_path / "same", lambda t: t.update({"lm_head.weight": embedding.clone()}))
    head_alone = changed(
        folder, tmp_path / "alone", lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")})
    )
    for one in (same, head_alone):
        back = from_pretrained(one)
        assert back.lm_head is None
        assert torch.equal(back.embed_tokens.weight, embedding)
    assert not caplog.records
    other = changed(folder, tmp_path / "other", lambda t: t.update({"lm_head.weight": embedding.flip(0)}))
    back = from_pretrained(other)
    assert back.lm_head is not None
    assert torch.equal(back.lm_head.weight, embedding.flip(0))
    assert not back.config.tie_word_embeddings
    assert "the files have another one, which is taken" in caplog.text
    torch.testing.assert_close(logits(back), logits(loaded(other)), atol=1e-4, rtol=0)  # as transformers 5


MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop(LLAMA), f"{LLAMA} is missing"),
    "two missing": (
        lambda t: [t.pop(LLAMA), t.pop("model.norm.weight")],
        f"2 tensors, such as {LLAMA}, are missing",
    ),
    "unexpected": (lambda t: t.update({"model.layers.3.x": torch.ones(1)}), "model.layers.3.x is unexpected"),
    "a bias": (lambda t: t.update({"lm_head.bias": torch.ones(131)}), "lm_head.bias is unexpected"),
    "no mask": (lambda t: t.update({"model.xattn.bias": torch.ones(1)}), "model.xattn.bias is unexpected"),
    "shape": (lambda t: t.update({LLAMA: t[LLAMA].T}), rf"{LLAMA} is \[64, 32\], not \[32, 64\]"),
    "integers": (lambda t: t.update({LLAMA: t[LLAMA].to(torch.int8)}), f"{LLAMA} is I8, so quantized"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_tensors_that_do_not_fit_are_refused_by_name(case: str, made: Any, tmp_path: Path) -> None:
    change, said = MISFITS[case]
    folder = changed(made["llama"][0], tmp_path / "a", change)
    with pytest.raises(UserError, match=said) as error:
        from_pretrained(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_folders_that_are_none_are_refused(made: Any, tmp_path: Path) -> None:
    odd = changed(made["llama"][0], tmp_path / "odd", lambda t: None, model_type="xyz")
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/config.json").write_text("{")
    (tmp_path / "weights.safetensors").touch()
    pickles = changed(made["llama"][0], tmp_path / "pickles", lambda t: None)
    (pickles / "model.safetensors").rename(pickles / "pytorch_model.bin")
    for source, said in (
        (odd, "model_type 'xyz'"),
        (tmp_path / "empty", "is no Hugging Face folder: it has no config.json"),
        (tmp_path / "adapter", "holds an adapter"),
        (tmp_path / "torn", "config.json can't be read"),
        (tmp_path / "nothing", "no Hugging Face folder at"),
        (tmp_path / "weights.safetensors", "is a file; give the Hugging Face folder"),
        (pickles, "pytorch_model.bin and no safetensors; pickles run code"),
    ):
        with pytest.raises(UserError, match=said) as error:
            from_pretrained(source)
        assert "\n" not in str(error.value)


# ------------------------------------------------------------------ the hub


def fake_hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[str, dict[str, Any]]]:
    calls = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append((name, options))
        if isinstance(answer, BaseException):
            raise answer
        return str(answer)

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


def test_names_of_the_hub_are_fetched_and_local_folders_come_first(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_hub(monkeypatch, made["llama"][0])
    monkeypatch.chdir(tmp_path)
    assert from_pretrained("org/model-1.5@main").config.hidden_size == 64
    assert config_from_hf("org/model-1.5").hidden_size == 64
    assert config_like("org/model-1.5")["hidden_size"] == 64
    (first, whole), (second, shape), _ = calls
    assert (first, whole["revision"], second, shape["revision"]) == ("org/model-1.5", "main", "org/model-1.5", None)
    assert "*.safetensors" in whole["allow_patterns"]
    assert "*.safetensors" not in shape["allow_patterns"]
    assert not any(pattern in ("*", "*.bin", "*.py") for pattern in whole["allow_patterns"])
    changed(made["tied"][0], tmp_path / "org", lambda t: None)
    (tmp_path / "org").rename(tmp_path / "model")
    (tmp_path / "org").mkdir()
    (tmp_path / "model").rename(tmp_path / "org/model-1.5")
    assert from_pretrained("org/model-1.5").config.tie_word_embeddings
    for name in ("org/other", "./model", "a/b/c", "/org/model", "org/step.ckpt", "model"):
        assert not hub.is_hub_name(name), name
        with pytest.raises(UserError, match="no Hugging Face folder at"):
            from_pretrained(name)
    assert len(calls) == 3


def _error(*names: str) -> Exception:
    kind: type = Exception
    for name in reversed(names):
        kind = type(name, (kind,), {})
    return kind("many\nlines of it")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (_error("GatedRepoError", "RepositoryNotFoundError"), r"org/model is gated: accept its terms"),
        (
            _error("RepositoryNotFoundError", "HfHubHTTPError"),
            r"no model on the Hugging Face hub .* local folder works",
        ),
        (_error("RevisionNotFoundError"), "has no such revision"),
        (_error("LocalEntryNotFoundError"), r"hub can't be reached; a local folder works"),
        (ConnectionError("refused"), "hub can't be reached"),
        (_error("HfHubHTTPError"), "could not be fetched from the Hugging Face hub: many lines of it"),
    ],
)
def test_what_goes_wrong_at_the_hub_is_one_line(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, error)
    with pytest.raises(UserError, match=said) as raised:
        from_pretrained("org/model")
    assert "\n" not in str(raised.value)


def test_without_its_package_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"org/model is no folder here, .* pip install 'lit-llm\[hub\]'"):
        from_pretrained("org/model")
