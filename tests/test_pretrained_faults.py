"""What went wrong with pretrained folders when somebody tried: each was silent, or led nowhere."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_llm import GenerationConfig, LitLLM, TokenDataModule, Tokenizer, Transformer, generate
from lit_llm.checkpoint import load_model
from lit_llm.checkpoint.hf import save_pretrained
from lit_llm.cli.main import main
from lit_llm.errors import UserError
from lit_llm.generation.text import TextStream
from tests.conftest import write_texts
from tests.test_export import transformer
from tests.test_hf_folder import fake_hub
from tests.test_pretrained import QUICK, SIZES, made, same
from tests.test_step import trainer

__all__ = ["made"]  # the fixture


@pytest.fixture
def folder(made: tuple[Path, Transformer], tmp_path: Path) -> str:
    shutil.copytree(made[0], tmp_path / "folder")
    return str(tmp_path / "folder")


def still(folder: str, **options: Any) -> LitLLM:
    """That takes steps and learns nothing."""
    return LitLLM(pretrained=folder, optimizer={"lr": 0.0, "weight_decay": 0.0}, **options)


def test_a_fit_after_one_that_found_no_checkpoint(folder: str, store: str, tmp_path: Path) -> None:
    """The first one drew weights, as the checkpoint was to bring others; the second must not train them."""
    data, lit = TokenDataModule(store, seq_len=16, global_batch_size=2), still(folder)
    with pytest.raises(Exception, match="nowhere"):
        trainer(str(tmp_path), max_steps=1, limit_val_batches=0).fit(lit, data, ckpt_path=f"{tmp_path}/nowhere.ckpt")
    trainer(str(tmp_path), max_steps=1, limit_val_batches=0).fit(lit, data)
    assert same(lit.transformer, Transformer.from_pretrained(folder))


class Partial(LitLLM):
    """Saves its norms alone."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["state_dict"] = {n: t for n, t in checkpoint["state_dict"].items() if "norm" in n}


def test_a_checkpoint_with_a_part_of_the_weights(folder: str, store: str, tmp_path: Path) -> None:
    data, path = TokenDataModule(store, seq_len=16, global_batch_size=2), str(tmp_path / "part.ckpt")
    first = trainer(str(tmp_path), max_steps=1, limit_val_batches=0)
    first.fit(Partial(pretrained=folder, optimizer={"lr": 0.0, "weight_decay": 0.0}), data)
    first.save_checkpoint(path)
    again = Partial(pretrained=folder)
    again.strict_loading = False
    trainer(str(tmp_path), limit_val_batches=1).validate(again, data, ckpt_path=path, verbose=False)
    assert same(again.transformer, Transformer.from_pretrained(folder))


class MakesItsOwn(LitLLM):
    def configure_model(self) -> None:
        if self.model is None:
            self.model = Transformer(self.resolve_config())


class FillsIt(LitLLM):
    def configure_model(self) -> None:
        if self.model is None:
            self.model = Transformer(self.resolve_config())
            self.fill_weights(self.model)


def test_a_configure_model_of_ones_own(folder: str, store: str, tmp_path: Path) -> None:
    data = TokenDataModule(store, seq_len=16, global_batch_size=2)
    with pytest.raises(UserError, match=r"MakesItsOwn\.configure_model makes a model without the weights"):
        trainer(str(tmp_path), max_steps=1, limit_val_batches=0).fit(MakesItsOwn(pretrained=folder), data)
    lit = FillsIt(pretrained=folder, optimizer={"lr": 0.0, "weight_decay": 0.0})
    trainer(str(tmp_path), max_steps=1, limit_val_batches=0).fit(lit, data)
    assert same(lit.transformer, Transformer.from_pretrained(folder))
    resolved = LitLLM(pretrained=folder)
    resolved.resolve_config()
    assert copy.deepcopy(resolved).resolve_config() == resolved.resolve_config()  # its files are open


