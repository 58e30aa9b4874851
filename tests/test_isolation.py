"""Packed rows against each document alone, from the store to the gradients, on every attention back end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_llm.data.rows import PackedRows, TokenRows
from lit_llm.data.store import TokenStore
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.model import ModelConfig, Transformer
from tests.data_helpers import word_level, write_store, write_tokenizer
from tests.fake_flash import FakePackage, clear_decisions, use_flash, use_varlen

VOCAB, SEQ_LEN = 40, 24
# Flash-attn and varlen_attn, which run on GPUs, are stand-ins that compute the same from the same arguments.
TRAINING = ["reference", "sdpa", "flash-2", "flash-3", "flash-4", "varlen", "auto"]
FORWARD = [*TRAINING, "flex"]  # flex_attention has no gradients on a CPU
WINDOWS = [None, 4]


@pytest.fixture(autouse=True)
def fresh_decisions() -> Any:
    clear_decisions()
    yield
    clear_decisions()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Documents of 2 to 49 tokens, EOS included: of less than a row, of one, and of more."""
    folder, rng = tmp_path_factory.mktemp("isolation"), np.random.default_rng(0)
    tokenizer = Tokenizer(write_tokenizer(folder / "tokenizer", word_level(VOCAB)))
    lengths = [5, 6, 1, 9, 30, 2, 24, 3, 11, 7, 48, 4, 8, 13, 1]
    documents = [[*rng.integers(0, VOCAB - 1, length).tolist(), VOCAB - 1] for length in lengths]
    return TokenStore(write_store(folder / "store", tokenizer, documents))


def _use(backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes a back end run here; gives its name for the model."""
    name, _, generation = backend.partition("-")
    if name == "flash":
        use_flash(monkeypatch, FakePackage(int(generation)))
    elif name == "varlen":
        use_varlen(monkeypatch, "enable_gqa")
        return "sdpa"
    return name


def _model(backend: str, window: int | None) -> Transformer:
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        sliding_window=window,
        initializer_range=0.3,  # sharp attention, so that a leak shows
    )
    return Transformer(config, seed=1, attention_backend=backend)


def _packed(store: TokenStore, kind: Any, seq_len: int = SEQ_LEN) -> dict[str, Any]:
    """All rows as one batch of tensors."""
    rows = kind(store, seq_len, pad_last=True) if kind is TokenRows else kind(store, seq_len)
    batch = rows[np.arange(len(rows))]
    return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in batch.items()}


def _pieces(batch: dict[str, Any]) -> list[slice]:
    """Each document's part of a row as a slice of the flattened batch, by the ids alone."""
    flat = [(row, document) for row, ids in enumerate(batch["document_ids"].tolist()) for document in ids]
    borders = [place for place in range(1, len(flat)) if flat[place] != flat[place - 1]]
    return [slice(a, b) for a, b in zip([0, *borders], [*borders, len(flat)], strict=True)]


def _documents(batch: dict[str, Any], cumulative: bool) -> dict[str, Any]:
    names = ("cu_seqlens", "max_seqlen") if cumulative else ("document_ids",)
    return {name: batch[name] for name in names}


def _gradients(model: Transformer) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    model.zero_grad()
    return gradients


def _compare_logits(store: TokenStore, kind: Any, backend: str, window: int | None) -> None:
    batch, model = _packed(store, kind), _model(backend, window)
    ids = batch["input_ids"]
    with torch.no_grad():
        for cumulative in (True, False):
            logits = model(ids, **_documents(batch, cumulative)).flatten(0, 1)
            for piece in _pieces(batch):
                alone = model(ids.flatten()[None, piece])[0]
                torch.testing.assert_close(logits[piece], alone, atol=1e-5, rtol=1e-5)
        leaking = model(ids).flatten(0, 1)
    assert (leaking - logits).abs().max() > 0.1  # without isolation the row attends to itself as a whole


def _compare_training(store: TokenStore, kind: Any, backend: str, window: int | None) -> None:
    batch, model = _packed(store, kind), _model(backend, window)
    ids, labels = batch["input_ids"].flatten()[None], batch["labels"].flatten()[None]
    loss, count = model(batch["input_ids"], labels=batch["labels"], **_documents(batch, True))
    loss.backward()
    packed, total, number = _gradients(model), 0.0, 0
    for piece in _pieces(batch):
        alone, counted = model(ids[:, piece], labels=labels[:, piece])
        alone.backward()
        total, number = total + alone.item(), number + int(counted)
    assert int(count) == number == int((batch["labels"] >= 0).sum())
    assert loss.item() == pytest.approx(total, rel=1e-5)
    for mine, wanted in zip(packed, _gradients(model), strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(mine, wanted, atol=1e-5 * float(wanted.abs().max()) + 1e-6, rtol=1e-4)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("backend", FORWARD)
def test_logits_are_those_of_each_document_alone(
    store: TokenStore, backend: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compare_logits(store, PackedRows, _use(backend, monkeypatch), window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("backend", TRAINING)
def test_loss_and_gradients_are_those_of_each_document_alone(
    store: TokenStore, backend: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compare_training(store, PackedRows, _use(backend, monkeypatch), window)


@pytest.mark.parametrize("window", WINDOWS)
def test_contiguous_rows_too(store: TokenStore, window: int | None) -> None:
    _compare_logits(store, TokenRows, "auto", window)
    _compare_training(store, TokenRows, "auto", window)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 2, 23])
@pytest.mark.parametrize("kind", [TokenRows, PackedRows])
@pytest.mark.parametrize("backend", FORWARD)
def test_every_back_end_with_both_kinds_of_rows(
    store: TokenStore, backend: str, kind: Any, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = _use(backend, monkeypatch)
    _compare_logits(store, kind, name, window)
    if backend in TRAINING:
        _compare_training(store, kind, name, window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("backend", FORWARD)
def test_case_35_the_document_before_is_not_seen(
    tmp_path: Path, backend: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "tokenizer", word_level(VOCAB)))
    a, changed, b = [1, 2, 3, 4, VOCAB - 1], [7, 9, 8, 7, VOCAB - 1], [11, 12, 13, 14, 15, VOCAB - 1]
    model = _model(_use(backend, monkeypatch), window)
    isolated, whole = [], []
    with torch.no_grad():
        alone = model(torch.tensor([b]))[0]
        for number, first in enumerate((a, changed)):
            folder = write_store(tmp_path / str(number), tokenizer, [first, b])
            batch = _packed(TokenStore(folder), TokenRows, seq_len=len(first) + len(b))
            assert batch["input_ids"].tolist() == [[*first, *b]]
            isolated.append(model(batch["input_ids"], **_documents(batch, True))[0, len(first) :])
            whole.append(model(batch["input_ids"])[0, len(first) :])
    torch.testing.assert_close(isolated[0], alone, atol=1e-5, rtol=1e-5)
    assert torch.equal(isolated[0], isolated[1])
    assert (whole[0] - whole[1]).abs().max() > 0.1  # not isolated: the whole row attends
