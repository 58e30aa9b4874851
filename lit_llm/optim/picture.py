"""A picture of a schedule for the terminal."""

from __future__ import annotations

from lit_llm.optim.schedules import Lengths, ScheduleConfig, lr_factor, resolved

_BLANK = 0x2800
# Bits of a braille sign's dots, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_NARROWEST_PLOT = 8


def draw_schedule(
    config: ScheduleConfig,
    lr: float,
    total_steps: int | None,
    tokens_per_step: int | None = None,
    width: int = 72,
    height: int = 12,
) -> str:
    """The learning rate over the steps of a run, in braille dots, and below it a table of the rates that matter.

    Steps count from 0, as for :func:`lr_factor`. Where the run's length is not known, that of the schedule is shown,
    and where it has none, ten times the warm-up.

    Args:
        config: the schedule.
        lr: the peak rate.
        total_steps: optimizer steps of the run; None, -1 or infinity: not known.
        tokens_per_step: tokens of a global batch; None: not known.
        width: longest line, in characters.
        height: lines of the picture, axis and its labels included; the table comes on top.

    Raises:
        UserError: as :func:`lr_factor`.
    """
    lengths = resolved(config, total_steps, tokens_per_step)
    width, height = max(1, width), max(1, height)
    known = total_steps is not None and 0 < total_steps < float("inf")
    steps = int(total_steps or 0) if known else lengths.total or max(100, 10 * lengths.warmup)

    def factor(step: int) -> float:
        return lr_factor(step, config, total_steps, tokens_per_step)

    rows = max(1, height - 2)
    labels = [""] * rows
    for part in (0, 1, 2) if rows > 2 else (0,):
        labels[part * (rows - 1) // 2] = f"{lr * (1 - (part * (rows - 1) // 2) / max(rows - 1, 1)):.3g}"
    left = max(map(len, labels))
    if width - left - 2 < _NARROWEST_PLOT:
        labels, left = [""] * rows, 0
    columns = max(1, width - left - 2)
    curve = _curve([factor(_at(x, 2 * columns, steps)) for x in range(2 * columns)], rows)
    lines = [f"{label:>{left}} ┤{cells}" for label, cells in zip(labels, curve, strict=True)]
    lines += [f"{'':>{left}} └{'─' * columns}", f"{'':>{left}}  {_axis(steps, columns)}"]
    lines = lines[:height] + _table(config, lr, steps, lengths, tokens_per_step, total_steps)
    return "\n".join(line[:width].rstrip() for line in lines)


def _at(x: int, points: int, steps: int) -> int:
    """The step at point ``x`` of ``points``: the first step at the first, the last at the last."""
    return round(x * (steps - 1) / max(points - 1, 1))


def _curve(factors: list[float], rows: int) -> list[str]:
    """Lines of braille signs; a factor of 1 is at the top, 0 at the bottom. Points are joined by upright strokes."""
    top = 4 * rows - 1
    heights = [round(min(max(factor, 0.0), 1.0) * top) for factor in factors]
    cells = [[_BLANK] * (len(factors) // 2) for _ in range(rows)]
    before = heights[0]
    for x, now in enumerate(heights):
        low, high = min(now, before + 1 if before < now else now), max(now, before - 1 if before > now else now)
        for dot in range(low, high + 1):
            y = top - dot
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
        before = now
    return ["".join(" " if cell == _BLANK else chr(cell) for cell in line) for line in cells]


def _axis(steps: int, columns: int) -> str:
    """First, middle and last step under the points where they are, as far as there is room."""
    first, middle, last = "0", f"{(steps - 1) // 2:,}", f"{steps - 1:,} step"
    start = max(0, columns // 2 - len(middle) // 2)
    end = columns - len(last)
    if steps < 2 or end < len(first) + 1:
        return "0 step"[: max(columns, 1)] if steps < 2 else first
    text = first.ljust(end) + last
    if steps > 2 and len(first) + 1 < start and start + len(middle) + 1 < end:
        text = text[:start] + middle + text[start + len(middle) :]
    return text


def _table(
    config: ScheduleConfig,
    lr: float,
    steps: int,
    lengths: Lengths,
    tokens_per_step: int | None,
    total_steps: int | None,
) -> list[str]:
    marks = [("first step", 0)]
    if lengths.warmup:
        marks.append(("end of warm-up", lengths.warmup - 1))
    marks.append(("middle", (steps - 1) // 2))
    if config.name == "wsd" and lengths.decay and lengths.total is not None:
        marks.append(("begin of decay", lengths.total - lengths.decay))
    marks.append(("last step", steps - 1))
    lines = []
    wide = max(len("step"), *(len(f"{step:,}") for _, step in marks))
    for name, step in marks:
        rate = f"{lr * lr_factor(step, config, total_steps, tokens_per_step):.8g}" if step < steps else "not reached"
        tokens = f"  {(step + 1) * tokens_per_step:,} tokens" if tokens_per_step else ""
        lines.append(f"{name:<14}  {step:>{wide},}  {rate:<14}{tokens}")
    return lines