def test_a_tokenizer_of_more_ids_than_the_head(store: str, tmp_path: Path) -> None:
    """As Gemma 3's has one for images. Trained, it must also go on."""
    content = json.loads(Path(store, "tokenizer.json").read_text())
    size = Tokenizer(store).vocab_size
    image = {**content["added_tokens"][0], "id": size, "content": "<image>"}
    content["added_tokens"].append(image)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer, folder = Tokenizer(tmp_path), str(tmp_path / "folder")
    assert tokenizer.vocab_size == size + 1
    save_pretrained(transformer(**SIZES, vocab_size=size), folder, tokenizer=tokenizer)
    write_texts(tmp_path / "texts", documents=20)
    words = ["--output", str(tmp_path / "store"), "--tokenizer", folder, "--workers", "1"]
    assert main(["prepare", str(tmp_path / "texts"), *words]) == 0
    data, path = TokenDataModule(str(tmp_path / "store"), seq_len=16, global_batch_size=2), str(tmp_path / "a.ckpt")
    first = trainer(str(tmp_path), max_steps=1, limit_val_batches=0)
    first.fit(still(folder), data)
    first.save_checkpoint(path)
    lit = still(folder)
    trainer(str(tmp_path), max_steps=2, limit_val_batches=0).fit(lit, data, ckpt_path=path)
    assert lit.transformer.config.vocab_size == size


def test_last_without_a_checkpoint_ends_every_command_but_fit(
    folder: str, store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--data.store", store, "--data.seq_len=16", "--data.global_batch_size=4", "--model.pretrained", folder]
    place = [f"--trainer.default_root_dir={tmp_path}/no", "--trainer.accelerator=cpu", "--trainer.limit_val_batches=1"]
    assert main(["validate", *words, *place, "--ckpt_path=last"]) == 2
    assert "validate needs a checkpoint and there is none" in capsys.readouterr().err.splitlines()[-1]
    assert main(["validate", *words, *place]) == 0
    assert f"weights: {folder}" in caplog.text


def test_ids_without_a_text(folder: str, made: tuple[Path, Transformer], capsys: pytest.CaptureFixture[str]) -> None:
    """A model has often more ids than its tokenizer; they are not generated, and end nothing where they are."""
    keys = json.loads(Path(folder, "config.json").read_text())
    keys.pop("unpadded_vocab_size", None)
    Path(folder, "config.json").write_text(json.dumps(keys))
    tensors = load_file(Path(folder, "model.safetensors"))
    tokenizer = Tokenizer(folder)
    tensors["model.embed_tokens.weight"][tokenizer.vocab_size :] *= 50  # tied: greedy would take them
    save_file(tensors, Path(folder, "model.safetensors"))
    assert main(["generate", folder, "--prompt", "alpha", "--max_new_tokens", "8"]) == 0
    model, _ = load_model(folder)
    assert model.config.generated_vocab_size == tokenizer.vocab_size
    plain = Transformer.from_pretrained(folder)
    [result] = generate(plain, [[5, 6]], GenerationConfig(max_new_tokens=8, eos_token_id=[]), tokenizer=tokenizer)
    assert max(result.tokens) >= tokenizer.vocab_size
    pieces, known = TextStream(tokenizer), tokenizer.encode("alpha beta")
    assert "".join([*(pieces.push(i) for i in (*known, 300)), pieces.finish()]) == tokenizer.decode(known)


def test_what_was_not_trained_goes_out_as_it_came(folder: str, tmp_path: Path) -> None:
    """No chat template is put into it, and nothing to end at, though the vocabulary has ChatML's tokens."""
    generation = Path(folder, "generation_config.json")
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "eos_token_id": 0}))
    path = Path(folder, "tokenizer_config.json")
    keys = json.loads(path.read_text())
    assert main(["export", folder, "--output", str(tmp_path / "talks")]) == 0
    assert json.loads((tmp_path / "talks/tokenizer_config.json").read_text()) == keys
    assert json.loads((tmp_path / "talks/generation_config.json").read_text())["eos_token_id"] == 0
    assert keys.pop("chat_template")
    path.write_text(json.dumps(keys))
    assert main(["export", folder, "--output", str(tmp_path / "out")]) == 0
    assert "chat_template" not in json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == 0
    Transformer.from_pretrained(folder).save_pretrained(tmp_path / "python", tokenizer=Tokenizer(folder))
    assert "chat_template" not in json.loads((tmp_path / "python/tokenizer_config.json").read_text())


