"""Rows of a fixed length out of a token store, gathered a batch at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from lit_llm.data.packing import best_fit
from lit_llm.data.store import TokenStore
from lit_llm.errors import UserError

IGNORED = -100


class TokenRows:
    """Row i is the ``seq_len`` tokens from place i x seq_len on of the store's documents laid end to end.

    Each token is in one row; the label of a row's last token is the first token of the next row. What is left behind
    the last full row is left out, or with ``pad_last`` becomes a row filled up with ignored labels. In a chat store
    only trained tokens are labels.

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

    def describe(self) -> str:
        """What the rows are, for a log."""
        left = max(0, self.store.num_tokens - self._rows * self.seq_len)
        return f"{self._rows:,} rows of {self.seq_len} tokens, contiguous, {left:,} tokens at the end left out"

    def __getitem__(self, rows: np.ndarray | int) -> dict[str, Any]:
        """A batch.

        Args:
            rows: (batch,) numbers of rows; -1 gives a row without labels.

        Returns:
            Contiguous int64 arrays of its own: ``input_ids`` and ``labels`` (batch, seq_len). With documents isolated
            also ``document_ids`` (batch, seq_len), numbered from 0 in each row, and the same as cumulative lengths over
            the flattened batch (``cu_seqlens``, int32, and ``max_seqlen``, an int), made here because on a GPU the
            model would have to wait for them. With byte lengths also ``num_bytes`` (batch,).
        """
        rows = np.array(rows, dtype=np.int64, ndmin=1)
        missing = min(rows.tolist()) < 0  # of a few, quicker than numpy's
        starts = (np.maximum(rows, 0) if missing else rows) * self.seq_len
        batch = self._tokens(starts)
        if self.isolate_documents:
            self._isolate(batch, starts)
        return _finish(batch, rows, missing, self.byte_lengths)

    def _tokens(self, starts: np.ndarray) -> dict[str, Any]:
        """Inputs and labels; behind the end of the store inputs 0 and no labels."""
        store, seq_len = self.store, self.seq_len
        # Apart and contiguous, not two views of one array: such a view would reach a GPU by an unpinned copy.
        batch = {name: np.empty((len(starts), seq_len), dtype=np.int64) for name in ("input_ids", "labels")}
        if max(starts.tolist()) + seq_len < store.num_tokens:
            tokens = store.gather(starts, seq_len + 1)
            batch["input_ids"][...] = tokens[:, :-1]
            batch["labels"][...] = tokens[:, 1:]
            if store.has_trained:
                batch["labels"][store.gather_trained(starts + 1, seq_len) == 0] = IGNORED
            return batch
        batch["input_ids"].fill(0)
        batch["labels"].fill(IGNORED)
        for row, start in enumerate(starts.tolist()):
            stop = min(start + seq_len + 1, store.num_tokens)
            tokens = store.tokens(start, stop)
            batch["input_ids"][row, : len(tokens)] = tokens[:seq_len]
            batch["labels"][row, : len(tokens) - 1] = tokens[1:]
            if store.has_trained:
                untrained = store.trained(start + 1, stop) == 0
                batch["labels"][row, : len(tokens) - 1][untrained] = IGNORED
        return batch

    def _isolate(self, batch: dict[str, Any], starts: np.ndarray) -> None:
        """Adds the documents, and ignores labels in another document than their input."""
        offsets, seq_len = self.store.offsets, self.seq_len
        # Row k holds the document borders offsets[first[k]:end[k]] behind its first token.
        first, end = offsets.searchsorted(np.concatenate((starts + 1, starts + seq_len))).reshape(2, -1)
        row, numbers, heads = _ragged(end - first + 1)
        begins = offsets[(first - 1)[row] + numbers]
        begins[heads] = starts  # the first document's part begins with the row
        begins += (np.arange(0, len(starts) * seq_len, seq_len) - starts)[row]
        _add_documents(batch, begins, numbers)
        labels = batch["labels"]
        behind = labels[:, -1].copy()
        behind[offsets.take(end, mode="clip") == starts + seq_len] = IGNORED
        labels.reshape(-1)[begins - 1] = IGNORED  # the label before each begin, also at rows' ends: these are put back
        labels[:, -1] = behind


