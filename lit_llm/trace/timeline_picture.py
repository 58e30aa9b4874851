"""One step on several ranks as SVG lanes on one clock."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from lit_llm.trace.look import SPAN_WORDS
from lit_llm.trace.pictures import legend
from lit_llm.trace.results import Lane, Span, Timeline
from lit_llm.trace.units import clean, duration, shorten

LANE = 22
HEAD = 26
BUDGET = 8000
"""Rectangles in the whole picture."""
WIDTH = 10_000.0
"""Units across: the picture is stretched to the page."""


def draw(timeline: Timeline) -> tuple[Markup, Markup]:
    """The picture and its legend.

    Spans narrower than a pixel are drawn as one stretch with their neighbours of the same kind: a step can hold a
    hundred thousand kernels.
    """
    lanes = max(sum(len(rank.lanes) for rank in timeline.ranks), 1)
    cells = max(200, min(2000, BUDGET // lanes))
    window = max(timeline.end - timeline.start, 1)
    rows: list[Markup] = []
    kinds: list[str] = []
    for rank in timeline.ranks:
        label = f"rank {rank.rank}" + (f" ({rank.label})" if rank.label else "")
        rows.append(Markup('<h3 class="lanehead">{}</h3>').format(label))
        for lane in rank.lanes:
            rects, seen = _lane(lane, timeline, window, cells)
            kinds += [kind for kind in seen if kind not in kinds]
            row = Markup(
                '<div class="lane"><span class="lanename" title="{}">{}</span><svg class="zoomable" role="img" '
                'width="100%" height="{}" viewBox="0 0 {} {}" preserveAspectRatio="none"><title>{}, {}</title>{}</svg>'
                "</div>"
            )
            name = clean(lane.name)
            height = LANE - 4
            rows.append(row.format(name, name, height, int(WIDTH), height, label, name, rects))
    axis = Markup(
        '<div class="lane"><span></span><svg class="lane-axis" width="100%" height="20">{}</svg></div>'
    ).format(Markup("").join(_ticks(window)))
    picture = Markup('<div class="timeline" data-window="{}">{}{}</div>').format(window, Markup("").join(rows), axis)
    order = [kind for kind in _ORDER if kind in kinds]
    return picture, legend((f"t-{kind}" for kind in order), {f"t-{kind}": SPAN_WORDS.get(kind, kind) for kind in order})


_ORDER = ("data", "forward", "backward", "optimizer", "compute", "comm", "wait", "memory", "host", "other")


def _lane(lane: Lane, timeline: Timeline, window: int, cells: int) -> tuple[Markup, list[str]]:
    out: list[Markup] = []
    kinds: list[str] = []
    for start, end, kind, name in merged(lane.spans, timeline.start, timeline.end, max(window // cells, 1)):
        if kind not in kinds:
            kinds.append(kind)
        x = (start - timeline.start) / window * WIDTH
        width = max((end - start) / window * WIDTH, WIDTH / cells / 2)
        rect = Markup('<rect class="k-t-{}" x="{}" y="0" width="{}" height="{}"><title>{}</title></rect>')
        out.append(rect.format(kind, f"{x:.1f}", f"{width:.1f}", LANE - 4, name))
    return Markup("").join(out), kinds


def merged(spans: Sequence[Span], start: int, end: int, least: int) -> list[tuple[int, int, str, str]]:
    """``spans`` inside [start, end] as (start, end, kind, text), the short ones (under ``least`` ns) drawn together.

    Those of a kind that follow one another closely become one; so at most about (end - start) / least are left.
    """
    out: list[tuple[int, int, str, str]] = []
    run: list[Span] = []

    def flush() -> None:
        if len(run) == 1:
            out.append((max(run[0].start, start), min(run[0].end, end), run[0].kind, _tip(run[0], start)))
        elif run:
            last = max(span.end for span in run)
            text = f"{len(run):,} spans in {duration(last - run[0].start)}, the first: {shorten(run[0].name, 60)}"
            out.append((max(run[0].start, start), min(last, end), run[0].kind, text))
        run.clear()

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if span.end < start or span.start > end:
            continue
        short = span.end - span.start < least
        if run and (not short or span.kind != run[0].kind or span.start - run[-1].end >= least):
            flush()
        run.append(span)
        if not short:
            flush()
    flush()
    return out


def _tip(span: Span, origin: int) -> str:
    return f"{shorten(span.name, 110)}: {duration(span.end - span.start)}, from {duration(span.start - origin)}"


def _ticks(window: int) -> list[Markup]:
    """Six figures at fixed places: a page that zooms writes new ones into them."""
    out = []
    for number in range(6):
        anchor = ("start", "middle", "middle", "middle", "middle", "end")[number]
        text = Markup('<text class="axis" x="{}%" y="14" text-anchor="{}">{}</text>')
        out.append(text.format(number * 20, anchor, duration(window * number / 5)))
    return out
