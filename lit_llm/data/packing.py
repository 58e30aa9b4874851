"""Whole documents into rows of a fixed length with little padding: best-fit decreasing on the lengths alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Packing:
    """Which pieces of which documents make up each row.

    Row r holds the pieces ``row_offsets[r]`` to ``row_offsets[r + 1]``, laid one after another from its first place on.

    Attributes:
        capacity: tokens that a row can hold.
        row_offsets: (rows + 1,) int64.
        piece_start: (pieces,) int64 first token of each piece, of all documents laid end to end.
        piece_length: (pieces,) int32 tokens of each piece, at least 1.
        cut_documents, cut_tokens: documents that lost their end, and the tokens in no row.
    """

    capacity: int
    row_offsets: np.ndarray
    piece_start: np.ndarray
    piece_length: np.ndarray
    cut_documents: int = 0
    cut_tokens: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.row_offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens in all rows, padding not counted."""
        return int(self.piece_length.sum(dtype=np.int64))

    @property
    def fill_rate(self) -> float:
        """Tokens per place, at most 1.0."""
        return self.num_tokens / (self.num_rows * self.capacity) if self.num_rows else 1.0


def best_fit(lengths: np.ndarray, capacity: int, long: Literal["split", "cut"] = "split") -> Packing:
    """Pack documents into rows, the longest first, each into the fullest row that has room for it.

    Best-fit decreasing (Johnson 1974; for language models Ding et al. 2024, "Fewer truncations improve language
    modeling"): at most 11/9 of the least number of rows, in practice with hardly a place left. Documents of one length
    are alike, and so are rows with the same room left, so they are dealt with as groups: the work grows with the
    number of different lengths, and only sorting with the number of documents. A function of the arguments alone.

    Args:
        lengths: (documents,) tokens of each document.
        capacity: tokens of a row, at least 1.
        long: what becomes of a document longer than a row. ``split``: pieces of ``capacity`` tokens, the last of which
            is packed like a short document. ``cut``: its first ``capacity`` tokens stay.
    """
    assert capacity >= 1
    lengths = np.asarray(lengths, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    over = lengths > capacity
    cut_documents = cut_tokens = 0
    if long == "cut":
        cut_documents, cut_tokens = int(over.sum()), int((lengths[over] - capacity).sum())
        lengths = np.minimum(lengths, capacity)
    elif over.any():
        pieces = -(-lengths // capacity)
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.repeat(starts, pieces) + within * capacity
        lengths = np.minimum(np.repeat(lengths, pieces) - within * capacity, capacity)
    if (lengths == 0).any():
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    # numpy sorts 16-bit numbers by radix, several times as fast as wider ones.
    keys = (capacity - lengths).astype(np.uint16 if capacity < 1 << 16 else np.int64)
    by_length = np.argsort(keys, kind="stable")
    row_of, rows = _assign(np.bincount(lengths, minlength=capacity + 1), capacity)
    row_offsets = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=rows), out=row_offsets[1:])
    order = by_length[np.argsort(row_of, kind="stable")]
    return Packing(capacity, row_offsets, starts[order], lengths[order].astype(np.int32), cut_documents, cut_tokens)


def _assign(histogram: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """The row of each piece, the pieces in falling order of length, and the number of rows.

    Args:
        histogram: (capacity + 1,) number of pieces of each length.
    """
    # Rows with the same room left, as ranges of row numbers, and the rooms that occur, rising.
    groups: dict[int, list[tuple[int, int]]] = {}
    rooms: list[int] = []
    rows = 0
    placed: list[tuple[int, int, int]] = []  # (first row, pieces, pieces in each row)

    def put(room: int, first: int, last: int) -> None:
        if room and first < last:
            if room not in groups:
                groups[room] = []
                insort(rooms, room)
            groups[room].append((first, last))

    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])
        while left:
            at = bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms[at]
                first, last = groups[room].pop()
                if not groups[room]:
                    del groups[room], rooms[at]
            else:
                room, first = capacity, rows
                last = rows = rows + -(-left // (capacity // length))
            # A row that has taken one is the fullest with room for the next, as long as it has room.
            each = room // length
            full = min(last - first, left // each)
            if full:
                placed.append((first, full * each, each))
                put(room - each * length, first, first + full)
                left -= full * each
            if left and first + full < last:
                placed.append((first + full, left, left))
                put(room - left * length, first + full, first + full + 1)
                full, left = full + 1, 0
            put(room, first + full, last)
    if not placed:
        return np.zeros(0, dtype=np.int64), 0
    first_row, pieces, each_row = np.array(placed, dtype=np.int64).T
    total = int(pieces.sum())
    narrow = np.int32 if total < 1 << 31 else np.int64  # in place and narrow: of tens of millions of pieces
    row_of = np.arange(total, dtype=narrow)
    row_of -= np.repeat((np.cumsum(pieces) - pieces).astype(narrow), pieces)
    row_of //= np.repeat(each_row.astype(narrow), pieces)
    row_of += np.repeat(first_row.astype(narrow), pieces)
    return row_of, rows
