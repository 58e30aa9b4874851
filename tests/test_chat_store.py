"""Chats from a file to batches: what is trained is what the assistant says, in every row; and a look at stores."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_llm.cli.main import main
from lit_llm.data import TokenStore, encode
from lit_llm.data.conversation import encode_conversation
from lit_llm.data.prepare import prepare
from lit_llm.data.prompts import read_prompts
from lit_llm.data.rows import PackedRows
from lit_llm.errors import UserError
from tests import chat_templates
from tests.data_helpers import LLAMA3_TEMPLATE, llama3_style, write_jsonl, write_tokenizer
from tests.training import fit


def chats(count: int, turns: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    words = ["one", "two", "é", "数学", "🙂", "<|im_end|>", "it's"]

    def said() -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randint(1, 8)))

    records = []
    for number in range(count):
        messages = [{"role": role, "content": said()} for _ in range(turns) for role in ("user", "assistant")]
        system = [{"role": "system", "content": said()}] if number % 2 else []
        records.append({"messages": [*system, *messages], "tools": None})
    return records


def answers(records: list[dict[str, Any]], end: str) -> list[list[str]]:
    return [[m["content"] + end for m in r["messages"] if m["role"] == "assistant"] for r in records]


TEMPLATES = {
    "chatml": (None, "<|im_end|>"),
    "qwen": (chat_templates.QWEN25, "<|im_end|>"),
    "llama3": (LLAMA3_TEMPLATE, "<|eot_id|>"),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("workers", [1, 2])
def test_the_trained_tokens_of_a_store_are_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, workers: int
) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 5000)
    template, end = TEMPLATES[name]
    backend = llama3_style()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    config = {"eos_token": end} | ({"chat_template": template} if template else {})
    tokenizer = write_tokenizer(tmp_path / "t", backend, **config)
    records = chats(50)
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    prepare([path], tmp_path / "s", tokenizer=tokenizer, val_fraction=0, workers=workers)
    store = TokenStore(tmp_path / "s")
    assert store.has_trained
    expected = answers(records, end)
    for number in range(len(store)):
        ids, trained = store.document(number), store.document_trained(number)
        assert ids[-1] == store.eos_token_id
        assert (ids == store.tokenizer.bos_token_id).sum() == 1
        runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(trained)) + 1)
        said = [store.tokenizer.decode(ids[run], skip_special_tokens=False) for run in runs if trained[run[0]]]
        assert said == expected[number]
    # and so are the labels of all rows, conversations whole
    rows = PackedRows(store, 1024)
    batch = rows[np.arange(len(rows))]
    labels = sorted(
        store.tokenizer.decode(batch["labels"][row][chosen], skip_special_tokens=False)
        for row in range(len(rows))
        for document in np.unique(batch["document_ids"][row])
        if (chosen := (batch["document_ids"][row] == document) & (batch["labels"][row] >= 0)).any()
    )
    assert labels == sorted("".join(said) for said in expected)


def test_all_kinds_of_records_train_what_is_answered(tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "first"}]},
        {"prompt": "q", "completion": "second"},
        {"instruction": "q", "input": "more", "output": "third"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "fourth"}]},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    (tmp_path / "text.txt").write_text("a text between")
    prepare([path, tmp_path / "text.txt"], tmp_path / "s", vocab_size=300, val_fraction=0)
    store = TokenStore(tmp_path / "s")
    assert store.tokenizer.eos_token == "<|im_end|>"
    decoded = [
        store.tokenizer.decode(store.document(i)[store.document_trained(i)], skip_special_tokens=False)
        for i in range(len(store))
    ]
    assert decoded == [f"{word}<|im_end|>" for word in ("first", "second", "third", "fourth", "a text between")]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [{"role": "boss", "content": "x"}, {"role": "assistant", "content": "y"}]}, "boss"),
        ({"messages": [{"role": "user", "content": "x"}]}, "assistant"),
        ({"messages": []}, "messages"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_chat_is_named_with_its_line(tmp_path: Path, record: dict[str, Any], message: str, workers: int) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*chats(3), record, *chats(3)])
    with pytest.raises(UserError, match=rf"a\.jsonl:4: .*{message}") as error:
        prepare([path], tmp_path / "s", vocab_size=300, workers=workers)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_template_without_its_variable_is_named(tmp_path: Path, workers: int) -> None:
    template = "{{ mood }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer = write_tokenizer(tmp_path / "t", llama3_style(), chat_template=template)
    path = write_jsonl(tmp_path / "a.jsonl", chats(3))
    with pytest.raises(UserError, match=r"a\.jsonl:1: .*'mood'"):
        prepare([path], tmp_path / "s", tokenizer=tokenizer, workers=workers)


def test_a_chat_store_trains_with_little_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chats(120, turns=2))
    prepare([path], tmp_path / "s", vocab_size=300, val_fraction=0.1)
    result = fit(str(tmp_path / "s"), str(tmp_path / "run"), max_steps=4, seq_len=192, val_check_interval=2)
    assert np.isfinite(result["losses"]).all()
    assert result["losses"][-1] < result["losses"][0]
    assert result["val_loss"] is not None
    store = TokenStore(tmp_path / "s")
    rows = PackedRows(store, 192)
    assert rows.packing.fill_rate > 0.9
    assert f"fill rate {rows.packing.fill_rate:.2%}" in rows.describe()
    cut = PackedRows(store, 32).describe()
    assert "chats are longer and cut at 32 tokens" in cut


# ------------------------------------------------------------------- inspect


def test_inspect_shows_documents_and_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = chats(40)
    path = write_jsonl(tmp_path / "a.jsonl", records)
    prepare([path], tmp_path / "s", vocab_size=300, val_fraction=0.2)
    assert main(["inspect", str(tmp_path / "s"), "--seq_len", "2048", "--samples", "2"]) == 0
    out = capsys.readouterr().out
    store, val = (TokenStore(tmp_path / "s", split) for split in ("train", "val"))
    trained = sum(int(store.document_trained(i).sum()) for i in range(len(store)))
    for number in (len(store), store.num_tokens, trained, len(val), val.num_tokens):
        assert f"{number:,}" in out
    assert "% full" in out
    shown = [said for conversation in answers(records, "<|im_end|>") for said in conversation if f"⟦{said}⟧" in out]
    assert len(shown) > 10
    assert "tokens of padding" in out
    picture = tmp_path / "s" / "lengths.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    prepare([path], tmp_path / "s", vocab_size=300)  # the picture is no reason to leave the store alone
    assert not picture.exists()


def test_inspect_of_a_text_store(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "p.svg"
    assert main(["inspect", store, "--seq_len", "32", "--picture", str(picture), "--split", "val"]) == 0
    out = capsys.readouterr().out
    assert "── document" in out
    assert "⟦" in out
    assert "<svg" in picture.read_text()
    for options, message in (
        (["--packing", "loose"], "packing must be"),
        (["--seq_len", "0"], "seq_len must be at least 1"),
        (["--split", "none"], "no split 'none'"),
        (["--picture", str(tmp_path / "p.xyz")], "cannot write the picture"),
    ):
        assert main(["inspect", store, *options]) == 2
        err = capsys.readouterr().err.splitlines()
        assert err[-1].startswith("lit-llm: error: ")
        assert message in err[-1]


def test_inspect_of_what_is_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "meta.json").write_text(json.dumps({"format": "other"}))
    assert main(["inspect", str(tmp_path)]) == 2
    assert "describes no token store" in capsys.readouterr().err


def test_a_stored_chat_is_the_encoded_one(tmp_path: Path) -> None:
    records = chats(10)
    prepare([write_jsonl(tmp_path / "a.jsonl", records)], tmp_path / "s", vocab_size=300, val_fraction=0)
    store = TokenStore(tmp_path / "s")
    for number, record in enumerate(records):
        ids, trained = encode_conversation(store.tokenizer, record["messages"])
        assert store.document(number).tolist() == list(ids)
        assert store.document_trained(number).tolist() == trained.tolist()


def test_rows_too_short_for_any_answer_are_refused(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "q " * 100}, {"role": "assistant", "content": "a"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": long}] * 20)
    prepare([path], tmp_path / "s", vocab_size=300, val_fraction=0)
    with pytest.raises(UserError, match="data.seq_len 16 is too short: every chat"):
        fit(str(tmp_path / "s"), str(tmp_path / "run"), max_steps=1, seq_len=16)


def test_a_sanity_check_without_labels_is_no_failure(tmp_path: Path, store: str) -> None:
    long = {"messages": [{"role": "user", "content": "q " * 100}, {"role": "assistant", "content": "a"}]}
    records = [long if n < 30 else record for n, record in enumerate([*[long] * 30, *chats(20)])]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    prepare([path], tmp_path / "s", tokenizer=store, val_fraction=0.3)
    mixture = {str(tmp_path / "s"): 1, store: 1}
    result = fit(mixture, str(tmp_path / "run"), max_steps=2, seq_len=100, global_batch_size=4, val_check_interval=2)
    assert result["val_loss"] is not None


def test_predict_needs_no_store(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chats(60))
    prepare([path], tmp_path / "s", vocab_size=300)
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1", f"--trainer.default_root_dir={tmp_path}/run"]
    model = '--model.config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}'
    store = f'--data.store={{"{tmp_path}/s": 1}}'
    data = ["--data.seq_len=64", "--data.global_batch_size=4", "--data.resume_with_other_data=true"]
    assert main(["fit", store, *data, model, "--trainer.max_steps=2", *options]) == 0
    config = tmp_path / "run" / "config.yaml"
    assert "resume_with_other_data: false" in config.read_text()  # a permission is given once
    (tmp_path / "s").rename(tmp_path / "gone")
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"messages": [{"role": "user", "content": "one"}]}, {"prompt": "x"}])
    words = ["predict", f"--config={config}", f"--data.prompts_file={prompts}", "--model.generation.max_new_tokens=3"]
    assert main([*words, *options]) == 0
    assert len((tmp_path / "run" / "predictions.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "usr", "content": "x"}], "unknown role 'usr'"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "ends with the assistant's turn"),
    ],
)
def test_prompts_that_are_no_question(tmp_path: Path, messages: list[dict[str, str]], message: str) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "x"}, {"messages": messages}])
    with pytest.raises(UserError, match=rf"p\.jsonl:2.*{message}"):
        read_prompts(None, str(path))


def test_inspect_of_odd_names(tmp_path: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "do$_$x [red]"
    shutil.copytree(store, odd)
    (odd / "lengths.png").mkdir()  # the picture that nobody asked for can't be written
    assert main(["inspect", str(odd), "--seq_len", "100000"]) == 0
    out = capsys.readouterr().out
    assert "no picture: cannot write" in out
    assert "tokens of padding" in out
    (odd / "lengths.png").rmdir()
    assert main(["inspect", str(odd)]) == 0
    assert (odd / "lengths.png").stat().st_size > 1000
    for picture in ("", "x", f"{tmp_path}/none/x.png", f"{odd}/meta.json/x.png"):
        assert main(["inspect", str(odd), "--picture", picture]) == 2
        assert "cannot write the picture" in capsys.readouterr().err
