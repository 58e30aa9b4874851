"""What a preparation did, for the screen."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lit_llm.data.histogram import LengthHistogram

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Summary:
    """What ``prepare`` did. ``splits``: name -> {documents, tokens, bytes}; ``skipped``: reason -> how many; ``chats``:
    the splits that hold some."""

    output: Path
    splits: dict[str, dict[str, int]]
    skipped: dict[str, int]
    vocab_size: int
    eos_token: str
    trained: bool
    workers: int
    seconds: float
    engine: str
    lengths: LengthHistogram = field(repr=False)
    chats: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def total(self, what: str) -> int:
        """Sum of ``documents``, ``tokens`` or ``bytes`` over the splits."""
        return sum(split[what] for split in self.splits.values())

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        table.add_column("split")
        for name in ("documents", "tokens", "text", "bytes/token"):
            table.add_column(name, justify="right")
        for name, split in self.splits.items():
            documents, tokens, size = (split[key] for key in ("documents", "tokens", "bytes"))
            # in chats many tokens are the template's
            per_token = "-" if name in self.chats else f"{size / tokens:.2f}"
            table.add_row(name, f"{documents:,}", f"{tokens:,}", megabytes(size), per_token)
        how = "trained here" if self.trained else "given"
        checked = ", its ids compared with those of tokenizers" if self.engine != "tokenizers" else ""
        lines = [f"tokenizer: {self.vocab_size:,} ids, EOS {self.eos_token!r}, {how}; engine {self.engine}{checked}"]
        if self.skipped:
            lines.append("skipped: " + ", ".join(f"{count:,} {why}" for why, count in sorted(self.skipped.items())))
        lines += [f"note: {note}" for note in self.notes]
        speed = self.total("bytes") / 1e6 / max(self.seconds, 1e-9)
        workers = "1 process" if self.workers == 1 else f"{self.workers} processes"
        lines.append(f"wrote {self.output} in {self.seconds:.1f} s ({speed:.1f} MB/s, {workers})")
        return Group(table, Text(), self.lengths, Text(), *(Text(line) for line in lines))


def megabytes(size: int) -> str:
    """Bytes in the unit that shows some digits of them."""
    if size < 1000:
        return f"{size} B"
    return f"{size / 1e6:,.2f} MB" if size >= 100_000 else f"{size / 1e3:,.2f} kB"
