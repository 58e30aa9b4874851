"""Token stores: ids come back as written, over shards; contradictions stop with a clear line."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from lit_llm.data import Tokenizer, TokenStore
from lit_llm.data.new_folder import new_folder
from lit_llm.data.store import store_dtype
from lit_llm.data.writer import StoreWriter
from lit_llm.errors import UserError
from tests.data_helpers import word_level, write_store


def documents(count: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, rng.integers(1, 40)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.from_files({"tokenizer.json": word_level(1000).to_str()})


@pytest.fixture
def small(words: Tokenizer, tmp_path: Path) -> Path:
    return write_store(tmp_path / "store", words, documents(20, 1000))


# ------------------------------------------------------------------- widths (cases 25, 26)


def test_the_width_follows_the_vocabulary() -> None:
    assert [store_dtype(n).name for n in (2, 65536, 65537, 150_000)] == ["uint16", "uint16", "uint32", "uint32"]


def test_the_writer_refuses_ids_outside_the_vocabulary(words: Tokenizer, tmp_path: Path) -> None:
    for wrong in (1000, 70_000, -1):
        with pytest.raises(UserError, match=f"token id {wrong} .* 1000"):
            write_store(tmp_path / "s", words, [[1, wrong]])
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------- reading


@pytest.mark.parametrize("shard_bytes", [1 << 30, 100, 2])
def test_all_ways_of_reading_agree(words: Tokenizer, tmp_path: Path, shard_bytes: int) -> None:
    rows = documents(60, 1000)
    store = TokenStore(write_store(tmp_path / "store", words, rows, shard_bytes=shard_bytes))
    flat = np.array([i for row in rows for i in row])
    starts = np.cumsum([0] + [len(row) for row in rows])
    files = sorted((tmp_path / "store").glob("*.bin"))
    assert sum(file.stat().st_size for file in files) == 2 * len(flat)
    assert all(file.stat().st_size == shard_bytes for file in files[:-1])
    assert files[-1].stat().st_size <= shard_bytes
    assert (len(store), store.num_tokens, store.num_bytes) == (60, len(flat), len(flat))
    assert store.offsets.tolist() == starts.tolist()
    assert [store.document(i).tolist() for i in range(60)] == rows
    assert store.document(-1).tolist() == rows[-1]
    rng = np.random.default_rng(1)
    for start, stop in [(0, 0), (0, len(flat)), (len(flat), len(flat)), *np.sort(rng.integers(0, len(flat), (50, 2)))]:
        assert np.array_equal(store.tokens(start, stop), flat[start:stop])
    for length in (1, 7, 200):
        at = rng.integers(0, len(flat) - length + 1, 33)
        at[:2] = 0, len(flat) - length
        got = store.gather(at, length)
        assert got.dtype == store.dtype == np.uint16
        assert np.array_equal(got, flat[at[:, None] + np.arange(length)])
    at = rng.permutation(len(flat))
    assert np.array_equal(store.take(at), flat[at])
    assert store.take(at).dtype == store.dtype
    assert store.gather(np.empty(0, np.int64), 5).shape == (0, 5)
    assert store.gather(np.array([0, 3]), 0).shape == (2, 0)
    at = np.arange(len(flat)).reshape(-1, 1)
    assert np.array_equal(store.document_index(at)[:, 0], np.repeat(np.arange(60), np.diff(starts)))
    store.verify()


def test_reading_outside_is_an_error(small: Path) -> None:
    store = TokenStore(small)
    end = store.num_tokens
    for index in (20, -21):
        with pytest.raises(IndexError):
            store.document(index)
    for start, stop in ((-1, 3), (3, 2), (0, end + 1)):
        with pytest.raises(IndexError):
            store.tokens(start, stop)
    for at in (-1, end - 4):
        with pytest.raises(IndexError):
            store.gather(np.array([0, at]), 5)


def test_pickling_carries_no_data(small: Path) -> None:
    store = TokenStore(small)
    store.gather(np.array([0]), 4)
    assert len(store.offsets) == 21
    assert store.tokenizer.vocab_size == 1000
    sent = pickle.dumps(store)
    assert len(sent) < 3000
    again = pickle.loads(sent)
    assert np.array_equal(again.tokens(0, again.num_tokens), store.tokens(0, store.num_tokens))
    assert again.fingerprint == store.fingerprint


def test_maps_are_read_only(small: Path) -> None:
    store = TokenStore(small)
    with pytest.raises(ValueError, match="read-only"):
        store.tokens(0, 5)[0] = 1


def test_the_fingerprint_follows_the_content(words: Tokenizer, tmp_path: Path) -> None:
    rows = documents(5, 1000)
    folders = [write_store(tmp_path / f"{k}", words, some) for k, some in enumerate((rows, rows, rows[1:]))]
    marks = [TokenStore(folder).fingerprint for folder in folders]
    assert marks[0] == marks[1] != marks[2]


# ------------------------------------------------------------------- what is wrong with a store


def edit_meta(folder: Path, *keys: Any, value: Any) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    place = meta
    for key in keys[:-1]:
        place = place[key]
    if value is None:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["dtype"], "uint32", r"train-00000\.bin: \d+ bytes, but the tokens .* as uint32 make"),
        (["dtype"], "int8", "'int8' .* known are uint16, uint32"),
        (["vocab_size"], 500, r"train-00000\.bin: token id 9\d\d is outside the vocabulary of 500"),
        (["vocab_size"], 100_000, "uint16 cannot hold a vocabulary of 100000"),
        (["vocab_size"], "many", "incomplete"),
        (["format_version"], 99, "format version 99, this lit-llm reads 2"),
        (["format"], "other", "describes no token store"),
        (["splits", "train", "tokens"], 7, "says 7 tokens of train, its shards"),
        (["splits", "train", "documents"], 7, r"train\.idx: 168 bytes"),
        (["splits", "train", "chats"], True, "incomplete .*'trained"),
        (["splits", "train", "shards", 0, "file"], "gone.bin", r"cannot read .*gone\.bin"),
        (["splits", "train", "shards"], None, "incomplete .*'shards'"),
        (["eos_token_id"], None, "incomplete .*'eos_token_id'"),
    ],
)
def test_a_meta_that_contradicts_the_files_is_refused(small: Path, keys: list[Any], value: Any, message: str) -> None:
    edit_meta(small, *keys, value=value)
    with pytest.raises(UserError, match=message) as error:
        TokenStore(small)
    assert str(small) in str(error.value)
    assert "\n" not in str(error.value)


def test_damaged_files_are_named(small: Path) -> None:
    ids, index = small / "train-00000.bin", small / "train.idx"
    good = ids.read_bytes()
    ids.write_bytes(good[:-2])
    with pytest.raises(UserError, match=r"train-00000\.bin: \d+ bytes"):
        TokenStore(small)
    ids.write_bytes(good[:-2] + b"\xff\xff")  # an id outside the vocabulary
    with pytest.raises(UserError, match="token id 65535 is outside the vocabulary of 1000"):
        TokenStore(small)
    ids.write_bytes(b"\x01\x00" + good[2:])  # within it, so only the checksum tells
    store = TokenStore(small)
    with pytest.raises(UserError, match=r"train-00000\.bin: its checksum"):
        store.verify()
    ids.write_bytes(good)
    TokenStore(small).verify()
    offsets = np.fromfile(index, "<i8")
    offsets[3] = offsets[2]
    offsets.tofile(index)
    with pytest.raises(UserError, match=r"train\.idx: offsets that do not rise"):
        TokenStore(small)
    offsets[-1] += 1
    offsets.tofile(index)
    with pytest.raises(UserError, match=r"train\.idx: it runs from 0 to"):
        TokenStore(small)


def test_a_replaced_tokenizer_is_named(small: Path) -> None:
    Tokenizer.from_files({"tokenizer.json": word_level(40).to_str()}).save(small)
    with pytest.raises(UserError, match="its tokenizer is not the one that made the ids"):
        _ = TokenStore(small).tokenizer


def test_no_store_says_how_to_make_one(small: Path, tmp_path: Path) -> None:
    for folder, message in ((tmp_path / "nothing", "no store at"), (tmp_path, "is no token store")):
        with pytest.raises(UserError, match=f"{message}.*lit-llm prepare INPUT"):
            TokenStore(folder)
    assert TokenStore.splits(small) == ["train"]
    with pytest.raises(UserError, match="no split 'val', only train;.*--val_fraction"):
        TokenStore(small, "val")
    (small / "meta.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        TokenStore(small)


# ------------------------------------------------------------------- the folder's name


def _write_and_fail(target: Path, tokenizer: Tokenizer, error: BaseException) -> None:
    with new_folder(target) as folder:
        writer = StoreWriter(folder, tokenizer)
        writer.append("train", np.array([1, 2]), np.array([2]), np.array([2]))
        raise error


def test_a_failure_leaves_the_old_store(words: Tokenizer, small: Path) -> None:
    before = {path.name: path.read_bytes() for path in small.iterdir()}
    for error in (KeyboardInterrupt(), RuntimeError("x"), OSError(28, "No space left on device")):
        with pytest.raises((UserError, KeyboardInterrupt, RuntimeError)):
            _write_and_fail(small, words, error)
        assert {path.name: path.read_bytes() for path in small.iterdir()} == before
        assert [path.name for path in small.parent.iterdir()] == [small.name]


def test_a_failed_rename_puts_the_old_store_back(
    words: Tokenizer, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = TokenStore(small).fingerprint
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if source.suffix == ".tmp":
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(UserError, match="Input/output error"):
        write_store(small, words, [[1]])
    assert TokenStore(small).fingerprint == before
    assert [path.name for path in small.parent.iterdir()] == [small.name]


def test_a_store_is_replaced_as_a_whole(words: Tokenizer, small: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(small)
    reader = TokenStore(small)
    first = reader.tokens(0, 5).tolist()
    write_store(link, words, [[7, 8], [9]], shard_bytes=4)
    assert link.is_symlink()
    assert [TokenStore(small).document(i).tolist() for i in range(2)] == [[7, 8], [9]]
    assert len(list(small.glob("*.bin"))) == 2
    write_store(link, words, [[7, 8]])
    assert len(list(small.glob("*.bin"))) == 1
    assert reader.tokens(0, 5).tolist() == first  # a run that reads the old store goes on
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "store"]


def test_what_is_no_store_is_left_alone(words: Tokenizer, small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_store(other, words, [[1]])  # an empty folder may be taken
    (other / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"'notes\.txt' too"):
        write_store(other, words, [[2]])
    assert TokenStore(other).document(0).tolist() == [1]
    (other / "meta.json").unlink()
    with pytest.raises(UserError, match="no token store; it is left alone"):
        write_store(other, words, [[2]])
    (other / "meta.json").write_text('{"format": "lit-llm token store", "format_version": 2}')
    with pytest.raises(UserError, match="not that of a store"):
        write_store(other, words, [[2]])
    with pytest.raises(UserError, match="is a file"):
        write_store(other / "notes.txt", words, [[2]])
    with pytest.raises(UserError, match="cannot write .*choose another --output"):
        write_store(other / "notes.txt" / "below", words, [[2]])
    assert (other / "notes.txt").read_text() == "mine"


# ------------------------------------------------------------------- chats, and documents in parts


@pytest.mark.parametrize("shard_bytes", [1 << 30, 10])
def test_trained_marks_come_back(words: Tokenizer, tmp_path: Path, shard_bytes: int) -> None:
    rng = np.random.default_rng(3)
    rows = documents(30, 1000)
    marks = [rng.integers(0, 2, len(row)).astype(bool) for row in rows]
    with new_folder(tmp_path / "store") as folder:
        writer = StoreWriter(folder, words, shard_bytes=shard_bytes)
        for number, (row, mark) in enumerate(zip(rows, marks, strict=True)):
            count = np.array([len(row)])
            text = number < 10 or number == 20  # texts before the first chat, and one between
            writer.append("train", np.array(row), count, count, trained=None if text else mark)
            if text:
                mark[:] = True
        writer.finish()
    store = TokenStore(tmp_path / "store")
    assert store.has_trained
    assert [store.document_trained(i).tolist() for i in range(30)] == [mark.tolist() for mark in marks]
    flat = np.concatenate(marks)
    at = rng.integers(0, len(flat) - 7, 20)
    assert np.array_equal(store.gather_trained(at, 7), flat[at[:, None] + np.arange(7)])
    at = rng.permutation(len(flat))
    assert np.array_equal(store.take_trained(at), flat[at])
    assert not store.problems()
    (tmp_path / "store" / "train-00000.trained").write_bytes(b"")
    with pytest.raises(UserError, match=r"train-00000\.trained: 0 bytes"):
        TokenStore(tmp_path / "store")


def test_a_text_store_trains_everything(small: Path) -> None:
    store = TokenStore(small)
    assert not store.has_trained
    assert store.trained(3, 9).tolist() == [1] * 6
    assert store.gather_trained(np.array([0, 2]), 3).tolist() == [[1] * 3] * 2
    assert store.document_trained(0).all()


def test_a_document_may_come_in_parts(words: Tokenizer, tmp_path: Path) -> None:
    with new_folder(tmp_path / "store") as folder:
        writer = StoreWriter(folder, words, shard_bytes=8)
        writer.append("train", np.array([1, 2, 3]), np.array([1, 2]), np.array([1, 2]))
        writer.append("train", np.array([4]), np.array([1]), np.array([1]), begins=False)
        writer.append("train", np.array([5, 6, 7, 8, 9]), np.array([2, 3]), np.array([2, 3]), begins=False)
        writer.finish()
    store = TokenStore(tmp_path / "store")
    assert [store.document(i).tolist() for i in range(len(store))] == [[1], [2, 3, 4, 5, 6], [7, 8, 9]]
    assert store.num_bytes == 9
    assert max(file.stat().st_size for file in (tmp_path / "store").glob("*.bin")) == 8


# ------------------------------------------------------------------- two processes


def _hold(folder: str, ready: Any, go: Any) -> None:
    words = Tokenizer.from_files({"tokenizer.json": word_level(1000).to_str()})
    with new_folder(Path(folder)) as new:
        ready.set()
        go.wait(30)
        writer = StoreWriter(new, words)
        writer.append("train", np.array([1, 2]), np.array([2]), np.array([2]))
        writer.finish()


@contextmanager
def holding(folder: Path) -> Iterator[tuple[multiprocessing.process.BaseProcess, Any]]:
    """Another process that has begun a store there; it goes on when the event is set, and is killed in the end."""
    context = multiprocessing.get_context("spawn")
    ready, go = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(str(folder), ready, go))
    process.start()
    try:
        assert ready.wait(60)
        yield process, go
    finally:
        process.kill()
        process.join()


def test_a_store_in_the_making_is_left_alone(words: Tokenizer, tmp_path: Path) -> None:
    with holding(tmp_path / "store") as (process, go):
        with pytest.raises(UserError, match="is being written by another lit-llm prepare"):
            write_store(tmp_path / "store", words, [[3]])
        with pytest.raises(UserError, match="is being written by another lit-llm prepare; wait"):
            TokenStore(tmp_path / "store")
        go.set()
        process.join(60)
        assert process.exitcode == 0
    assert TokenStore(tmp_path / "store").document(0).tolist() == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_what_a_killed_process_left_is_cleared_away(words: Tokenizer, tmp_path: Path) -> None:
    with holding(tmp_path / "store"):
        pass
    assert any(path.suffix == ".tmp" for path in tmp_path.iterdir())
    write_store(tmp_path / "store", words, [[3]])
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


# ------------------------------------------------------------------- remote stores


@pytest.fixture
def remote(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The small store in fsspec's memory file system, and an empty cache."""
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    _upload(small)
    return "memory://remote/store"


