"""The difference of two runs for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from lit_llm.trace import look, units
from lit_llm.trace.printing import Printer
from lit_llm.trace.results import Difference, Figure

ROWS = 10
"""Kernels, layers and ranks at most."""


def render_difference(difference: Difference, console: Console) -> None:
    """Prints what changed; fits 80 columns."""
    _Report(difference, console).print()


class _Report(Printer):
    def __init__(self, difference: Difference, console: Console) -> None:
        super().__init__(console)
        self.difference = difference

    def print(self) -> None:
        found = self.difference
        self._heading(f"Against {found.before}")
        self._line(found.summary, indent=2)
        for note in found.notes:
            self._line(f"Note: {note}.", indent=2)
        if found.step.change is None:
            return
        self._heading("A step, before and after")
        rows = [("step", found.step), *((short(key), one) for key, one in found.parts.items())]
        if not found.parts:
            rows.append(("comm., exposed", found.exposed))
        rows.append(("comm., hidden", found.hidden))
        self._table(
            ("", "before", "after", "change", "", ""),
            [(name, *self._figures(one), verdict_on(one)) for name, one in rows if one.before or one.after],
        )
        self._line(found.method, "dim")
        self._ranks()
        self._kernels()
        self._collectives()
        self._layers()

    def _figures(self, one: Figure) -> tuple[str, ...]:
        return units.duration(one.before), units.duration(one.after), *changed(one)

    def _ranks(self) -> None:
        if self.difference.ranks:
            self._heading("Ranks that changed unlike the others")
            rows = [
                (f"rank {row.rank}, {short(row.part)}", *self._figures(row.time))
                for row in self.difference.ranks[:ROWS]
            ]
            self._table(("", "before", "after", "change", ""), rows)

    def _kernels(self) -> None:
        kernels = [one for one in self.difference.kernels if one.clear]
        if not self.difference.kernels:
            return
        self._heading("Kernels, a step and rank" if self.difference.device == "gpu" else "Operations, a step and rank")
        if not kernels:
            self._line("none changed beyond the noise", "dim")
            return
        rows: list[Sequence[str | Text]] = []
        for kernel in kernels[:ROWS]:
            name = units.shorten(kernel.name.removeprefix("void "), max(self.console.width - 50, 24))
            status = "" if kernel.status == "same" else kernel.status
            figures = units.duration(kernel.total.before), units.duration(kernel.total.after)
            calls = f"{number(kernel.calls.before)} > {number(kernel.calls.after)}"
            rows.append((name, calls, *figures, units.signed(kernel.change), status))
        self._table(("name", "calls", "before", "after", "change", ""), rows)
        if len(kernels) > ROWS:
            self._line(f"... {len(kernels) - ROWS} more beyond the noise", "dim")

    def _collectives(self) -> None:
        rows = [(one.kind, *self._figures(one.exposed), verdict_on(one.exposed)) for one in self.difference.collectives]
        if rows:
            self._heading("Collectives: exposed time, a step and rank")
            self._table(("kind", "before", "after", "change", "", ""), rows)

    def _layers(self) -> None:
        layers = [one for one in self.difference.layers if one.exposed.clear]
        if layers:
            layers.sort(key=lambda one: -abs(one.exposed.change or 0))
            self._heading("FSDP all-gathers: exposed time, a step and rank")
            self._table(
                ("layer", "before", "after", "change", ""),
                [(one.layer, *self._figures(one.exposed)) for one in layers[:ROWS]],
            )


def short(part: str) -> str:
    """Its label, for 80 columns."""
    return look.LABELS[part].replace("communication", "comm.")


def changed(one: Figure) -> tuple[str, str]:
    """The change as a time and in percent."""
    ratio = "" if one.ratio is None or abs(one.ratio) >= 10 else units.signed_percent(one.ratio)
    return units.signed(one.change), ratio


def verdict_on(one: Figure) -> str:
    """What to think of a change."""
    if one.clear is None:
        return "" if one.change is None else "noise unknown"
    return "" if one.clear else "within noise"


def number(value: float | None) -> str:
    """Calls a step and rank."""
    return units.NONE if value is None else f"{value:,.1f}".removesuffix(".0")
