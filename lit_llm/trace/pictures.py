"""Stacked bars and heat maps as SVG.

A picture is three columns: labels, plot, notes. Places across the plot are percent, so that the plot follows the
page's width while text keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from lit_llm.trace.look import LABELS, Part
from lit_llm.trace.units import clean, percent, shorten

LINE = 15
"""px that a line of text needs."""
NARROW = 560
"""px that a plot has at least, on a page of 800."""
AXIS = 22
"""px for the figures of an axis."""


@dataclass
class Row:
    """A bar: its label, its pieces, and a word to its right."""

    label: str
    parts: list[Part]
    note: str = ""
    marked: bool = False
    full_label: str = ""


@dataclass
class HeatRow:
    """A row of a heat map; None: no figure."""

    label: str
    values: list[float | None]
    note: str = ""
    marked: bool = False


@dataclass
class _Rows:
    """Where the rows of a picture lie, and which of them have their label drawn."""

    height: float
    labelled: list[int] = field(default_factory=list)

    @property
    def labels_all(self) -> bool:
        """Whether a row is high enough for a line of text."""
        return self.height >= LINE

    @property
    def kind(self) -> str:
        """For the style sheet."""
        return "" if self.labels_all else " thin"

    def middle(self, index: int) -> float:
        return (index + 0.5) * self.height


def stacked_bars(
    rows: Sequence[Row],
    show: Callable[[float], str],
    *,
    title: str,
    description: str,
    label_width: int = 76,
    note_width: int = 84,
    label_length: int = 10,
) -> Markup:
    """Bars of ``rows`` on one scale from 0; ``show`` writes a value with its unit."""
    layout = _layout(len(rows), [row.marked for row in rows])
    totals = [sum(part.value for part in row.parts) for row in rows]
    ticks, top = _ticks(max(totals, default=0), show)
    height = layout.height * len(rows)
    out: list[Markup] = []
    for share, _ in ticks:
        line = Markup('<line class="grid" x1="{0}%" x2="{0}%" y1="0" y2="{1}"/>')
        out.append(line.format(_p(share), _n(height)))
    gap = 4 if layout.labels_all else 0
    for index, (row, total) in enumerate(zip(rows, totals, strict=True)):
        y, thick = index * layout.height + gap / 2, layout.height - gap
        name = escape(clean(row.full_label or row.label))
        at = 0.0
        for part in row.parts:
            if part.value <= 0:
                continue
            width = part.value / top
            tip = f"{LABELS.get(part.key, part.key)}: {show(part.value)} ({percent(part.value / total)})"
            rect = Markup('<rect class="k-{}" x="{}%" y="{}" width="{}%" height="{}"><title>{}, {}</title></rect>')
            out.append(rect.format(part.key, _p(at), _n(y), _p(width), _n(thick), name, tip))
            at += width
    axis = _axis(ticks, height)
    labels = _texts(layout, [(shorten(row.label, label_length), row.full_label, row.marked) for row in rows], end=True)
    notes = _texts(layout, [(row.note, "", row.marked) for row in rows], end=False)
    return _picture(
        f"bars{layout.kind}",
        title,
        description,
        labels,
        Markup("").join([*out, axis]),
        notes,
        height + AXIS,
        label_width,
        note_width,
    )


def heat_map(
    rows: Sequence[HeatRow],
    columns: Sequence[str],
    show: Callable[[float], str],
    top: float,
    *,
    title: str,
    description: str,
    label_width: int = 76,
    note_width: int = 84,
) -> Markup:
    """Cells of ``rows`` x ``columns`` in eight shades from 0 to ``top``; crossed where there is no figure."""
    layout = _layout(len(rows), [row.marked for row in rows])
    height = layout.height * len(rows)
    width = 1 / max(len(columns), 1)
    longest = max((len(column) for column in columns), default=1)
    every = -(-len(columns) // max(NARROW // (longest * 8 + 14), 1))
    roomy = layout.height >= 20 and len(columns) <= 8
    tips = len(rows) * len(columns) <= 6000
    out: list[Markup] = []
    for index, row in enumerate(rows):
        for place, value in enumerate(row.values):
            shade = "none" if value is None else str(_shade(value, top))
            tip = Markup("")
            if tips:
                text = "no figure" if value is None else show(value)
                tip = Markup("<title>{}, step {}: {}</title>").format(clean(row.label), columns[place], text)
            rect = Markup('<rect class="h h{}" x="{}%" y="{}" width="{}%" height="{}">{}</rect>')
            out.append(
                rect.format(shade, _p(place * width), _n(index * layout.height), _p(width), _n(layout.height), tip)
            )
            if roomy and value is not None:
                text = Markup('<text class="v{}" x="{}%" y="{}" text-anchor="middle">{}</text>')
                out.append(text.format(shade, _p((place + 0.5) * width), _n(layout.middle(index) + 4), show(value)))
    if not layout.labels_all and len(columns) <= 60:
        for place in range(1, len(columns)):
            line = Markup('<line class="cut" x1="{0}%" x2="{0}%" y1="0" y2="{1}"/>')
            out.append(line.format(_p(place * width), _n(height)))
    for place in range(0, len(columns), every):
        at, anchor = (place + 0.5) * width, "middle"
        if at < 0.06:  # a narrow column at an edge: its label would stick out
            at, anchor = at - width / 2, "start"
        elif at > 0.94:
            at, anchor = at + width / 2, "end"
        text = Markup('<text class="axis" x="{}%" y="{}" text-anchor="{}">{}</text>')
        out.append(text.format(_p(at), _n(height + 15), anchor, columns[place]))
    labels = _texts(layout, [(shorten(row.label, 10), "", row.marked) for row in rows], end=True)
    notes = _texts(layout, [(row.note, "", row.marked) for row in rows], end=False)
    widest = label_width + note_width + max(len(columns) * 130, 260)
    body = Markup("").join(out)
    return _picture(
        f"heat{layout.kind}",
        title,
        description,
        labels,
        body,
        notes,
        height + AXIS,
        label_width,
        note_width,
        max_width=widest,
    )


def scale(top: float, show: Callable[[float], str]) -> Markup:
    """The legend of :func:`heat_map`."""
    cells = Markup("").join(Markup('<i class="sw bg{}"></i>').format(shade) for shade in range(8))
    return Markup('<p class="legend scale"><span>0</span><span class="ramp">{}</span><span>{}</span></p>').format(
        cells, show(top)
    )


def legend(keys: Iterable[str], words: dict[str, str] = LABELS) -> Markup:
    """Swatches with words."""
    items = [Markup('<span><i class="sw b-{}"></i>{}</span>').format(key, words.get(key, key)) for key in keys]
    return Markup('<p class="legend">{}</p>').format(Markup("").join(items))


def _layout(count: int, marked: Sequence[bool]) -> _Rows:
    """Rows get thinner as they become more; what has its label drawn never comes nearer than a line to another."""
    height = 24.0 if count <= 16 else 16.0 if count <= 48 else 6.0 if count <= 192 else 3.0 if count <= 512 else 1.5
    every = 1 if height >= LINE else 8 if height == 6 else 16 if height == 3 else 32
    chosen = [index for index in range(count) if marked[index]]
    kept: list[int] = []
    for index in [*chosen, *range(0, count, every)]:
        if all(abs(index - other) * height >= LINE for other in kept if other != index) and index not in kept:
            kept.append(index)
    return _Rows(height, sorted(kept))


def _texts(layout: _Rows, texts: Sequence[tuple[str, str, bool]], *, end: bool) -> Markup:
    out = []
    for index in layout.labelled:
        text, full, marked = texts[index]
        if not text or (not end and not layout.labels_all and not marked):
            continue  # a note beside a thin row is for a marked one only: the others would crowd
        tip = Markup("<title>{}</title>").format(clean(full)) if full and full != text else Markup("")
        # A label that would stick out at the first or last thin row is pulled in.
        y = max(layout.middle(index) + 4, 11)
        place = Markup('x="100%" dx="-8" text-anchor="end"') if end else Markup('x="0" dx="8"')
        kind = "label marked" if marked else "label"
        out.append(Markup('<text class="{}" {} y="{}">{}{}</text>').format(kind, place, _n(y), tip, text))
    return Markup("").join(out)


def _picture(
    kind: str,
    title: str,
    description: str,
    labels: Markup,
    plot: Markup,
    notes: Markup,
    height: float,
    label_width: int,
    note_width: int,
    *,
    max_width: int | None = None,
) -> Markup:
    columns = f"grid-template-columns:{label_width}px minmax(0,1fr) {note_width}px"
    style = columns + (f";max-width:{max_width}px" if max_width else "")
    side = Markup('<svg width="100%" height="{}" aria-hidden="true">{}</svg>')
    main = Markup('<svg class="plot" role="img" width="100%" height="{}"><title>{}</title><desc>{}</desc>{}</svg>')
    return Markup('<div class="pic {}" style="{}">{}{}{}</div>').format(
        kind,
        style,
        side.format(_n(height), labels),
        main.format(_n(height), title, description, plot),
        side.format(_n(height), notes),
    )


def _axis(ticks: Sequence[tuple[float, str]], top: float) -> Markup:
    out = []
    for number, (share, text) in enumerate(ticks):
        anchor = "start" if number == 0 else "end" if share > 0.93 else "middle"
        tag = Markup('<text class="axis" x="{}%" y="{}" text-anchor="{}">{}</text>')
        out.append(tag.format(_p(share), _n(top + 15), anchor, text))
    return Markup("").join(out)


def _ticks(largest: float, show: Callable[[float], str]) -> tuple[list[tuple[float, str]], float]:
    """Round places from 0 up to ``largest`` as (share of the width, text), and what the width stands for."""
    if largest <= 0:
        return [(0.0, "0")], 1.0
    step = round_step(largest / 4)
    count = int(largest / step + 1e-9)
    return [(number * step / largest, show(number * step)) for number in range(count + 1)], largest


def round_step(raw: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least ``raw``."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999999)


def _shade(value: float, top: float) -> int:
    return 0 if top <= 0 else max(0, min(7, int(value / top * 8)))


def _p(share: float) -> str:
    return _n(share * 100)


def _n(value: float) -> str:
    """As few characters as tell it to a thousandth."""
    return f"{value:.3f}".rstrip("0").rstrip(".") or "0"
