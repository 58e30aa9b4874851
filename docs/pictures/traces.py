"""Makes docs/pictures/trace-page.png and trace-step.png: parts of the page of ``lit-llm trace --html``.

    python -m docs.pictures.traces

The run is a made one of eight GPUs (tests/synthetic_traces.py): rank 5 gets each batch 90 ms late, and layer 2 is
gathered only when its turn has come. Needs chromium with chromedriver, and pillow.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from PIL import Image

from lit_llm.trace.analysis import analyze
from lit_llm.trace.html import page
from tests.browser import browser
from tests.synthetic_traces import write_set

HERE = Path(__file__).resolve().parent
WIDTH, EDGE = 900, 24
PARTS = {"trace-page.png": (None, "lag"), "trace-step.png": ("timeline", "layers")}
"""A file, and the first and last section that it shows; None: from the top of the page."""
PLACE = "const s = document.getElementById(arguments[0]).getBoundingClientRect(); return [s.top, s.bottom]"


def main() -> None:
    """Draws both."""
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)  # the page's title is the path as it is given
        traces, file = Path("runs/eight/traces/step-000100"), Path("page.html")
        faults = {"slow_loader": {5: 90.0}, "unhidden_layer": [2]}
        write_set(traces, layers=6, steps=4, lead=0.2, transfer=0.5, ranks_per_host=4, **faults)
        file.write_text(page(analyze("runs/eight", timeline=True)), encoding="utf-8")
        with browser(Path(name)) as shown:
            shown.look(WIDTH, dark=False)
            shown.open(file)
            height = int(shown.run("return document.documentElement.scrollHeight"))
            shown.look(WIDTH, dark=False, height=height)
            shown.screenshot(Path("page.png"))
            spans = {
                output: (shown.run(PLACE, first)[0] - EDGE if first else 0, shown.run(PLACE, last)[1])
                for output, (first, last) in PARTS.items()
            }
        with Image.open("page.png") as whole:
            for output, (top, bottom) in spans.items():
                part = whole.convert("RGB").crop((0, int(top), WIDTH, int(bottom)))
                part.quantize(256, dither=Image.Dither.NONE).save(HERE / output, optimize=True)


if __name__ == "__main__":
    main()
