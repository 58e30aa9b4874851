"""`lit-llm prepare` and what goes wrong: one line that names it, and nothing lost."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_llm.data import Tokenizer, TokenStore, encode
from lit_llm.data import prepare as command
from lit_llm.data.fast_bpe import FastBPE
from lit_llm.data.prepare import prepare
from lit_llm.errors import UserError
from tests.data_helpers import word_level, write_jsonl, write_tokenizer
from tests.prepare_helpers import BOM, contents, many_texts, texts_of


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"one\ntwo\nthr\xffee\n", "a.txt:3: byte 0xFF is not UTF-8"),
        ("a.md", BOM + b"one\n\xe9t\xe9", "a.md:2: byte 0xE9 is not UTF-8"),
        ("a.py", b"# coding: utf-8\nx = 1\ny = '\xe9'\n", "a.py:3: byte 0xE9"),
        ("a.py", b"# coding: klingon\nx = '\xe9'\n", "a.py:2: byte 0xE9"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xff"}\n', "a.jsonl:3: byte 0xFF"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: not JSON"),
        ("a.jsonl", b'{"text": 1' + b"0" * 5000 + b"}", "a.jsonl:1: not JSON"),
        ("a.jsonl", b'["text"]\n', "a.jsonl:1: a line must be a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n{"id": 1, "body": ""}\n', "a.jsonl:2: no key 'text', the keys are 'id', 'body'"),
        ("a.jsonl", b'{"text": null}\n', "a.jsonl:1: 'text' must be text, it is null"),
        ("a.jsonl", b'{"text": ["a"]}\n', "a.jsonl:1: 'text' must be text, it is of type list"),
        ("a.jsonl", b'{"text": "a\\ud83d"}\n', "a.jsonl:1: half a surrogate pair"),
        ("a.jsonl", b'{"text": ""}\n{"text": "  \\n"}\n', "no text in .*a.jsonl"),
        ("a.jsonl", b"", "no text in .*a.jsonl"),
        ("a.txt", BOM, "no text in .*a.txt"),
        ("a.pdf", b"x", "a.pdf: cannot read files of this kind; known are .txt, .md, .py, .jsonl, .json, .csv"),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_a_bad_file_is_named_with_its_line(
    tmp_path: Path, tokenizer: Path, given: bool, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        prepare([tmp_path / name], tmp_path / "store", tokenizer=tokenizer if given else None)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "no input"),
        (["gone.txt"], "no such file or folder: gone.txt"),
        ([""], "no such file or folder: ''"),
        (["*.txt"], r"\*\.txt: no file matches"),
        (["empty"], "empty: no file to read behind this folder"),
        (["other", "a.txt"], "other: no file to read behind this folder"),
        (["oth*"], r"oth\*: no file to read behind this pattern"),
    ],
)
def test_inputs_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("other").mkdir()
    Path("other/a.pdf").write_text("x")
    with pytest.raises(UserError, match=message):
        prepare(inputs, tmp_path / "store")


def test_options_that_contradict(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    no_eos = write_tokenizer(tmp_path / "no_eos", word_level(9).from_str(word_level(9).to_str().replace("</s>", "end")))
    for options, message in (
        ({"val_fraction": 1.0}, "val_fraction .* not 1.0"),
        ({"val_fraction": float("nan")}, "val_fraction .* not nan"),
        ({"workers": 0}, "workers must be at least 1 and at most 256, not 0"),
        ({"vocab_size": 200}, "vocab_size 200 is too small"),
        ({"vocab_size": 10**12}, "vocab_size 1000000000000 is too large"),
        ({"tokenizer": tokenizer, "vocab_size": 999}, "999 contradicts the tokenizer's 261"),
        ({"tokenizer": no_eos}, r'no EOS token.*\{"eos_token": "..."\} into a tokenizer_config.json'),
        ({"tokenizer": tmp_path / "gone"}, "no tokenizer at"),
    ):
        with pytest.raises(UserError, match=message):
            prepare([tmp_path / "a.txt"], tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_text_the_tokenizer_fails_on_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 4)
    tokenizer = write_tokenizer(tmp_path / "t", word_level(9))
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "w1"}] * 9 + [{"text": "unheard of"}] + [{"text": "w1"}] * 50)
    with pytest.raises(UserError, match=r"a\.jsonl:10: the tokenizer fails on this text") as error:
        prepare([path], tmp_path / "s", tokenizer=tokenizer, workers=workers)
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "t"]


def test_a_killed_worker_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Path) -> None:
    parent = os.getpid()

    def die(tokenizer: Tokenizer, batch: Any) -> Any:
        assert os.getpid() != parent
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(encode, "_encode", die)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="process was killed.*fewer --workers"):
        prepare([tmp_path / "a.txt"], tmp_path / "s", tokenizer=tokenizer, workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_full_disk_leaves_the_old_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    prepare([tmp_path / "a.txt"], tmp_path / "s", tokenizer=tokenizer)
    before = contents(tmp_path / "s")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"writing .*s failed: No space left on device; free some space"):
        prepare([tmp_path / "a.txt"], tmp_path / "s", tokenizer=tokenizer)
    assert contents(tmp_path / "s") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "s"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_runs_full_leaves_the_old_store(
    small_disk: Path, tmp_path: Path, tokenizer: Path, workers: int
) -> None:
    (tmp_path / "small.txt").write_text("x")
    (tmp_path / "large.txt").write_text("a line of text\n" * 40_000)
    prepare([tmp_path / "small.txt"], small_disk / "s", tokenizer=tokenizer)
    before = contents(small_disk / "s")
    with pytest.raises(UserError, match="No space left on device.*free some space or choose another --output") as error:
        prepare([tmp_path / "large.txt"], small_disk / "s", tokenizer=tokenizer, workers=workers)
    assert "\n" not in str(error.value)
    assert contents(small_disk / "s") == before
    assert [path.name for path in small_disk.iterdir()] == ["s"]


def test_another_engine_is_checked_and_left_when_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Path
) -> None:
    texts = many_texts(40)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    summary = prepare([path], tmp_path / "fast", tokenizer=trained, val_fraction=0)
    assert summary.engine == "tiktoken"
    right = FastBPE.encode
    monkeypatch.setattr(FastBPE, "encode", lambda self, text: right(self, text)[::-1])
    for workers in (1, 2):
        summary = prepare([path], tmp_path / "slow", tokenizer=trained, val_fraction=0, workers=workers)
        assert summary.engine == "tokenizers"
        assert "gave other ids than tokenizers" in summary.notes[0]
        assert contents(tmp_path / "slow") == contents(tmp_path / "fast")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"some words\n")))
    with pytest.raises(UserError, match="stdin:1: tiktoken gives other ids.*write the text into a file"):
        prepare(["-"], tmp_path / "stdin", tokenizer=trained)
    assert not (tmp_path / "stdin").exists()


def test_half_a_character_in_a_python_source_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b'# coding: raw_unicode_escape\nx = "\\ud800"\n')
    (tmp_path / "b.py").write_bytes(b"y = 1\n")
    prepare([tmp_path], tmp_path / "s", vocab_size=300)  # read as UTF-8 it is plain ASCII
    assert r"\ud800" in texts_of(TokenStore(tmp_path / "s"))[0]


def test_a_mount_point_is_refused_at_once(small_disk: Path, tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"is a mount point.*such as .*disk/store"):
        prepare([tmp_path / "a.txt"], small_disk, tokenizer=tokenizer)


def test_a_long_text_without_a_cut_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Path) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr(encode, "_HELD_CHARACTERS", 1000)
    (tmp_path / "a.txt").write_text("=" * 2000)
    with pytest.raises(UserError, match=r"a\.txt: .*break its lines"):
        prepare([tmp_path / "a.txt"], tmp_path / "s", tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splits": None}, "names no split"),
        ({"fingerprint": "x"}, "fingerprint is another"),
        ({"bos_token_id": 10**9}, "other EOS and BOS"),
        ({"eos_token_id": 1.5}, "1.5 is no number of things"),
    ],
)
def test_a_changed_meta_is_found(tmp_path: Path, tokenizer: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    prepare([tmp_path / "a.txt"], tmp_path / "s", tokenizer=tokenizer)
    meta = json.loads((tmp_path / "s" / "meta.json").read_text())
    (tmp_path / "s" / "meta.json").write_text(json.dumps({**meta, **change}))
    assert any(message in problem for problem in command.check(tmp_path / "s"))
