"""Which documents are validated on, and writing them into their split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from lit_llm.data.encode import Encoded
from lit_llm.data.histogram import LengthHistogram
from lit_llm.data.writer import StoreWriter


def draw(*key: str | int) -> float:
    """A uniform number in [0, 1) that is a pure function of ``key``."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def write_splits(results: Iterable[Encoded], writer: StoreWriter, val_fraction: float, seed: int) -> LengthHistogram:
    """Split the documents and write them, in order."""
    begun = 0  # documents
    open_val = False  # where the document that goes on into the next batch lies
    open_length = 0
    histogram = LengthHistogram()

    def append(batch: Encoded, final: bool) -> None:
        nonlocal begun, open_val, open_length
        count = len(batch.lengths)
        first = begun if batch.begins else begun - 1
        val = np.fromiter((draw("split", seed, n) < val_fraction for n in range(first, first + count)), bool, count)
        if not batch.begins:
            val[0] = open_val
        elif first == 0:
            val[0] = False  # so that there is always something to train on
        begun = first + count
        in_hand = final and begun > 1 and (batch.begins or count > 1)  # all of the last document
        if in_hand and val_fraction > 0 and not writer.documents("val") and not val.any():
            val[-1] = True
        open_val = bool(val[-1])
        lengths = batch.lengths.copy()
        lengths[0] += open_length
        open_length = 0 if batch.ends else int(lengths[-1])
        histogram.add(lengths if batch.ends else lengths[:-1])
        _append_runs(writer, batch, val)

    last: Encoded | None = None
    for batch in results:
        if last is not None:
            append(last, final=False)
        last = batch
    if last is not None:
        append(last, final=True)
    return histogram


def _append_runs(writer: StoreWriter, batch: Encoded, val: np.ndarray) -> None:
    """Append a batch, cut where the split changes."""
    ends = np.cumsum(batch.lengths)
    borders = [0, *(np.flatnonzero(np.diff(val)) + 1).tolist(), len(val)]
    for first, stop in pairwise(borders):
        tokens = slice(int(ends[first - 1]) if first else 0, int(ends[stop - 1]))
        writer.append(
            "val" if val[first] else "train",
            batch.ids[tokens],
            batch.lengths[first:stop],
            batch.text_bytes[first:stop],
            trained=None if batch.trained is None else batch.trained[tokens],
            begins=batch.begins or first > 0,
        )
