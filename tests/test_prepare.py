"""`lit-llm prepare`: sources, splits, the same bytes for any number of workers, errors in one line."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from lit_llm.cli.main import main
from lit_llm.data import Tokenizer, TokenStore, encode, iter_documents, train_tokenizer
from lit_llm.data import prepare as command
from lit_llm.data.fast_bpe import FastBPE
from lit_llm.data.prepare import prepare
from lit_llm.errors import UserError
from tests.data_helpers import llama3_style, word_level, write_jsonl, write_tokenizer

BOM = b"\xef\xbb\xbf"


@pytest.fixture
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts BOS first; every byte is a token."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), llama3_style())


def texts_of(store: TokenStore) -> list[str]:
    return [store.tokenizer.decode(store.document(i)) for i in range(len(store))]


def read(*inputs: Any, **options: Any) -> list[str]:
    return [document.text for document in iter_documents(inputs, **options)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ------------------------------------------------------------------- sources


def test_texts_come_as_they_stand(tmp_path: Path) -> None:
    text = "a\r\nb\u2028c\n\n é 数学 🙂\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.md").write_bytes(BOM + text.encode())
    (tmp_path / "c.py").write_bytes("# é\n".encode("latin-1").join([b"# coding: latin-1\n", b"x = 1\n"]))
    (tmp_path / "d.py").write_bytes(BOM + b"y = 1\n")
    assert read(tmp_path) == [text, text, "# coding: latin-1\n# é\nx = 1\n", "y = 1\n"]


def test_json_lines_end_at_newlines_only(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"text": "a\u2028b\u2029c\x85d"}, {"text": "\ufeffkept", "other": 1}]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    path.write_bytes(BOM + path.read_bytes().replace(b"\n", b"\r\n\r\n") + b'{"text": "last, \\ud83d\\ude42"}')
    assert read(path) == [records[0]["text"], "\ufeffkept", "last, 🙂"]
    assert read(write_jsonl(tmp_path / "b.jsonl", [{"body": "x"}]), text_key="body") == ["x"]


def test_folders_and_globs_are_sorted_and_counted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.TXT", "z/c.md", "z/deep/d.txt", ".hidden/e.txt", ".f.txt", "g.pdf", "z/h", "empty.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if "empty" in name else name)
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nothing")
    skipped: Counter[str] = Counter()
    inside = ["a.TXT", "b.txt", "z/c.md", "z/deep/d.txt"]
    assert read(tmp_path, skipped=skipped) == inside
    assert skipped == {"hidden": 2, "of another kind": 3, "empty or only whitespace": 1}
    assert read(f"{tmp_path}/*.txt") == ["b.txt"]
    assert read(f"{tmp_path}/z*") == ["z/c.md", "z/deep/d.txt"]
    assert sorted(read(f"{tmp_path}/**/*")) == sorted(read(f"{tmp_path}/**")) == inside
    skipped.clear()
    assert read(tmp_path / "b.txt", f"{tmp_path}/*.txt", tmp_path / "z", skipped=skipped) == ["b.txt", *inside[2:]]
    assert skipped["named twice"] == 1
    odd = tmp_path / "odd [1].txt"
    odd.write_text("odd")
    assert read(odd) == ["odd"]


def test_order_is_by_name_not_by_the_file_system(tmp_path: Path) -> None:
    names = [f"{folder}/{file}.txt" for folder in range(12) for file in range(3)]
    random.Random(0).shuffle(names)
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == sorted(names, key=lambda name: name.split("/"))


def test_stdin_is_a_document_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Path) -> None:
    def pipe(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    pipe(BOM + "one\r\n\n two\u2028 \nthree".encode())
    assert read("-") == ["one", " two\u2028 ", "three"]
    pipe(b"ok\n\xff\n")
    with pytest.raises(UserError, match="stdin:2: byte 0xFF"):
        read("-")
    for options in ({"tokenizer": tokenizer}, {"vocab_size": 300}):  # the second reads its input twice
        pipe(b"one\ntwo\n")
        prepare(["-"], tmp_path / "s", val_fraction=0, **options)
        assert texts_of(TokenStore(tmp_path / "s")) == ["one", "two"]
        assert not list((tmp_path / "s").glob("*spool*"))


def test_python_stdlib_has_no_tests() -> None:
    skipped: Counter[str] = Counter()
    documents = list(iter_documents(["python-stdlib"], skipped=skipped))
    assert 400 < len(documents) < 1500
    assert sum(document.size for document in documents) > 5_000_000
    parts = {part for document in documents for part in Path(document.source).parts}
    assert not parts & {"test", "tests", "idle_test", "site-packages"}
    assert {"argparse.py", "asyncio"} <= parts


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


# ------------------------------------------------------------------- the store


def test_each_document_is_bos_text_eos(tmp_path: Path, tokenizer: Path) -> None:
    """Cases 20 and 28: one BOS, one EOS, empty texts skipped and counted."""
    typed = "<|begin_of_text|>typed<|end_of_text|>"
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in ("", "   ", "a", "數\r\n", typed)])
    summary = prepare([path], tmp_path / "store", tokenizer=tokenizer, val_fraction=0)
    store = TokenStore(tmp_path / "store")
    bos, eos = Tokenizer(tokenizer).bos_token_id, store.eos_token_id
    for i, text in enumerate(("a", "數\r\n", typed)):
        ids = store.document(i).tolist()
        assert (ids[0], ids[-1], len(ids)) == (bos, eos, len(text.encode()) + 2)
        assert ids.count(bos) == ids.count(eos) == 1
    assert texts_of(store) == ["a", "數\r\n", typed]
    assert store.num_bytes == summary.total("bytes") == sum(len(t.encode()) for t in ("a", "數\r\n", typed))
    assert summary.skipped == {"empty or only whitespace": 2}
    assert summary.splits == {"train": {"documents": 3, "tokens": store.num_tokens, "bytes": store.num_bytes}}
    assert TokenStore.splits(tmp_path / "store") == ["train"]
    assert store.tokenizer.fingerprint == Tokenizer(tokenizer).fingerprint
    store.verify()


def many_texts(count: int = 300) -> list[str]:
    rng = random.Random(0)
    return [f"{i}: " + "".join(rng.choices("abc é\n", k=rng.randint(1, 60))) for i in range(count)]


def test_the_same_bytes_for_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 500)
    texts = many_texts()
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    for workers in (1, 3):
        prepare([path], tmp_path / f"{workers}", vocab_size=300, workers=workers, val_fraction=0.3, shard_bytes=3000)
    first = contents(tmp_path / "1")
    assert first == contents(tmp_path / "3")
    assert "val-00001.bin" in first
    train, val = (texts_of(TokenStore(tmp_path / "1", split)) for split in ("train", "val"))
    assert sorted(train + val) == sorted(texts)
    assert [int(t.split(":")[0]) for t in train] == sorted(int(t.split(":")[0]) for t in train)
    assert 60 < len(val) < 120
    for split in ("train", "val"):
        TokenStore(tmp_path / "1", split).verify()
    prepare([path], tmp_path / "other", tokenizer=tmp_path / "1", val_fraction=0.3, seed=1)
    assert texts_of(TokenStore(tmp_path / "other", "val")) != val


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
@pytest.mark.parametrize("count", [2, 3, 40])
def test_neither_split_is_empty(tmp_path: Path, tokenizer: Path, fraction: float, count: int) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(count)])
    prepare([path], tmp_path / "s", tokenizer=tokenizer, val_fraction=fraction)
    both = [texts_of(TokenStore(tmp_path / "s", split)) for split in ("train", "val")]
    assert all(both)
    assert sorted(map(int, both[0] + both[1])) == list(range(count))


def test_one_document_goes_to_train(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("only me")
    for fraction in (0.02, 0.999):
        summary = prepare([tmp_path / "a.txt"], tmp_path / "s", tokenizer=tokenizer, val_fraction=fraction)
        assert TokenStore.splits(tmp_path / "s") == ["train"]
        assert "no validation split" in summary.notes[0]


def test_a_long_document_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Path) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 1000)
    texts = ["s", "x" * 5000, "line of a text\n" * 500, "e"]
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    for workers in (1, 2):
        prepare([path], tmp_path / "s", tokenizer=tokenizer, val_fraction=0, workers=workers, shard_bytes=1000)
        store = TokenStore(tmp_path / "s")
        assert texts_of(store) == texts
        assert [store.document(i).tolist() for i in range(4)] == Tokenizer(tokenizer).encode_batch(texts, eos=True)


def test_a_wide_vocabulary_gets_wide_ids(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "t", word_level(128_256))
    ids = [1, 65535, 65536, 70000, 128009]
    (tmp_path / "a.txt").write_text(" ".join(f"w{i}" for i in ids))
    prepare([tmp_path / "a.txt"], tmp_path / "s", tokenizer=tokenizer)
    store = TokenStore(tmp_path / "s")
    assert store.dtype == np.uint32
    assert store.document(0).dtype == np.int64
    assert store.document(0).tolist() == [*ids, 128_255]


def test_a_tokenizer_is_trained_on_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = many_texts()
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    monkeypatch.setattr(command, "TRAIN_BYTES", path.stat().st_size // 5)

    def sample(seed: int, share: float = 0.2) -> list[str]:
        return list(command._sample(iter_documents([path]), seed, share))

    assert 30 < len(sample(0)) < 90
    assert set(sample(0)) < set(texts)
    assert sample(0) == sample(0) != sample(1)
    first = sample(0, share=1.0)  # of a size that is not known beforehand
    assert first == texts[: len(first)]
    assert 30 < len(first) < len(texts) / 2
    summary = prepare([path], tmp_path / "s", vocab_size=5000)
    assert summary.trained
    assert f"vocabulary of {summary.vocab_size} ids only, not 5000" in summary.notes[0]


# ------------------------------------------------------------------- what goes wrong


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if sys.platform != "linux" or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "x", folder]).returncode:
        pytest.skip("mounting a small tmpfs needs root on Linux")
    yield folder
    subprocess.run(["umount", folder], check=True)


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


# ------------------------------------------------------------------- engines


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train_tokenizer(many_texts(40), 400).save(folder)
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_a_long_file_is_cut_where_its_ids_do_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Path, workers: int
) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 500)
    rng = random.Random(4)
    text = "".join(
        rng.choice(["word ", "é", "数学", "\n", "\n\n", "  ", "it's", "1234", " <|endoftext|>"]) for _ in range(4000)
    )
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(text)
    prepare([tmp_path], tmp_path / "s", tokenizer=trained, val_fraction=0, workers=workers, shard_bytes=1000)
    store = TokenStore(tmp_path / "s")
    for number in range(2):
        assert store.document(number).tolist() == Tokenizer(trained).encode(text, eos=True)
    assert len(list((tmp_path / "s").glob("*.bin"))) > 3


def test_a_last_document_in_several_batches_stays_in_one_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Path
) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 100)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("short")
    (tmp_path / "texts" / "b.txt").write_text("a long text\n" * 100)
    for fraction in (0.001, 0.999):
        summary = prepare([tmp_path / "texts"], tmp_path / "s", tokenizer=trained, val_fraction=fraction, workers=1)
        stores = [TokenStore(tmp_path / "s", split) for split in TokenStore.splits(tmp_path / "s")]
        texts = sorted(text for store in stores for text in texts_of(store))
        assert texts == ["a long text\n" * 100, "short"]
        assert [name for name in summary.splits if name == "train"]


# ------------------------------------------------------------------- the command

COMMAND = """
import argparse, sys
from lit_llm.data import encode, prepare
encode.BATCH_CHARACTERS = 10_000
parser = argparse.ArgumentParser()
prepare.add_arguments(parser)
code = prepare.run(parser.parse_args())
assert "torch" not in sys.modules
sys.exit(code)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_the_command_prints_a_summary_and_imports_no_torch(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"body": "w1 w2 w3"}, {"body": ""}, *[{"body": "w4"}] * 10])
    write_tokenizer(tmp_path / "t", word_level(9))
    options = f"--output {tmp_path}/s --tokenizer {tmp_path}/t --text_key body --val_fraction 0.3 --workers 2 --seed 3"
    process = start(f"{tmp_path}/a.jsonl", *options.split())
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "train" in out
    assert "val" in out
    assert "skipped: 1 empty or only whitespace" in out
    train, val = TokenStore(tmp_path / "s"), TokenStore(tmp_path / "s", "val")
    assert train.num_tokens + val.num_tokens == 4 + 10 * 2