def _upload(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    if memory.exists("/remote/store"):  # that file system lives as long as the process
        memory.rm("/remote/store", recursive=True)
    for path in folder.iterdir():
        memory.pipe_file(f"/remote/store/{path.name}", path.read_bytes())


def test_a_remote_store_reads_like_a_local_one(remote: str, small: Path, tmp_path: Path) -> None:
    here, there = TokenStore(small), TokenStore(remote)
    assert there.fingerprint == here.fingerprint
    assert there.tokenizer.fingerprint == here.tokenizer.fingerprint
    assert [there.document(i).tolist() for i in range(20)] == [here.document(i).tolist() for i in range(20)]
    assert not there.problems()
    fsspec.filesystem("memory").rm("/remote/store/train-00000.bin")
    assert TokenStore(remote).document(3).tolist() == here.document(3).tolist()  # out of the cache
    assert pickle.loads(pickle.dumps(there)).document(3).tolist() == here.document(3).tolist()
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.name.endswith((".part", ".lock"))]


def test_a_remote_store_is_fetched_before_workers_start(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_llm.data.store._SCAN_BYTES", 0)  # as with a store too large to be looked through
    store = TokenStore(remote)
    assert not list((tmp_path / "cache").rglob("*.bin"))
    store.prefetch()
    (copy,) = (tmp_path / "cache").rglob("*.bin")
    copy.write_bytes(copy.read_bytes()[:-2])  # a copy cut short is fetched again
    again = TokenStore(remote)
    assert len(again.document(-1))
    assert len(copy.read_bytes()) == store.num_tokens * 2
    copy.write_bytes(b"\x01" + copy.read_bytes()[1:])
    with pytest.raises(UserError, match=r"train-00000\.bin, a copy of memory://.*, was changed; delete it"):
        TokenStore(remote).problems()


def test_addresses_without_their_package_are_named() -> None:
    with pytest.raises(UserError, match="nosuch://bucket/store: .*nosuch") as error:
        TokenStore("nosuch://bucket/store")
    assert "JSON" not in str(error.value)


def test_a_local_address_is_a_folder(small: Path, tmp_path: Path) -> None:
    (tmp_path / "a b").symlink_to(small)
    assert len(TokenStore(f"file://{tmp_path}/a%20b")) == 20


def test_files_outside_the_store_are_refused(remote: str, small: Path, tmp_path: Path) -> None:
    for name in ("../escaped.bin", str(tmp_path / "escaped.bin"), ".hidden"):
        edit_meta(small, "splits", "train", "shards", 0, "file", value=name)
        _upload(small)
        for folder in (small, remote):
            with pytest.raises(UserError, match="no plain name"):
                TokenStore(folder)
    assert not list(tmp_path.rglob("escaped.bin"))


def test_a_remote_store_replaced_is_fetched_anew(remote: str, words: Tokenizer, tmp_path: Path) -> None:
    TokenStore(remote).document(0)
    write_store(tmp_path / "other", words, [[4, 5, 6]])
    _upload(tmp_path / "other")
    assert TokenStore(remote).document(0).tolist() == [4, 5, 6]


def test_a_remote_store_that_is_damaged_or_not_there_is_named(remote: str) -> None:
    with pytest.raises(UserError, match="no store at memory://remote/nothing"):
        TokenStore("memory://remote/nothing")
    memory = fsspec.filesystem("memory")
    good = memory.cat_file("/remote/store/train-00000.bin")
    memory.pipe_file("/remote/store/train-00000.bin", good[:-2] + b"\x00\x00")
    with pytest.raises(UserError, match=r"memory://remote/store/train-00000\.bin: its checksum differs"):
        TokenStore(remote)
    memory.rm("/remote/store/train-00000.bin")
    with pytest.raises(UserError, match=r"memory://remote/store/train-00000\.bin is not there"):
        TokenStore(remote)
    with pytest.raises(UserError, match="nosuch://bucket/store: .*nosuch"):
        TokenStore("nosuch://bucket/store")
