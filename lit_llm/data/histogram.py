"""How long documents are: counts in powers of two, as text and as a picture."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lit_llm.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

_BINS = 64


class LengthHistogram:
    """Counts of documents by tokens. ``counts[b]``: documents of 2**(b - 1) + 1 to 2**b tokens (b = 0: of one token).

    Args:
        lengths: tokens of each document, any number of them.
    """

    def __init__(self, lengths: np.ndarray | None = None) -> None:
        self.counts = np.zeros(_BINS, np.int64)
        if lengths is not None:
            self.add(lengths)

    def add(self, lengths: np.ndarray) -> None:
        """Counts further documents."""
        if len(lengths):
            bins = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
            self.counts += np.bincount(bins, minlength=_BINS)

    def rows(self) -> list[tuple[str, int]]:
        """(range of tokens, documents) from the shortest to the longest, gaps between them included."""
        filled = np.flatnonzero(self.counts)
        if not len(filled):
            return []
        return [(_label(b), int(self.counts[b])) for b in range(filled[0], filled[-1] + 1)]

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        table.add_column("tokens", justify="right")
        table.add_column("documents", justify="right")
        table.add_column("")
        rows = self.rows()
        most = max((count for _, count in rows), default=1)
        for label, count in rows:
            table.add_row(label, f"{count:,}", "█" * round(40 * count / most) or ("▏" if count else ""))
        return table

    def save(self, path: Path, title: str) -> None:
        """Draws it into a picture; the suffix says which kind. UserError without matplotlib, or where that can't be."""
        if path.suffix not in (".png", ".svg", ".pdf") or not path.parent.is_dir():
            raise UserError(f"cannot write the picture {path}: give a .png, .svg or .pdf in a folder that exists")
        try:
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator
        except ImportError as error:
            raise UserError("the picture needs matplotlib: pip install 'lit-llm[plot]'") from error
        rows = self.rows()
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        axes = figure.add_subplot()
        axes.bar(range(len(rows)), [count for _, count in rows])
        axes.set_xticks(range(len(rows)), [label for label, _ in rows], rotation=45, ha="right", fontsize=8)
        axes.set(xlabel="tokens in a document", ylabel="documents")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(title, parse_math=False)  # a name may hold a $
        part = path.with_name(f".{path.stem}.part{path.suffix}")
        try:
            figure.savefig(part, dpi=150)
            part.replace(path)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot write the picture {path}: {error}") from error
        finally:
            with suppress(OSError):
                part.unlink()


def _label(b: int) -> str:
    low, high = (1 << b >> 1) + 1, 1 << b
    return f"{high:,}" if low >= high else f"{low:,}-{high:,}"
