"""`lit-llm prepare`: sources, splits, stores, and the same bytes for any number of workers."""

from __future__ import annotations

import io
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from lit_llm.data import Tokenizer, TokenStore, encode, iter_documents
from lit_llm.data import prepare as command
from lit_llm.data.prepare import prepare
from lit_llm.data.tokenizer_training import _cut_long_words
from lit_llm.errors import UserError
from tests.data_helpers import llama3_style, word_level, write_jsonl, write_tokenizer
from tests.prepare_helpers import BOM, contents, many_texts, read, texts_of


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


def test_no_token_is_lost_in_batches() -> None:
    """The flat ids of a batch are the rows of `encode_batch`, whatever the batches."""
    tokenizer = Tokenizer.from_files({"tokenizer.json": llama3_style().to_str()})
    texts = many_texts(50)
    documents = [encode.Document(text, f"t:{i}", len(text)) for i, text in enumerate(texts)]
    batches = list(encode.encode_all(documents, tokenizer, 1))
    flat = np.concatenate([batch.ids for batch in batches]).tolist()
    assert flat == [i for row in tokenizer.encode_batch(texts, eos=True) for i in row]
    assert sum(int(batch.text_bytes.sum()) for batch in batches) == sum(len(text.encode()) for text in texts)


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


def test_long_words_and_blanks_are_cut_before_training(tmp_path: Path) -> None:
    """To learn from a run takes the square of its length: 300,000 blanks took a minute and more."""
    text = "some words" + " " * 300_000 + "x" * 300_000 + "\n" * 300_000 + "end"
    assert max(map(len, re.findall(r"\s+|\S+", _cut_long_words(text)))) <= 1001
    assert _cut_long_words("plain words\n") == "plain words\n"
    (tmp_path / "a.txt").write_text(text)
    prepare([tmp_path / "a.txt"], tmp_path / "s", vocab_size=300)
    assert texts_of(TokenStore(tmp_path / "s")) == [text]
