"""What the benchmarks share: a table, a JSON file, and a line about the machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What a figure cannot be read without."""
    import torch

    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows of text or numbers as a Markdown table."""
    cells = [[f"{c:,.3g}" if isinstance(c, float) and abs(c) < 1000 else _whole(c) for c in row] for row in rows]
    widths = [max(len(h), *(len(row[i]) for row in cells)) for i, h in enumerate(headers)]
    lines = ["| " + " | ".join(h.ljust(w) for h, w in zip(headers, widths, strict=True)) + " |"]
    lines.append("|" + "|".join("-" * (w + 2) for w in widths) + "|")
    lines += ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join(lines)


def _whole(cell: Any) -> str:
    return f"{cell:,.0f}" if isinstance(cell, float) else str(cell)


def save(name: str, data: Any) -> Path:
    """Writes the figures to ``benchmarks/results/NAME.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"machine": machine(), "data": data}, indent=1))
    temporary.replace(path)
    return path
