"""Rows of a fixed length out of a token store, gathered a batch at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from lit_llm.data.store import TokenStore
from lit_llm.errors import UserError

IGNORED = -100


class TokenRows:
    """Row i is the ``seq_len`` tokens from place i x seq_len on of the store's documents laid end to end.

    Each token is in one row; the label of a row's last token is the first token of the next row. What is left behind
    the last full row is left out, or with ``pad_last`` becomes a row filled up with ignored labels.

    Args:
        store: the tokens.
        seq_len: tokens in a row.
        isolate_documents: add ``document_ids``, and ignore the label at a document's last token.
        pad_last: keep the rest of the store as a padded row.
        byte_lengths: (vocab_size,) bytes of text per id; adds ``num_bytes``, the text that a row's labels stand for.
    """

    def __init__(
        self,
        store: TokenStore,
        seq_len: int,
        isolate_documents: bool = True,
        pad_last: bool = False,
        byte_lengths: np.ndarray | None = None,
    ) -> None:
        self.store, self.seq_len = store, seq_len
        self.isolate_documents, self.pad_last, self.byte_lengths = isolate_documents, pad_last, byte_lengths
        self._rows = -(-(store.num_tokens - 1) // seq_len) if pad_last else store.num_tokens // seq_len
        if self._rows == 0:
            raise UserError(
                f"data.seq_len {seq_len} is longer than the store: split {store.split!r} of {store.folder} has "
                f"{store.num_tokens} tokens; lower seq_len or prepare more text"
            )

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: np.ndarray | int) -> dict[str, Any]:
        """A batch.

        Args:
            rows: (batch,) numbers of rows; -1 gives a row without labels.

        Returns:
            int64 arrays: ``input_ids`` and ``labels`` (batch, seq_len). With documents isolated also ``document_ids``
            (batch, seq_len), and the same as cumulative lengths over the flattened batch (``cu_seqlens``, int32, and
            ``max_seqlen``, an int), made here because on a GPU the model would have to wait for them. With byte lengths
            also ``num_bytes`` (batch,).
        """
        rows = np.atleast_1d(np.asarray(rows, dtype=np.int64))
        starts = np.maximum(rows, 0) * self.seq_len
        tokens, valid = self._tokens(starts)
        valid = np.where(rows < 0, 0, valid)
        input_ids, labels = tokens[:, :-1], tokens[:, 1:].copy()
        places = np.arange(self.seq_len)
        # Row k holds `valid` real tokens; the label of place t is real when place t + 1 is.
        labels[places + 1 >= valid[:, None]] = IGNORED
        batch = {"input_ids": np.ascontiguousarray(input_ids), "labels": labels}
        if self.isolate_documents:
            documents = self._documents(starts)
            labels[documents[:, 1:] != documents[:, :-1]] = IGNORED
            batch["document_ids"] = np.ascontiguousarray(documents[:, :-1])
            batch.update(_cumulative_lengths(batch["document_ids"]))
        if self.byte_lengths is not None:
            batch["num_bytes"] = np.where(labels >= 0, self.byte_lengths[np.maximum(labels, 0)], 0).sum(axis=1)
        return batch

    def _tokens(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(batch, seq_len + 1) int64 tokens, zeros behind the end of the store, and the number of real ones per row."""
        width, end = self.seq_len + 1, self.store.num_tokens
        valid = np.minimum(end - starts, width)
        if valid.min() == width:
            return self.store.gather(starts, width).astype(np.int64, copy=False), valid
        tokens = np.zeros((len(starts), width), dtype=np.int64)
        for row, (start, count) in enumerate(zip(starts.tolist(), valid.tolist(), strict=True)):
            tokens[row, :count] = self.store.tokens(start, start + count)
        return tokens, valid

    def _documents(self, starts: np.ndarray) -> np.ndarray:
        """(batch, seq_len + 1) number of each token's document, counted from 0 in each row."""
        offsets, width = self.store.offsets, self.seq_len + 1
        first = np.searchsorted(offsets, starts, side="right")
        last = np.searchsorted(offsets, starts + width, side="left")
        counts = last - first
        row = np.repeat(np.arange(len(starts)), counts)
        # The borders inside row k are offsets[first[k]:last[k]], all rows laid end to end.
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        places = offsets[np.repeat(first, counts) + within].astype(np.int64) - starts[row]
        borders = np.zeros((len(starts), width), dtype=np.int64)
        np.add.at(borders, (row, places), 1)
        return borders.cumsum(axis=1)


def _cumulative_lengths(document_ids: np.ndarray) -> dict[str, Any]:
    starts = np.ones(document_ids.shape, dtype=bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    cu_seqlens = np.append(np.flatnonzero(starts), document_ids.size).astype(np.int32)
    return {"cu_seqlens": cu_seqlens, "max_seqlen": int(np.diff(cu_seqlens).max())}
