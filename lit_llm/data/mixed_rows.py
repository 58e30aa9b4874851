"""Rows of several stores behind one numbering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lit_llm.data.rows import PackedRows, TokenRows


class MixedRows:
    """The rows of ``parts`` one after another: those of part k are numbered from ``first[k]`` on.

    Batches are as those of the parts, with ``source_ids`` (batch,) int64: which part each row comes from. All parts
    have one row length, and isolate documents or not alike.
    """

    def __init__(self, parts: Sequence[TokenRows | PackedRows]) -> None:
        self.parts = list(parts)
        self.first: np.ndarray = np.cumsum([0] + [len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.first[-1])

    def __getitem__(self, rows: np.ndarray | int) -> dict[str, Any]:
        """A batch of any rows; -1 gives one without labels, as part of the first source."""
        rows = np.array(rows, dtype=np.int64, ndmin=1)
        sources = np.maximum(np.searchsorted(self.first, rows, side="right") - 1, 0)
        if (sources == sources[0]).all():
            batch = self.parts[sources[0]][np.where(rows < 0, -1, rows - self.first[sources[0]])]
            return {**batch, "source_ids": sources}
        batch = {}
        for source in np.unique(sources).tolist():
            chosen = sources == source
            own = self.parts[source][np.where(rows[chosen] < 0, -1, rows[chosen] - self.first[source])]
            for name, values in own.items():
                if name not in ("cu_seqlens", "max_seqlen"):
                    if name not in batch:
                        batch[name] = np.empty((len(rows), *values.shape[1:]), values.dtype)
                    batch[name][chosen] = values
        if "document_ids" in batch:
            batch.update(cumulative_lengths(batch["document_ids"]))
        batch["source_ids"] = sources
        return batch


def cumulative_lengths(document_ids: np.ndarray) -> dict[str, Any]:
    """``cu_seqlens`` (documents + 1,) int32 and ``max_seqlen`` of a batch's documents laid end to end."""
    starts = np.ones(document_ids.shape, dtype=bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    cu_seqlens = np.append(np.flatnonzero(starts), document_ids.size).astype(np.int32)
    return {"cu_seqlens": cu_seqlens, "max_seqlen": int(np.diff(cu_seqlens).max())}