def test_the_options_have_defaults() -> None:
    parser = ArgumentParser()
    command.add_arguments(parser)
    options = vars(parser.parse_args(["a.txt", "b", "--output", "o"]))
    assert options == {
        "inputs": ["a.txt", "b"],
        "output": "o",
        "tokenizer": None,
        "vocab_size": None,
        "text_key": "text",
        "val_fraction": 0.02,
        "workers": None,
        "seed": 0,
        "shard_bytes": 1 << 30,
        "check": None,
    }


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing(tmp_path: Path, tokenizer: Path, number: signal.Signals, code: int) -> None:
    process = start("-", "--output", f"{tmp_path}/s", "--tokenizer", str(tokenizer), "--workers", "2")
    assert process.stdin is not None
    process.stdin.write(("a line of text " * 100 + "\n") * 200)  # then it waits for more
    process.stdin.flush()
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".s.*.tmp/train-*.bin")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.glob(".s.*.tmp/train-*.bin"))
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_workers_end_with_a_killed_parent(tmp_path: Path, tokenizer: Path) -> None:
    process = start("-", "--output", f"{tmp_path}/s", "--tokenizer", str(tokenizer), "--workers", "2")
    assert process.stdin is not None
    process.stdin.write(("a line of text " * 100 + "\n") * 200)
    process.stdin.flush()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.parent.exists():
        pytest.skip("needs /proc")
    deadline = time.monotonic() + 30
    while len(workers := children.read_text().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.kill()
    process.communicate(timeout=30)

    def alive(pid: str) -> bool:
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"

    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2
    assert not any(map(alive, workers))
    assert not (tmp_path / "s").exists()


def test_a_store_is_checked(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    store = tmp_path / "s"
    prepare([tmp_path / "a.txt"], store, tokenizer=tokenizer)
    assert main(["prepare", "--check", str(store)]) == 0
    assert "is whole" in capsys.readouterr().out
    good = (store / "train-00000.bin").read_bytes()
    for bad, message in (
        (good[:50], "train-00000.bin: 50 bytes"),
        (good[:2] + b"\x01\x00" + good[4:], "train-00000.bin: its checksum differs"),
    ):
        (store / "train-00000.bin").write_bytes(bad)
        assert main(["prepare", "--check", str(store)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("lit-llm: error: ")
        assert message in err
        assert err.count("\n") == 1
    (store / "train-00000.bin").write_bytes(good)
    (store / "tokenizer.json").unlink()
    assert main(["prepare", "--check", str(store)]) == 1
    assert main(["prepare", "--check", str(tmp_path / "gone")]) == 2
    assert main(["prepare", "--check", str(store), "a.txt"]) == 2
    assert main(["prepare", "a.txt"]) == 2
    assert "--output DIR missing" in capsys.readouterr().err


def test_the_summary_shows_lengths(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 50)
    lengths = [1, 2, 5, 6, 30, 30, 200]
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a " * n} for n in lengths])
    summary = prepare([path], tmp_path / "s", tokenizer=tokenizer, val_fraction=0, workers=1)
    tokens = np.array([2 * n + 2 for n in lengths])  # with BOS and EOS
    assert np.array_equal(np.diff(TokenStore(tmp_path / "s").offsets), tokens)
    rows = summary.lengths.rows()
    assert sum(count for _, count in rows) == len(lengths)
    assert rows[0] == ("3-4", 1)
    assert rows[-1] == ("257-512", 1)
    assert dict(rows)["33-64"] == 2


def test_no_token_is_lost_in_batches() -> None:
    """The flat ids of a batch are the rows of `encode_batch`, whatever the batches."""
    tokenizer = Tokenizer.from_files({"tokenizer.json": llama3_style().to_str()})
    texts = many_texts(50)
    documents = [encode.Document(text, f"t:{i}", len(text)) for i, text in enumerate(texts)]
    batches = list(encode.encode_all(documents, tokenizer, 1))
    flat = np.concatenate([batch.ids for batch in batches]).tolist()
    assert flat == [i for row in tokenizer.encode_batch(texts, eos=True) for i in row]
    assert sum(int(batch.text_bytes.sum()) for batch in batches) == sum(len(text.encode()) for text in texts)


# ------------------------------------------------------------------- what an attack found


def test_control_tokens_typed_in_a_text_are_no_words(tmp_path: Path) -> None:
    """Unigram and word-level vocabularies hold their control tokens as pieces too."""
    backend = word_level(9, unk="w0")
    tokenizer = write_tokenizer(tmp_path / "words", backend)
    (tmp_path / "a.txt").write_text("w1 </s> w2")
    prepare([tmp_path / "a.txt"], tmp_path / "s", tokenizer=tokenizer)
    ids = TokenStore(tmp_path / "s").document(0).tolist()
    assert ids.count(8) == 1
    assert ids[-1] == 8
    assert Tokenizer(tokenizer).encode("w1 </s> w2", allow_special=True) == [1, 8, 2]
    unigram = Backend(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *((c, -1.0) for c in "</s>▁hi")], unk_id=0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    unigram.add_special_tokens(["<unk>", "</s>"])
    pieces = Tokenizer.from_files({"tokenizer.json": unigram.to_str()})
    assert pieces.decode(pieces.encode("hi</s>", eos=True), skip_special_tokens=False) == "hi</s></s>"
    assert pieces.encode("hi</s>", eos=True).count(1) == 1


def test_a_store_among_the_inputs_is_no_input(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    for _ in range(2):
        summary = prepare([tmp_path], tmp_path / "store", tokenizer=tokenizer, val_fraction=0)
        assert texts_of(TokenStore(tmp_path / "store")) == ["x"]
    assert summary.skipped == {"token stores": 1}


@pytest.mark.parametrize("pattern", ["*", "**", "**/*", "s*/*"])
def test_a_store_behind_a_glob_is_no_input(tmp_path: Path, tokenizer: Path, pattern: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("x")
    prepare([tmp_path / "sub"], tmp_path / "store", tokenizer=tokenizer, val_fraction=0)
    skipped: Counter[str] = Counter()
    assert read(f"{tmp_path}/{pattern}", skipped=skipped) == ["x"]
    assert skipped["token stores"] == 1


def test_a_wildcard_before_double_stars_follows_no_links(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("x")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    for pattern in ("a*/**/*.txt", "*/**"):
        skipped: Counter[str] = Counter()
        assert read(f"{tmp_path}/{pattern}", skipped=skipped) == ["x"]
        assert skipped["linked folders"] == 1
        assert skipped["named twice"] == 0


def test_double_stars_follow_no_links(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "out.txt").write_text("outside")
    (tmp_path / "in" / "sub" / "a.txt").write_text("inside")
    (tmp_path / "in" / "up").symlink_to(tmp_path)
    skipped: Counter[str] = Counter()
    assert read(f"{tmp_path}/in/**/*.txt", skipped=skipped) == ["inside"]
    assert skipped["linked folders"] > 0


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


def test_long_blanks_are_no_trouble_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words" + " " * 300_000 + "and more" + "\n" * 300_000)
    begin = time.monotonic()
    prepare([tmp_path / "a.txt"], tmp_path / "s", vocab_size=300)
    assert time.monotonic() - begin < 30  # it took a minute and more, by the square of the length


def test_training_a_tokenizer_can_be_interrupted(tmp_path: Path) -> None:
    rng = random.Random(0)
    with open(tmp_path / "a.txt", "w") as file:
        for _ in range(300):
            file.write(" ".join("".join(rng.choices("abcdefghij", k=9)) for _ in range(2000)) + "\n")
    process = start(str(tmp_path / "a.txt"), "--output", f"{tmp_path}/s", "--vocab_size", "60000")
    time.sleep(3)
    if process.poll() is None:
        begin = time.monotonic()
        process.terminate()
        assert process.wait(20) == 143
        assert time.monotonic() - begin < 10
        assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    process.communicate()


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


def test_a_summary_that_cannot_be_printed_is_no_failure(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    words = [sys.executable, "-m", "lit_llm", "prepare", f"{tmp_path}/a.txt", "--tokenizer", str(tokenizer)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*words, "--output", f"{tmp_path}/s"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*words, "--output", f"{tmp_path}/s"], env=environment, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 0
    assert "but not this summary: No space left" in done.stderr
