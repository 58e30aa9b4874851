"""Best-fit packing against a plain one that looks at every row, and what must hold of any packing."""

from __future__ import annotations

import numpy as np
import pytest

from lit_llm.data.packing import Packing, best_fit


def _plain(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing as in the textbook; the lengths in each row."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


def _rows(packing: Packing) -> list[list[tuple[int, int]]]:
    pieces = list(zip(packing.piece_start.tolist(), packing.piece_length.tolist(), strict=True))
    borders = packing.row_offsets.tolist()
    return [pieces[a:b] for a, b in zip(borders, borders[1:], strict=False)]


def _check(packing: Packing, lengths: np.ndarray, capacity: int, long: str) -> None:
    rows = _rows(packing)
    assert len(rows) == packing.num_rows
    assert all(row and sum(length for _, length in row) <= capacity for row in rows)
    assert min((length for row in rows for _, length in row), default=1) >= 1
    pieces = sorted(piece for row in rows for piece in row)
    want, start = [], 0
    for length in lengths.tolist():
        kept = min(length, capacity) if long == "cut" else length
        want += [(start + at, min(capacity, kept - at)) for at in range(0, kept, capacity)]
        start += length
    assert pieces == want
    tokens = sum(length for _, length in want)
    assert packing.num_tokens == tokens
    assert packing.fill_rate == (tokens / (len(rows) * capacity) if rows else 1.0)
    over = lengths[lengths > capacity]
    cut = long == "cut"
    assert packing.cut_documents == (len(over) if cut else 0)
    assert packing.cut_tokens == ((over - capacity).sum() if cut else 0)


@pytest.mark.parametrize("long", ["split", "cut"])
@pytest.mark.parametrize("capacity", [1, 2, 7, 50, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_random_lengths(seed: int, capacity: int, long: str) -> None:
    rng = np.random.default_rng(seed)
    count = [0, 1, 2, 30, 300, 300][seed]
    lengths = rng.integers(1, 2 * capacity + 2, count) if seed % 2 else 1 + rng.geometric(min(1.0, 4 / capacity), count)
    packing = best_fit(lengths, capacity, long)  # type: ignore[arg-type]
    _check(packing, lengths, capacity, long)
    pieces = packing.piece_length.tolist()
    rows = _plain(pieces, capacity)
    assert packing.num_rows == len(rows)
    # Not only as many, also as full: best-fit decreasing leaves no choice but among rows with the same room.
    assert sorted(sum(length for _, length in row) for row in _rows(packing)) == sorted(map(sum, rows))


def test_lognormal_lengths_leave_hardly_a_place() -> None:
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(5.5, 1.0, 20_000)).astype(np.int64)
    packing = best_fit(lengths, 2048)
    _check(packing, lengths, 2048, "split")
    assert packing.fill_rate > 0.995
    assert packing.num_rows - lengths.sum() / 2048 < 0.005 * packing.num_rows


def test_where_the_rows_cannot_be_full() -> None:
    packing = best_fit(np.full(7, 6), 10)
    assert packing.num_rows == 7
    assert packing.fill_rate == 0.6


def test_equal_lengths_stay_in_order() -> None:
    packing = best_fit(np.full(6, 5), 10)
    assert packing.piece_start.tolist() == [0, 5, 10, 15, 20, 25]
    assert packing.row_offsets.tolist() == [0, 2, 4, 6]


def test_a_long_document_is_split_and_its_end_packed() -> None:
    assert _rows(best_fit(np.array([3, 50, 4]), 8)) == [
        *([(3 + 8 * piece, 8)] for piece in range(6)),
        [(53, 4), (0, 3)],
        [(51, 2)],
    ]
    cut = best_fit(np.array([3, 50, 4]), 8, long="cut")
    assert _rows(cut) == [[(3, 8)], [(53, 4), (0, 3)]]
    assert (cut.cut_documents, cut.cut_tokens) == (1, 42)


def test_lengths_of_nothing() -> None:
    assert best_fit(np.array([], dtype=np.int64), 8).num_rows == 0
    assert _rows(best_fit(np.array([0, 3, 0, 8]), 8)) == [[(3, 8)], [(0, 3)]]


def test_the_work_does_not_grow_with_the_documents() -> None:
    few, many = (best_fit(np.tile(np.arange(1, 101), n), 128) for n in (10, 10_000))
    assert many.num_rows == pytest.approx(1000 * few.num_rows, rel=0.05)
    assert many.fill_rate > 0.99


@pytest.mark.slow
def test_ten_million_documents() -> None:
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(6, 1.0, 10_000_000)).astype(np.int64)
    packing = best_fit(lengths, 2048)
    assert packing.num_tokens == lengths.sum()
    assert packing.fill_rate > 0.999
