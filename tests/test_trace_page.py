"""The page of a trace report, in a real browser where there is one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lit_llm.trace.diff import compare
from lit_llm.trace.html import page, write_html
from lit_llm.trace.pictures import Row, round_step, stacked_bars
from lit_llm.trace.results import Analysis, Lane, RankTimeline, Span, Timeline
from lit_llm.trace.timeline_picture import BUDGET, draw, merged
from lit_llm.trace.units import duration
from tests.browser import CHROMIUM, DRIVER, Browser, browser
from tests.trace_samples import LONG, MS, cpu_pair, gpus

SAMPLES = {"2": cpu_pair, "8": lambda: gpus(8), "128": lambda: gpus(128)}

# Boxes of all texts of a picture that cover one another by more than a pixel, or stick out of their SVG.
OVERLAPS = """
const found = [];
let seen = 0;
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect();
  const boxes = [...svg.querySelectorAll("text")].map((node) => [node.textContent, node.getBoundingClientRect()]);
  seen += boxes.length;
  boxes.forEach(([text, a], index) => {
    if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1 || a.bottom > frame.bottom + 1)
      found.push(["sticks out", text, frame.width, a.width]);
    for (const [other, b] of boxes.slice(index + 1)) {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && high > 2) found.push(["overlap", text, other, wide, high]);
    }
  });
}
return [seen, found];
"""

# Luminance contrast of each text to the nearest painted background of the page.
CONTRAST = """
const channel = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const luminance = (rgb) => 0.2126 * channel(rgb[0]) + 0.7152 * channel(rgb[1]) + 0.0722 * channel(rgb[2]);
const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const ground = (node) => {
  for (; node; node = node.parentElement) {
    const rgb = parse(getComputedStyle(node).backgroundColor);
    if (rgb.length === 3 || rgb[3] > 0) return rgb;
  }
  return [255, 255, 255];
};
const low = [];
const kinds = "h1, h2, h3, h4, p, dt, dd, th, td, li, summary, span, svg text:not([class^=v])";
for (const node of document.querySelectorAll(kinds)) {
  if (!node.textContent.trim()) continue;
  const style = getComputedStyle(node);
  const ink = luminance(parse(node.tagName === "text" ? style.fill : style.color));
  const paper = luminance(ground(node.tagName === "text" ? node.closest("div") : node));
  const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  if (ratio < 4.5) low.push([node.textContent.slice(0, 40), ratio]);
}
return low;
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests here."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed")
    with browser(tmp_path_factory.mktemp("browser")) as session:
        session.command("POST", "url", {"url": "about:blank"})  # off the browser's own first page
        yield session


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of each sample, by the number of ranks."""
    folder = tmp_path_factory.mktemp("pages")
    return {name: write_html(make(), folder / f"{name}.html") for name, make in SAMPLES.items()}


@pytest.mark.parametrize("ranks", ["2", "8", "128"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_in_a_browser(chromium: Browser, pages: dict[str, Path], ranks: str, dark: bool) -> None:
    for width in (1440, 800):
        chromium.look(width, dark=dark)
        chromium.log("performance")
        chromium.open(pages[ranks])
        assert chromium.run("return innerWidth") == width
        assert chromium.run("return document.documentElement.scrollWidth") <= width
        chromium.run("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
        assert chromium.run("return document.documentElement.scrollWidth") <= width
        seen, overlaps = chromium.run(OVERLAPS)
        assert seen == pages[ranks].read_text(encoding="utf-8").count("<text ") > 20
        assert overlaps == []
        assert chromium.run(CONTRAST) == []
        asked = [line["message"] for line in chromium.log("performance") if "requestWillBeSent" in line["message"]]
        urls = {url for message in asked for url in re.findall(r'"url":"([^"]*)"', message)}
        assert {url.split(":")[0] for url in urls} <= {"file", "data"}
    paper = chromium.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 200) is dark
    assert chromium.log("browser") == []


def test_pictures_of_odd_sizes_do_not_crowd(chromium: Browser, tmp_path: Path) -> None:
    large = gpus(17, steps=11)
    for rank in large.ranks:
        for step in rank.steps:
            step.step += 123_456_789
    allflagged = gpus(128, steps=1)
    allflagged.verdicts[0].ranks = list(range(128))
    cases = [large, allflagged, gpus(16, steps=60), gpus(49, steps=9, layers=100), gpus(1)]
    for number, analysis in enumerate(cases):
        path = write_html(analysis, tmp_path / f"{number}.html")
        for width in (1440, 800):
            chromium.look(width, dark=False)
            chromium.open(path)
            assert chromium.run(OVERLAPS)[1] == []
            assert chromium.run("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("kind", ["gpu", "cpu", "both"])
def test_difference_in_a_browser(chromium: Browser, tmp_path: Path, kind: str) -> None:
    after = cpu_pair() if kind == "cpu" else gpus(8)
    base = gpus(8, slow=99) if kind == "gpu" else cpu_pair()
    base.source = "runs/" + "before-" * 30 + "<b>"
    for layer in after.fsdp_layers:
        layer.exposed += 900 * MS
    for number, kernel in enumerate(after.top_kernels):
        kernel.total *= 2 + number
        kernel.name = kernel.name + "_long" * number * 5 if number % 2 else kernel.name
    path = write_html(after, tmp_path / "page.html", compare(after, base))
    for width, dark in ((1440, False), (800, True)):
        chromium.look(width, dark=dark)
        chromium.open(path)
        assert chromium.run("return document.querySelectorAll('#difference table').length") >= 2
        assert chromium.run("return document.documentElement.scrollWidth") <= width
        assert chromium.run(OVERLAPS)[1] == []
        assert chromium.run(CONTRAST) == []
        # No table is wider than its place, so that nothing must be scrolled sideways to be seen.
        wide = "return [...document.querySelectorAll('#difference .scroll')].map((n) => n.scrollWidth - n.clientWidth)"
        assert max(chromium.run(wide)) <= 1
    assert chromium.log("browser") == []


def test_page_shows_tips_and_zooms(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.look(1440, dark=False)
    chromium.open(pages["8"])
    at = chromium.run(
        "const node = document.querySelector('.bars rect'); node.scrollIntoView({block: 'center'});"
        "const box = node.getBoundingClientRect(); return [box.left + 5, box.top + 5]"
    )
    chromium.devtools("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
    assert chromium.run("return document.getElementById('tip').textContent").startswith("rank 0 on node-00, compute: ")
    assert not chromium.run("return document.getElementById('tip').hidden")

    def axis() -> list[str]:
        return chromium.run("return [...document.querySelectorAll('.lane-axis text')].map((node) => node.textContent)")

    assert axis() == ["0", "70.4 ms", "141 ms", "211 ms", "282 ms", "352 ms"]
    left, right, top = chromium.run(
        "const node = document.querySelector('.zoomable'); node.scrollIntoView({block: 'center'});"
        "const box = node.getBoundingClientRect(); return [box.left, box.right, box.top + 8]"
    )
    for kind, share in (("mousePressed", 0.25), ("mouseMoved", 0.5), ("mouseReleased", 0.75)):
        x = left + (right - left) * share
        chromium.devtools("Input.dispatchMouseEvent", type=kind, x=x, y=top, button="left", clickCount=1)
    assert axis() == ["88.0 ms", "123 ms", "158 ms", "194 ms", "229 ms", "264 ms"]
    boxes = chromium.run("return [...document.querySelectorAll('.zoomable')].map((n) => n.getAttribute('viewBox'))")
    assert len(set(boxes)) == 1
    assert float(boxes[0].split()[0]) == pytest.approx(2500, abs=20)
    for _ in range(6):
        chromium.run("document.querySelector('[aria-label=\"zoom in\"]').click()")
        assert len(set(axis())) == 6
        assert chromium.run(OVERLAPS)[1] == []
    chromium.run("document.querySelector('[aria-label=\"the whole step\"]').click()")
    assert axis()[-1] == "352 ms"
    assert chromium.log("browser") == []


class _Reader(HTMLParser):
    """Notes tags that are not closed, and what a page would load."""

    VOID = frozenset({"meta", "link", "br", "input", "img", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("ranks", ["2", "8", "128"])
def test_page_is_whole_and_alone(ranks: str) -> None:
    text = page(SAMPLES[ranks]())
    reader = _Reader()
    reader.feed(text)
    assert reader.open == []
    assert reader.loads == ["data:,"]  # an empty icon, so that a browser asks for none
    assert reader.scripts == 1
    assert "http" not in text.replace("http-equiv", "")
    assert "default-src 'none'" in text
    assert "<script>alert" not in text
    assert len(text) < 3_000_000
    identifiers = re.findall(r'\bid="([^"]+)"', text)
    assert len(identifiers) == len(set(identifiers))


def test_page_says_it_in_words() -> None:
    text = page(gpus(128))
    assert "rank 80 on node-10, communication, transferring: " in text
    assert "<title>rank 80, step 2001: " in text
    assert text.index("critical</span>Slow rank") < text.index("warning</span>Gathers not hidden")
    assert "What to do:</b> Look at the GPU of rank 80" in text
    assert f'title="{LONG[:60]}'.replace("<", "&lt;") in text  # whole in the title, short in the cell
    assert 'text class="label marked" x="100%" dx="-8" text-anchor="end" y="487">rank 80<' in text
    assert "Idle GPUs" not in page(cpu_pair()).replace("<h2>Idle GPUs</h2><p", "")


def test_thin_rows_are_labelled_every_eighth_and_never_closer_than_a_line() -> None:
    text = page(gpus(128, slow=81))
    found = re.findall(r'text-anchor="end" y="[\d.]+">(?:<title>[^<]*</title>)?rank (\d+)<', text)
    labels = [int(number) for number in found]
    half = labels[: len(labels) // 2]
    assert half == labels[len(labels) // 2 :]  # bars and heat map alike
    assert half == sorted([*(n for n in range(0, 128, 8) if n != 80), 81])


def test_pages_of_a_thousand_ranks_stay_small() -> None:
    text = page(gpus(1024, steps=5))
    assert len(text) < 6_000_000
    height = max(float(value) for value in re.findall(r'<svg[^>]* height="([\d.]+)"', text))
    assert height < 2000


def test_bars_are_drawn_to_scale() -> None:
    from lit_llm.trace.look import Part

    rows = [Row("a", [Part("compute", 30), Part("waiting", 10)]), Row("b", [Part("compute", 80)]), Row("c", [])]
    text = str(stacked_bars(rows, duration, title="t", description="d"))
    places = re.findall(r'class="k-(\w+)" x="([\d.]+)%" y="[\d.]+" width="([\d.]+)%"', text)
    assert places == [("compute", "0", "37.5"), ("waiting", "37.5", "12.5"), ("compute", "0", "100")]
    assert [round_step(raw) for raw in (0.3, 1, 1.1, 4.9, 70, 23e6)] == [0.5, 1, 2, 5, 100, 50e6]


def _spans(count: int, length: int, gap: int, kind: str = "compute") -> list[Span]:
    step = length + gap
    return [Span(i * step, i * step + length, kind, f"k{i}") for i in range(count)]  # type: ignore[arg-type]


def test_short_spans_are_drawn_together_and_long_ones_stay() -> None:
    spans = [*_spans(1000, 5, 1), Span(6000, 7000, "compute", "long"), Span(7000, 7005, "comm", "one")]
    drawn = merged(spans, 0, 10_000, 100)
    assert [(start, end, kind) for start, end, kind, _ in drawn] == [
        (0, 5999, "compute"),
        (6000, 7000, "compute"),
        (7000, 7005, "comm"),
    ]
    assert drawn[0][3].startswith("1,000 spans in 6.00 µs")
    assert drawn[2][3].startswith("one: 5 ns")


def test_spans_outside_the_picture_are_cut() -> None:
    spans = [Span(0, 50, "compute", "before"), Span(80, 130, "compute", "in"), Span(190, 260, "compute", "out")]
    assert [(start, end) for start, end, _, _ in merged(spans, 100, 200, 1)] == [(100, 130), (190, 200)]


def test_a_timeline_of_a_hundred_thousand_kernels_stays_small() -> None:
    spans = _spans(100_000, 2_000, 1_500)
    window = spans[-1].end
    ranks = [RankTimeline(rank, "", [Lane(f"stream {i}", spans) for i in range(3)]) for rank in (0, 1)]
    picture, legend = draw(Timeline(1, 0, window, ranks))
    assert str(picture).count("<rect") <= BUDGET + 10
    assert "compute" in str(legend)


def _pictures(analysis: Analysis) -> list[Any]:
    return re.findall(r'<svg class="plot".*?</svg>', page(analysis), re.S)


def test_pictures_have_titles_and_tables_have_headers() -> None:
    pictures = _pictures(gpus(8))
    assert len(pictures) == 4  # ranks, lag, layers, idle
    for picture in pictures:
        assert re.match(r"<svg[^>]*role=\"img\"[^>]*><title>[^<]+</title><desc>[^<]+</desc>", picture)
    text = page(gpus(8))
    for table in re.findall(r"<table.*?</table>", text, re.S):
        assert 'scope="col"' in table


def test_layers_that_a_verdict_names_are_marked() -> None:
    marked = re.findall(r'class="label marked"[^>]*>(?:<title>[^<]*</title>)?(layers[^<]*)<', page(gpus(8)))
    assert marked == ["layers.7"]
    analysis = gpus(8)
    analysis.verdicts[1].message = "The gathers of layers.0, layers.12 and layers.23."
    analysis.verdicts[1].evidence = ""
    marked = re.findall(r'class="label marked"[^>]*>(?:<title>[^<]*</title>)?(layers[^<]*)<', page(analysis))
    assert marked == ["layers.0", "layers.12", "layers.23"]