def test_dtypes_by_their_names_and_eight_bits(folder: str, tmp_path: Path) -> None:
    assert Transformer.from_pretrained(folder, dtype="bfloat16").device.type == "cpu"
    assert Transformer.from_pretrained(folder, dtype="bfloat16").norm.weight.dtype == torch.bfloat16
    for wrong in ("bf17", "int8", "auto", torch.int8, 16):
        with pytest.raises(UserError, match="is none of weights"):
            Transformer.from_pretrained(folder, dtype=wrong)  # type: ignore[arg-type]
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(Path(folder, "model.safetensors")).items()}
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, Path(folder, "model.safetensors"))
    model = Transformer.from_pretrained(folder)
    assert torch.equal(model.layers[0].mlp.up_proj.weight, tensors[name].bfloat16())
    assert main(["export", folder, "--output", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("wrong", ["abc", [0, "x"], 1.5])
def test_ends_that_are_no_ids(wrong: Any, folder: str) -> None:
    Path(folder, "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(UserError, match=r"eos_token_id must be a whole number"):
        Transformer.from_pretrained(folder)


def test_sources_that_are_parts_of_a_folder(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "model.safetensors"):
        assert main(["generate", f"{folder}/{name}", "--prompt", "a"]) == 2
        assert f"give the folder, {folder}" in capsys.readouterr().err


def test_a_folder_without_a_tokenizer(
    folder: str, store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path(folder, name).unlink()
    place = [f"--trainer.default_root_dir={tmp_path}/run", "--trainer.accelerator=cpu", "--model.pretrained", folder]
    generated = ["generate", folder, "--prompt", "a"]
    for words in (generated, ["predict", *place, "--data.prompts=[a]"]):
        assert main(words) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"{folder} holds no tokenizer (tokenizer.json), so there is no text to make; put one into it" in said
    assert main(["fit", *place, "--data.store", store, *QUICK, "--trainer.max_steps=1"]) == 0
    assert caplog.text.count(f"{folder} holds no tokenizer, so that of data.store can't be compared") == 1


def test_where_the_weights_come_from_is_said_once(
    folder: str, store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--data.store", store, *QUICK, "--model.pretrained", folder, f"--trainer.default_root_dir={tmp_path}/run"]
    for command, left_alone, last in (
        ("validate", False, []),
        ("fit", False, ["--trainer.max_steps=1"]),
        ("validate", True, []),
        ("fit", False, ["--trainer.max_steps=2", "--ckpt_path=last"]),
    ):
        caplog.clear()
        assert main([command, *words, *last]) == 0
        said = caplog.text + capsys.readouterr().err
        resumes = "--ckpt_path=last" in last
        assert said.count(f"weights: {folder}") == int(not resumes)
        assert (f"; {folder} is not read" in said) == resumes
        assert ("--ckpt_path last would take it" in said) == left_alone


def test_a_tokenizer_of_the_hub(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, folder)
    write_texts(tmp_path / "texts", documents=5)
    words = ["prepare", str(tmp_path / "texts"), "--workers", "1", "--output", str(tmp_path / "store")]
    assert main([*words, "--tokenizer", "org/model@v1"]) == 0
    assert Tokenizer(tmp_path / "store").fingerprint == Tokenizer(folder).fingerprint
    [(name, options)] = calls
    assert (name, options["revision"]) == ("org/model", "v1")
    assert {"*.json", "*.model"} < set(options["allow_patterns"])
    assert "*.safetensors" not in options["allow_patterns"]
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--tokenizer", "folder/tokenizer.json"]) == 0
    assert main([*words, "--tokenizer", "nowhere/tokenizer.json"]) == 2
    assert len(calls) == 1


def test_an_error_begins_on_a_line_of_its_own(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(Path(folder, "model.safetensors"))
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, Path(folder, "model.safetensors"))
    assert main(["generate", folder, "--prompt", "alpha"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "alpha\n"
    assert "logits are NaN" in captured.err


def test_a_mixture_says_how_many_parameters_are_active(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 1}
    data = TokenDataModule(store, seq_len=16, global_batch_size=2)
    for more in ({}, experts):
        lit = LitLLM({**SIZES, "num_attention_heads": 4, **more})
        trainer(str(tmp_path), max_steps=1, limit_val_batches=0).fit(lit, data)
        model = lit.transformer
        active = f" ({model.num_parameters(active=True):,} active)" if more else ""
        assert f"model: {model.num_parameters():,} parameters{active}\n" in caplog.text
    with pytest.raises(UserError, match="num_experts_per_tok is missing beside num_experts 4"):
        transformer(**SIZES, num_experts=4)
