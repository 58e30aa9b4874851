"""Tokenizers of exported folders: AutoTokenizer must give the ids that ours gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_llm.checkpoint.hf import save_pretrained
from lit_llm.data.chat import CHATML
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.model import Transformer
from tests.data_helpers import BOS, EOS, LLAMA3_TEMPLATE, llama3_style, sentencepiece_style, write_tokenizer
from tests.test_export import QKV, transformer

TEXTS = ["hello there", " two  blanks\n\nand é 数学", "", "<s>", "x" * 50]


def assert_same_ids(tokenizer: Tokenizer, folder: Path) -> Any:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS[:3]:
        ids = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    for name in ("bos_token_id", "eos_token_id"):
        assert getattr(theirs, name) == getattr(tokenizer, name)
    return theirs


def exported(tokenizer: Tokenizer, folder: Path, **fields: Any) -> Transformer:
    fields = {"vocab_size": tokenizer.vocab_size, **fields}
    model = transformer(num_hidden_layers=1, **fields)
    save_pretrained(model, folder, tokenizer=tokenizer)
    return model


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_a_tokenizer_encodes_alike_beside_any_family(kind: str, tokenizer: Path, tmp_path: Path) -> None:
    """Its own class decides, not that of the model beside it."""
    ours = Tokenizer(tokenizer)
    exported(ours, tmp_path / "out", **{"llama": {}, "mistral": {"sliding_window": 5}, "qwen2": QKV}[kind])
    theirs = assert_same_ids(ours, tmp_path / "out")
    assert theirs("a")["input_ids"][0] == ours.bos_token_id is not None
    assert theirs.chat_template is None  # the vocabulary has no tokens of ChatML
    content = json.loads((tmp_path / "out/config.json").read_text())
    assert (content["bos_token_id"], content["eos_token_id"]) == (ours.bos_token_id, ours.eos_token_id)
    assert (tmp_path / "out/tokenizer.json").read_text() == ours.to_files()["tokenizer.json"]


def test_a_trained_tokenizer_brings_chatml(trained: Path, tmp_path: Path) -> None:
    ours = Tokenizer(trained)
    exported(ours, tmp_path / "out")
    theirs = assert_same_ids(ours, tmp_path / "out")
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "é"},
    ]
    assert ours.chat_template is None
    assert theirs.chat_template == CHATML
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == ours.encode_chat(chat)
    # generate ends where a text does, and where a turn does.
    ends = json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"]
    assert ends == [ours.eos_token_id, ours.encode("<|im_end|>", allow_special=True)[0]] == [0, 2]
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 0


@pytest.mark.parametrize("in_json", [True, False])
@pytest.mark.parametrize("said", [None, True, False])
def test_what_stands_before_a_text_stays(in_json: bool, said: bool | None, tmp_path: Path) -> None:
    """BOS by the post-processor, by add_bos_token, by both or by none; transformers 5 goes by the latter."""
    config: dict[str, Any] = {"bos_token": BOS, "eos_token": EOS, "chat_template": LLAMA3_TEMPLATE}
    if said is not None:
        config["add_bos_token"] = said
    config |= {
        "add_eos_token": True,
        "tokenizer_class": "LlamaTokenizerFast",
        "auto_map": {"AutoTokenizer": ["x.y", None]},
    }
    ours = Tokenizer(write_tokenizer(tmp_path / "tokenizer", llama3_style(in_json), **config))
    exported(ours, tmp_path / "out")
    theirs = assert_same_ids(ours, tmp_path / "out")
    assert (theirs("a")["input_ids"][0] == ours.bos_token_id) is bool(in_json or said)
    chat = [{"role": "user", "content": " hi "}]
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == ours.encode_chat(chat)
    again = Tokenizer(tmp_path / "out")
    assert again.chat_template == LLAMA3_TEMPLATE
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_a_sentencepiece_tokenizer_with_its_own_habits(tmp_path: Path) -> None:
    backend = sentencepiece_style()
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "legacy": True}
    ours = Tokenizer(write_tokenizer(tmp_path / "tokenizer", backend, tokenizer_class="LlamaTokenizer", **config))
    exported(ours, tmp_path / "out")
    theirs = assert_same_ids(ours, tmp_path / "out")
    assert theirs("Hello there the")["input_ids"] == ours.encode("Hello there the")
    assert len(theirs("Hello there the")["input_ids"]) > 9
