"""Rows out of a store against a slow construction from the documents."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_llm.data.new_folder import new_folder
from lit_llm.data.rows import PackedRows, TokenRows
from lit_llm.data.store import TokenStore
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.data.writer import StoreWriter
from lit_llm.errors import UserError
from tests.data_helpers import word_level, write_tokenizer


def _slow(store: TokenStore, seq_len: int, row: int, isolate: bool) -> tuple[list[int], list[int], list[int]]:
    tokens, documents = [], []
    for number in range(len(store)):
        ids = store.document(number).tolist()
        tokens += ids
        documents += [number] * len(ids)
    start = row * seq_len
    inputs, labels, where = [], [], []
    for place in range(start, start + seq_len):
        inside = place < len(tokens)
        inputs.append(tokens[place] if inside else 0)
        where.append(documents[place] if inside else -1)
        last = not inside or place + 1 >= len(tokens)
        crossing = isolate and not last and documents[place + 1] != documents[place]
        labels.append(-100 if last or crossing else tokens[place + 1])
    return inputs, labels, where


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("seq_len", [3, 16, 50])
def test_rows_equal_the_slow_construction(store: str, split: str, isolate: bool, seq_len: int) -> None:
    tokens = TokenStore(store, split)
    rows = TokenRows(tokens, seq_len, isolate, pad_last=True)
    assert len(rows) == -(-(tokens.num_tokens - 1) // seq_len)
    batch = rows[np.arange(len(rows))]
    for row in range(len(rows)):
        inputs, labels, documents = _slow(tokens, seq_len, row, isolate)
        real = [d >= 0 for d in documents]
        assert batch["input_ids"][row].tolist() == inputs
        assert batch["labels"][row].tolist() == labels
        if isolate:
            ids = batch["document_ids"][row]
            borders = [a != b for a, b in zip(documents, documents[1:], strict=False)]
            assert [bool(x) for x, r in zip(np.diff(ids) != 0, real[1:], strict=True) if r] == [
                b for b, r in zip(borders, real[1:], strict=True) if r
            ]


def test_each_token_with_a_predecessor_is_a_label_once(store: str) -> None:
    tokens = TokenStore(store, "val")
    rows = TokenRows(tokens, 8, isolate_documents=True, pad_last=True)
    labels = rows[np.arange(len(rows))]["labels"]
    assert (labels >= 0).sum() == tokens.num_tokens - len(tokens)


def test_eos_labels_count_and_only_padding_is_ignored(store: str) -> None:
    tokens = TokenStore(store, "val")
    rows = TokenRows(tokens, 8, isolate_documents=True, pad_last=True)
    labels = rows[np.arange(len(rows))]["labels"]
    assert (labels == tokens.eos_token_id).sum() == len(tokens)


def test_bytes_are_those_of_the_labels(store: str) -> None:
    tokens = TokenStore(store, "val")
    tokenizer = tokens.tokenizer
    rows = TokenRows(tokens, 8, True, True, tokenizer.token_byte_lengths())
    total = int(rows[np.arange(len(rows))]["num_bytes"].sum())
    expected = 0
    for number in range(len(tokens)):
        text = tokenizer.decode(tokens.document(number).tolist())
        first = tokenizer.decode(tokens.document(number)[:1].tolist())
        expected += len(text.encode()) - len(first.encode())
    assert total == expected


def test_a_missing_row_has_no_labels(store: str) -> None:
    batch = TokenRows(TokenStore(store), 16)[np.array([-1, 0])]
    assert (batch["labels"][0] == -100).all()
    assert (batch["labels"][1] >= 0).any()


def test_a_row_longer_than_the_store_is_refused(store: str) -> None:
    with pytest.raises(UserError, match="data.seq_len 1000000 is longer than the store"):
        TokenRows(TokenStore(store), 1_000_000)


# ---- stores whose ids say where each token lies: token i of all documents has id i


def _numbered(folder: Path, lengths: list[int], *, chats: bool = False, shard_bytes: int = 1 << 20) -> TokenStore:
    """Documents of these lengths; in chats a made-up two thirds of the tokens are trained."""
    tokenizer = Tokenizer(write_tokenizer(folder / "tokenizer", word_level(sum(lengths) + 1)))
    total = sum(lengths)
    with new_folder(folder / "store") as new:
        writer = StoreWriter(new, tokenizer, shard_bytes=shard_bytes)
        trained = _trained(np.arange(total)) if chats else None
        writer.append("train", np.arange(total), np.array(lengths), np.array(lengths), trained=trained)
        writer.finish()
    return TokenStore(folder / "store")


def _trained(places: np.ndarray) -> np.ndarray:
    return (places * 7919 % 13 % 3 != 0).astype(np.uint8)


RANDOM = np.random.default_rng(0)
LENGTHS: dict[str, list[int]] = {
    "random": RANDOM.integers(1, 30, 60).tolist(),
    "long": RANDOM.integers(1, 200, 20).tolist(),
    "short": RANDOM.integers(1, 4, 100).tolist(),
    "case 29": [4, 51, 5],
    "one": [40],
    "multiples": [8, 16, 24, 8, 16],
    "single tokens": [1] * 20,
}


@pytest.fixture(scope="module", params=[(name, chats) for name in LENGTHS for chats in (False, True)], ids=str)
def numbered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    name, chats = request.param
    # Shards of 50 tokens, so that rows and documents lie across their borders.
    return _numbered(tmp_path_factory.mktemp("numbered"), LENGTHS[name], chats=chats, shard_bytes=100)


def _check_batch(rows: TokenRows | PackedRows, batch: dict[str, Any]) -> list[int]:
    """What must hold of any isolated batch of a numbered store; gives the inputs that are no padding, in order."""
    store = rows.store
    borders = store.offsets.tolist()
    padding_id = store.eos_token_id if isinstance(rows, PackedRows) else 0
    real, begins = [], []
    for names in ("input_ids", "labels", "document_ids"):
        assert batch[names].dtype == np.int64
        assert batch[names].shape == (len(batch["input_ids"]), rows.seq_len)
        assert batch[names].flags.c_contiguous
        assert batch[names].flags.writeable
    for number, (inputs, labels, documents) in enumerate(
        zip(*(batch[name].tolist() for name in ("input_ids", "labels", "document_ids")), strict=True)
    ):
        assert documents[0] == 0
        assert {b - a for a, b in pairwise(documents)} <= {0, 1}
        changes = [place for place, (a, b) in enumerate(pairwise(documents), start=1) if a != b]
        begins += [number * rows.seq_len + place for place in (0, *changes)]
        runs = list(pairwise((0, *changes, len(inputs))))
        # Padding is the last run: its ids do not lie behind one another (a single 0 at place 0 would, but has labels).
        last = inputs[slice(*runs[-1])]
        padded = all(token == padding_id for token in last) and (padding_id or number > 0 or len(runs) > 1)
        if padded:
            assert set(labels[slice(*runs.pop())]) == {-100}
        for start, stop in runs:
            piece = inputs[start:stop]
            assert piece == list(range(piece[0], piece[0] + len(piece)))
            assert sum(piece[0] < border <= piece[-1] for border in borders) == 0  # within one document
            want = [token + 1 for token in piece]
            if want[-1] in borders:
                want[-1] = -100
            if store.has_trained:
                want = [label if label >= 0 and _trained(np.array(label)) else -100 for label in want]
            assert labels[start:stop] == want
            real += piece
    assert batch["cu_seqlens"].dtype == np.int32
    assert batch["cu_seqlens"].tolist() == [*begins, batch["input_ids"].size]
    assert type(batch["max_seqlen"]) is int
    assert batch["max_seqlen"] == np.diff(batch["cu_seqlens"]).max()
    return real


@pytest.mark.parametrize("seq_len", [1, 5, 8, 64])
def test_packed_rows_hold_every_token_once(numbered: TokenStore, seq_len: int) -> None:
    rows = PackedRows(numbered, seq_len)
    order = np.random.default_rng(1).permutation(len(rows))
    inputs, labels = [], []
    for part in np.array_split(order, min(3, len(order))):
        batch = rows[part]
        inputs += _check_batch(rows, batch)
        labels += batch["labels"][batch["labels"] >= 0].tolist()
    lengths = np.diff(numbered.offsets)
    places = np.arange(numbered.num_tokens)
    within = places - np.repeat(numbered.offsets[:-1], lengths)
    kept = within < seq_len if numbered.has_trained else within >= 0
    assert sorted(inputs) == places[kept].tolist()
    wanted = (within > 0) & (within <= seq_len) & (_trained(places) > 0) if numbered.has_trained else within > 0
    assert sorted(labels) == places[wanted].tolist()
    assert rows.packing.cut_tokens == (~kept).sum()
    assert rows.packing.cut_documents == ((lengths > seq_len).sum() if numbered.has_trained else 0)


@pytest.mark.parametrize("seq_len", [1, 5, 8])
def test_contiguous_rows_hold_every_token_once(numbered: TokenStore, seq_len: int) -> None:
    if numbered.num_tokens <= seq_len:
        return
    rows = TokenRows(numbered, seq_len, pad_last=True)
    inputs = _check_batch(rows, rows[np.arange(len(rows))])
    # Without a label behind it, a last token alone makes no row of its own.
    alone = (numbered.num_tokens - 1) % seq_len == 0
    assert inputs == list(range(numbered.num_tokens - alone))
    rows = TokenRows(numbered, seq_len)  # the last row may be full, with no token behind it
    inputs = _check_batch(rows, rows[np.arange(len(rows))])
    assert inputs == list(range(numbered.num_tokens // seq_len * seq_len))


def test_without_isolation_labels_cross_documents(numbered: TokenStore) -> None:
    rows = TokenRows(numbered, 7, isolate_documents=False)
    batch = rows[np.arange(len(rows))]
    assert set(batch) == {"input_ids", "labels"}
    want = np.arange(1, 7 * len(rows) + 1).reshape(-1, 7)
    counted = want < numbered.num_tokens
    if numbered.has_trained:
        counted &= _trained(want) > 0
    assert np.array_equal(batch["labels"], np.where(counted, want, -100))
    assert np.array_equal(batch["input_ids"], want - 1)


@pytest.mark.parametrize("kind", [TokenRows, PackedRows])
def test_a_row_does_not_depend_on_its_batch(numbered: TokenStore, kind: Any) -> None:
    rows = kind(numbered, 6)
    together = rows[np.array([-1, *range(len(rows)), -1])]
    assert (together["labels"][[0, -1]] == -100).all()
    for row in range(len(rows)):
        alone = rows[row]
        for name in ("input_ids", "labels", "document_ids"):
            assert np.array_equal(alone[name][0], together[name][row + 1])
    assert together["cu_seqlens"][-1] == 6 * (len(rows) + 2)


def test_case_29_a_document_longer_than_the_row(tmp_path: Path) -> None:
    store = _numbered(tmp_path, LENGTHS["case 29"])  # 3, 50 and 4 tokens and the EOS of each
    contiguous, packed = TokenRows(store, 8, pad_last=True), PackedRows(store, 8)
    for rows in (contiguous, packed):
        assert len(rows) == 8
        batch = rows[np.arange(8)]
        assert sorted(_check_batch(rows, batch)) == list(range(60))
        assert sorted(batch["labels"][batch["labels"] >= 0]) == [i for i in range(60) if i not in (0, 4, 55)]
    assert len(TokenRows(store, 8)) == 7  # the rest of 4 tokens is left out
    assert packed.packing.fill_rate == 60 / 64


def test_rows_longer_than_the_store_are_padded(tmp_path: Path) -> None:
    store = _numbered(tmp_path, [3, 2, 4])
    rows = PackedRows(store, 100)
    batch = rows[np.array([0, 0])]
    assert _check_batch(rows, batch) == [5, 6, 7, 8, 0, 1, 2, 3, 4] * 2
    assert batch["cu_seqlens"].tolist() == [0, 4, 7, 9, 100, 104, 107, 109, 200]
    assert (batch["input_ids"][:, 9:] == store.eos_token_id).all()


@pytest.mark.parametrize("kind", [TokenRows, PackedRows])
def test_bytes_count_where_there_is_a_label(tmp_path: Path, kind: Any) -> None:
    store = _numbered(tmp_path, LENGTHS["random"], chats=True)
    rows = kind(store, 16, byte_lengths=np.arange(store.vocab_size))
    batch = rows[np.array([0, -1, 3])]
    assert batch["num_bytes"].tolist() == [int(row[row >= 0].sum()) for row in batch["labels"]]
    assert batch["num_bytes"][1] == 0


@pytest.mark.parametrize("kind", [TokenRows, PackedRows])
def test_a_worker_reads_the_same(tmp_path: Path, kind: Any) -> None:
    rows = kind(_numbered(tmp_path, LENGTHS["random"], chats=True), 16)
    copy = pickle.loads(pickle.dumps(rows))
    for name, values in rows[np.arange(5)].items():
        assert np.array_equal(copy[np.arange(5)][name], values)


def test_a_row_outside_is_an_error(tmp_path: Path) -> None:
    store = _numbered(tmp_path, LENGTHS["random"])
    for rows in (TokenRows(store, 16), PackedRows(store, 16)):
        with pytest.raises(IndexError):
            rows[len(rows) + 2]
