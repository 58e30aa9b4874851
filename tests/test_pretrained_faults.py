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
from tests.test_pretrained import SIZES, made, same
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
    folder: str, store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.store", store, "--data.seq_len=16", "--data.global_batch_size=4", "--model.pretrained", folder]
    place = [f"--trainer.default_root_dir={tmp_path}/no", "--trainer.accelerator=cpu", "--trainer.limit_val_batches=1"]
    assert main(["validate", *words, *place, "--ckpt_path=last"]) == 2
    assert "validate needs a checkpoint and there is none" in capsys.readouterr().err.splitlines()[-1]
    assert main(["validate", *words, *place]) == 0
    assert f"weights: {folder}" in capsys.readouterr().err


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
    path = Path(folder, "tokenizer_config.json")
    keys = json.loads(path.read_text())
    assert keys.pop("chat_template")
    path.write_text(json.dumps(keys))
    generation = Path(folder, "generation_config.json")
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "eos_token_id": 0}))
    assert main(["export", folder, "--output", str(tmp_path / "out")]) == 0
    assert "chat_template" not in json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == 0
    Transformer.from_pretrained(folder).save_pretrained(tmp_path / "python", tokenizer=Tokenizer(folder))
    assert "chat_template" not in json.loads((tmp_path / "python/tokenizer_config.json").read_text())


def test_dtypes_by_their_names_and_eight_bits(folder: str, tmp_path: Path) -> None:
    assert Transformer.from_pretrained(folder, dtype="bfloat16").device.type == "cpu"
    assert Transformer.from_pretrained(folder, dtype="bfloat16").norm.weight.dtype == torch.bfloat16
    for wrong in ("bf17", "int8", "auto"):
        with pytest.raises(UserError, match="is none of weights"):
            Transformer.from_pretrained(folder, dtype=wrong)
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
