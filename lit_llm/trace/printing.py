"""What the reports for a terminal print with: lines and tables that fit, and that no name in a trace can break."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_llm.trace import units

ASCII = {"█": "#", "▓": "=", "▒": "w", "·": "."}
"""Letters of a bar where the output has no others."""


class Printer:
    """A report on a console."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.ascii = console.options.ascii_only

    def _safe(self, text: str) -> str:
        """``text`` that can't move the cursor, and that the output's encoding has letters for."""
        text = units.clean(text)
        if not self.ascii:
            return text
        for fancy, plain in (("–", "-"), ("…", "..."), ("µ", "u"), ("±", "+-"), *ASCII.items()):
            text = text.replace(fancy, plain)
        return text.encode("ascii", "replace").decode()

    def _line(self, text: str, style: str = "", indent: int = 0) -> None:
        lines = Text(self._safe(text)).wrap(self.console, max(self.console.width - indent, 20))
        for line in lines:
            self.console.print(Text(" " * indent) + Text(line.plain.rstrip(), style=style), soft_wrap=True)

    def _heading(self, text: str) -> None:
        self.console.print()
        self._line(text, "bold")

    def _table(self, columns: Iterable[str], rows: Iterable[Sequence[str | Text]], *, names: int = 0) -> None:
        """``names``: the column that gives way where the width does not suffice."""
        table = Table(box=None, pad_edge=False, padding=(0, 1), show_edge=False, header_style="dim")
        for number, column in enumerate(columns):
            table.add_column(
                self._safe(column),
                justify="left" if number == names else "right",
                no_wrap=True,
                overflow="crop" if self.ascii else "ellipsis",
            )
        for row in rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(self._safe(cell)) for cell in row))
        self.console.print(table)
