"""Rows out of a store against a slow construction from the documents."""

from __future__ import annotations

import numpy as np
import pytest

from lit_llm.data.rows import TokenRows
from lit_llm.data.store import TokenStore
from lit_llm.errors import UserError


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
