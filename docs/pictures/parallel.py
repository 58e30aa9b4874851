"""Draws docs/pictures/parallel.svg: what each dimension of the mesh splits, and what moves when.

    python docs/pictures/parallel.py

The colours are of middle brightness and the ground is clear, so that it can be read on white and on black.
"""

from __future__ import annotations

from pathlib import Path

OUTPUT = Path(__file__).with_suffix(".svg")
WIDTH, HEIGHT = 920, 560
GRAY, COMPUTE, GATHER, SCATTER, REDUCE = "#747c85", "#57606a", "#1f6feb", "#bc4c00", "#8250df"
LAYOUTS = (
    ("ddp", ("0123", "0123", "0123", "0123"), REDUCE, REDUCE),
    ("shard 4", ("0", "1", "2", "3"), GATHER, GATHER),
    ("replicate 2 x shard 2", ("01", "23", "01", "23"), GATHER, REDUCE),
)
"""A name, the parts that each of four processes keeps, and what moves between neighbours and between rows of them."""
# The time line: (begin, end, colour, words), in columns.
NETWORK = (
    *((0, 1, GATHER, "root"), (1, 2, GATHER, "0"), (2, 3, GATHER, "1"), (3, 4, GATHER, "2")),
    *((6, 7, GATHER, "2"), (7, 8, GATHER, "1"), (8.5, 9.5, GATHER, "0")),
    *((9.5, 10, SCATTER, "2"), (10, 10.5, REDUCE, "2"), (10.5, 11, SCATTER, "1"), (11, 11.5, REDUCE, "1")),
    *((12.5, 13, SCATTER, "0"), (13, 13.5, REDUCE, "0"), (13.5, 14.25, SCATTER, "root"), (14.25, 15, REDUCE, "root")),
)
PROCESSOR = (
    *((2, 3, COMPUTE, "0"), (3, 4, COMPUTE, "1"), (4, 5, COMPUTE, "2"), (5, 6, COMPUTE, "loss")),
    *((6, 7, COMPUTE, "loss"), (7, 8.5, COMPUTE, "2"), (8.5, 10.5, COMPUTE, "1"), (10.5, 12.5, COMPUTE, "0")),
    (15, 16.2, COMPUTE, "AdamW"),
)
SPANS = ((0, 6, "forward"), (6, 15, "backward"), (15, 16.2, "step"))


def text(x: float, y: float, words: str, *, size: int = 13, fill: str = GRAY, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, words: str = "") -> str:
    """Filled, or with ``none`` an empty frame."""
    line = f' stroke="{GRAY}"' if fill == "none" else ""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}"{line}/>'
    return shape + (
        text(x + width / 2, y + height / 2 + 4, words, size=12, fill="#fff", anchor="middle") if words else ""
    )


def arrow(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    ends = f'marker-start="url(#to{colour[1:]})" marker-end="url(#to{colour[1:]})"'
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{colour}" stroke-width="2" {ends}/>'


def arrow_heads() -> str:
    shape = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto-start-reverse"'
    heads = (f'<marker id="to{c[1:]}" {shape}><path d="M0 0L8 4L0 8z" fill="{c}"/></marker>' for c in (GATHER, REDUCE))
    return f"<defs>{''.join(heads)}</defs>"


def layout(left: float, top: float, name: str, kept: tuple[str, ...], across: str, down: str) -> list[str]:
    """Four processes, each with the parts that it keeps filled."""
    found = [text(left, top, name, size=14)]
    for process, parts in enumerate(kept):
        x, y = left + 140 * (process % 2), top + 40 + 90 * (process // 2)
        found.append(text(x, y - 6, f"process {process}, rows {process}", size=11))
        for part in range(4):
            here = str(part) in parts
            found.append(box(x + 24 * part, y, 22, 26, COMPUTE if here else "none", str(part) if here else ""))
    found += [arrow(left + 101, top + 53 + 90 * row, left + 133, top + 53 + 90 * row, across) for row in (0, 1)]
    return found + [arrow(left + 47 + x, top + 72, left + 47 + x, top + 108, down) for x in (0, 140)]


def time_line(left: float, top: float, column: float) -> list[str]:
    """A step of one micro-batch through three blocks, on one process of replicate x shard."""
    found = []
    for row, (name, spans) in enumerate((("network", NETWORK), ("compute", PROCESSOR))):
        found.append(text(20, top + 19 + 38 * row, name))
        found += [
            box(left + column * begin + 1, top + 38 * row, column * (end - begin) - 2, 28, colour, words)
            for begin, end, colour, words in spans
        ]
    for begin, end, words in SPANS:
        x, right = left + column * begin, left + column * end - 4
        found.append(f'<path d="M{x:g} {top - 12:g}H{right:g}" stroke="{GRAY}"/>')
        found.append(text((x + right) / 2, top - 18, words, anchor="middle"))
    return found


def legend(left: float, top: float) -> list[str]:
    told = (
        (GATHER, "all-gather: the parts of a block become whole; freed after its use"),
        (SCATTER, "reduce-scatter: gradients are added up, each process keeps its part"),
        (REDUCE, "all-reduce: gradients, or parts of them, are averaged over replicas"),
    )
    found = []
    for row, (colour, words) in enumerate(told):
        found += [box(left, top + 24 * row, 28, 16, colour), text(left + 38, top + 13 + 24 * row, words)]
    return found


def picture() -> str:
    """The whole of it, as SVG."""
    parts = [arrow_heads()]
    parts.append(text(20, 24, "What four processes keep of weights, gradients and optimizer state", size=15))
    for place, (name, kept, across, down) in enumerate(LAYOUTS):
        parts += layout(20 + 306 * place, 58, name, kept, across, down)
    parts.append(
        text(20, 300, "What moves when, on one process of replicate 2 x shard 2: a step of three blocks", size=15)
    )
    parts += time_line(100, 354, 50)
    parts += legend(20, 462)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join([opening, *parts, "</svg>\n"])


if __name__ == "__main__":
    OUTPUT.write_text(picture(), encoding="utf-8")