class PackedRows:
    """Rows of whole documents, packed by best fit; behind the last document a row is filled up with EOS.

    Documents are always isolated, and the padding is one of its own. Each token is in one row, and each that has a
    predecessor in its document is a label once: documents longer than a row are split, and the label at the end of a
    piece is the first token of the next. In a chat store they are cut instead at ``seq_len`` tokens (and the next), and
    only trained tokens are labels. ``packing`` says how well the rows are filled and what was cut.

    Args:
        store: the tokens.
        seq_len: tokens in a row.
        byte_lengths: (vocab_size,) bytes of text per id; adds ``num_bytes``, the text that a row's labels stand for.
    """

    def __init__(self, store: TokenStore, seq_len: int, byte_lengths: np.ndarray | None = None) -> None:
        self.store, self.seq_len, self.byte_lengths = store, seq_len, byte_lengths
        self.packing = best_fit(np.diff(store.offsets), seq_len, long="cut" if store.has_trained else "split")
        if self.packing.cut_documents == len(store) and not self._any_trained():
            raise UserError(
                f"data.seq_len {seq_len} is too short: every chat of {store.folder} ({store.split}) is cut before the "
                "assistant says anything; raise it"
            )

    def _any_trained(self) -> bool:
        # the first token of a conversation is no label, nor is what is behind the cut but for one
        return any(self.store.trained(start + 1, start + self.seq_len + 1).any() for start in self.packing.piece_start)

    def __len__(self) -> int:
        return self.packing.num_rows

    def describe(self) -> str:
        """What the rows are, for a log."""
        packing = self.packing
        text = f"{len(self):,} rows of {self.seq_len} tokens, best fit, fill rate {packing.fill_rate:.2%}"
        if packing.cut_documents:
            text += (
                f"; {packing.cut_documents:,} of {len(self.store):,} chats are longer and cut at {self.seq_len} "
                f"tokens, {packing.cut_tokens:,} tokens left out"
            )
        return text

    def __getitem__(self, rows: np.ndarray | int) -> dict[str, Any]:
        """A batch, as :meth:`TokenRows.__getitem__` gives it with documents isolated.

        Args:
            rows: (batch,) numbers of rows; -1 gives a row without labels.
        """
        rows = np.array(rows, dtype=np.int64, ndmin=1)
        missing = min(rows.tolist()) < 0  # of a few, quicker than numpy's
        chosen, packing = np.maximum(rows, 0) if missing else rows, self.packing
        first = packing.row_offsets[chosen]
        pieces = packing.row_offsets[chosen + 1] - first
        row, numbers, heads = _ragged(pieces + 1)  # one more in each row is its padding, maybe none
        padding, index = heads + pieces, first[row] + numbers
        starts = packing.piece_start.take(index, mode="clip")
        lengths = packing.piece_length.take(index, mode="clip")
        starts[padding] = lengths[padding] = 0
        lengths[padding] = self.seq_len - np.add.reduceat(lengths, heads)
        begins = lengths.cumsum() - lengths
        batch = self._tokens(starts, lengths, begins)
        if lengths[padding].any():
            which, padded, _ = _ragged(lengths[padding])
            padded += begins[padding][which]
            batch["input_ids"][padded] = self.store.eos_token_id
            batch["labels"][padded] = IGNORED
        batch = {name: values.reshape(len(rows), -1) for name, values in batch.items()}
        real = lengths > 0
        _add_documents(batch, begins[real], numbers[real])
        return _finish(batch, rows, missing, self.byte_lengths)

    def _tokens(self, starts: np.ndarray, lengths: np.ndarray, begins: np.ndarray) -> dict[str, Any]:
        """Inputs and labels of the batch laid end to end, with any tokens where the padding goes."""
        store = self.store
        places = (starts - begins).repeat(lengths)
        places += np.arange(len(places))
        input_ids = store.take(places).astype(np.int64)
        labels = np.empty_like(input_ids)
        labels[:-1] = input_ids[1:]
        if store.has_trained:
            labels[:-1][store.take_trained(places[1:]) == 0] = IGNORED
        labels[begins + lengths - 1] = IGNORED
        full = np.flatnonzero(lengths == self.seq_len)
        if len(full):  # only these may go on in another row
            behind = starts[full] + self.seq_len
            goes_on = store.offsets[np.searchsorted(store.offsets, behind)] != behind
            full, behind = full[goes_on], behind[goes_on]
            values = store.take(behind).astype(np.int64)
            if store.has_trained:
                values[store.take_trained(behind) == 0] = IGNORED
            labels[begins[full] + self.seq_len - 1] = values
        return {"input_ids": input_ids, "labels": labels}


def _ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of ``counts[k]`` things of each k, all end to end: each one's k, its number within k, and where each k begins."""
    ends = counts.cumsum()
    heads = ends - counts
    owner = np.arange(len(counts)).repeat(counts)
    return owner, np.arange(len(owner)) - heads[owner], heads


def _add_documents(batch: dict[str, Any], begins: np.ndarray, numbers: np.ndarray) -> None:
    """Documents that begin at these places of the flattened batch, and their number within their row."""
    shape = batch["input_ids"].shape
    cu_seqlens = np.empty(len(begins) + 1, dtype=np.int32)
    cu_seqlens[:-1], cu_seqlens[-1] = begins, batch["input_ids"].size
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    batch["document_ids"] = numbers.repeat(lengths).reshape(shape)
    batch["cu_seqlens"], batch["max_seqlen"] = cu_seqlens, int(lengths.max())


def _finish(batch: dict[str, Any], rows: np.ndarray, missing: bool, byte_lengths: np.ndarray | None) -> dict[str, Any]:
    labels = batch["labels"]
    if missing:
        labels[rows < 0] = IGNORED
    if byte_lengths is not None:
        batch["num_bytes"] = np.where(labels >= 0, byte_lengths[np.maximum(labels, 0)], 0).sum(axis=1)
    return batch
