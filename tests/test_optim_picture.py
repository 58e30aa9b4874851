"""The picture of a schedule."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from lit_llm.errors import UserError
from lit_llm.optim import ScheduleConfig, draw_schedule, lr_factor
from lit_llm.optim.schedules import ScheduleName


@pytest.mark.parametrize("name", get_args(ScheduleName))
@pytest.mark.parametrize("total", [1, 2, 3, 40, 123_456])
@pytest.mark.parametrize(("width", "height"), [(72, 12), (40, 5), (12, 3), (5, 2), (1, 1), (0, 0), (200, 40)])
def test_picture_keeps_its_size(name: Any, total: int, width: int, height: int) -> None:
    for tokens_per_step in (None, 1000):
        lines = draw_schedule(ScheduleConfig(name=name), 3e-4, total, tokens_per_step, width, height).splitlines()
        table = 3 + (round(total / 100) > 0) + (name == "wsd" and round(total / 5) > 0)
        assert len(lines) == max(1, height) + table
        assert max(map(len, lines)) <= max(1, width)


def test_table_of_the_picture() -> None:
    config = ScheduleConfig(name="wsd", warmup_steps=4, decay_steps=10, min_lr_ratio=0.0)
    lines = draw_schedule(config, 4e-3, 1001, 2000).splitlines()
    assert [line.split() for line in lines[12:]] == [
        ["first", "step", "0", "0.001", "2,000", "tokens"],
        ["end", "of", "warm-up", "3", "0.004", "8,000", "tokens"],
        ["middle", "500", "0.004", "1,002,000", "tokens"],
        ["begin", "of", "decay", "991", "0.0036", "1,984,000", "tokens"],
        ["last", "step", "1,000", "0", "2,002,000", "tokens"],
    ]
    text = draw_schedule(ScheduleConfig(warmup_steps=100), 1.0, 10)
    assert [line.split() for line in text.splitlines() if "warm-up" in line] == [
        ["end", "of", "warm-up", "99", "not", "reached"]
    ]


def dots(text: str, rows: int) -> list[set[int]]:
    """Heights of the dots in each column of a picture, 0 the lowest; braille is read by its standard numbering."""
    order = {0: (0, 0), 1: (1, 0), 2: (2, 0), 3: (0, 1), 4: (1, 1), 5: (2, 1), 6: (3, 0), 7: (3, 1)}
    found: dict[int, set[int]] = {}
    for row, line in enumerate(text.splitlines()[:rows]):
        for column, sign in enumerate(line.split("┤")[1]):
            for bit, (down, right) in order.items():
                if sign != " " and (ord(sign) - 0x2800) >> bit & 1:
                    found.setdefault(2 * column + right, set()).add(4 * rows - 1 - (4 * row + down))
    return [found[x] for x in range(len(found))]


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_picture_shows_the_curve(name: Any) -> None:
    """A dot at each column's rate, and no gap to the column before."""
    config = ScheduleConfig(name=name, warmup_steps=30)
    columns = dots(draw_schedule(config, 1e-3, 500, height=12), 10)
    for x, heights in enumerate(columns):
        step = round(x * 499 / (len(columns) - 1))
        assert round(lr_factor(step, config, 500) * 39) in heights
        assert heights == set(range(min(heights), max(heights) + 1))
        if x:
            near = columns[x - 1]
            assert min(abs(a - b) for a in heights for b in near) <= 1


def test_picture_of_an_unknown_length() -> None:
    text = draw_schedule(ScheduleConfig(name="constant", warmup_steps=20), 1e-3, None)
    assert "199 step" in text
    assert "99 step" in draw_schedule(ScheduleConfig(name="constant", warmup_steps=0), 0.0, -1)
    assert "49 step" in draw_schedule(ScheduleConfig(total_steps=50), 1e-3, None)
    with pytest.raises(UserError, match="max_steps"):
        draw_schedule(ScheduleConfig(), 1e-3, None)
