"""The analysis for a terminal: the verdicts first, then the figures they rest on."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from lit_llm.trace import look, units
from lit_llm.trace.printing import Printer
from lit_llm.trace.results import Analysis, Rank, Verdict

STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "bold cyan"}
ROWS = 12
"""Ranks in the table at most."""
GLYPHS = {
    "compute": "█",
    "rest": "█",
    "transfer": "▓",
    "comm": "▓",
    "waiting": "▒",
    "memory": "m",
    "data": "d",
    "loading": "d",
    "sync": "s",
    "launch": "l",
    "dependency": "·",
    "other": "·",
    "idle": "·",
    "optimizer": "o",
}
"""A bar's letters: a plain terminal has no colours."""
COLOURS = {"█": "blue", "▓": "yellow", "▒": "red", "m": "magenta", "o": "magenta", "d": "green"}
WORDS = {
    "█": "compute",
    "▓": "communication, transferring",
    "▒": "waiting for a rank",
    "m": "memory copies",
    "d": "data loading",
    "s": "host synchronises",
    "l": "launch",
    "·": "idle otherwise",
    "o": "optimizer",
}


def render(analysis: Analysis, console: Console) -> None:
    """Prints the report; fits 80 columns, and uses what more there are for names."""
    _Report(analysis, console).print()


class _Report(Printer):
    def __init__(self, analysis: Analysis, console: Console) -> None:
        super().__init__(console)
        self.analysis = analysis
        self.ranks = sorted(analysis.ranks, key=lambda rank: rank.rank)
        self.gpu = any(rank.device == "gpu" for rank in self.ranks)

    def print(self) -> None:
        analysis = self.analysis
        self._line(analysis.source, "bold")
        self._line(f"{look.summary(analysis)}; read in {analysis.seconds:.1f} s", "dim")
        for note in analysis.notes:
            self._line(f"note: {note}")
        for verdict in look.by_severity(analysis):
            self._verdict(verdict)
        self._rank_table()
        self._collectives()
        self._layers()
        self._idle()
        self._kernels()
        health = [item for item in analysis.health if item.message not in analysis.notes]
        if health:
            self._heading("Health of the traces")
        for item in health:
            self._line(("" if item.rank is None else f"rank {item.rank}: ") + item.message, indent=2)

    def _verdict(self, verdict: Verdict) -> None:
        self.console.print()
        head = Text(verdict.severity.upper(), style=STYLES[verdict.severity])
        words = look.title(verdict)
        if verdict.ranks:
            words += f", {units.named('rank', verdict.ranks)}"
        head.append(self._safe(f"  {words} ({verdict.code}, confidence: {verdict.confidence})"), style="bold")
        self.console.print(head)
        self._line(verdict.message, indent=2)
        if verdict.evidence:
            self._line(verdict.evidence, "dim", indent=2)
        if verdict.advice:
            self._line(f"What to do: {verdict.advice}", indent=2)

    def _rank_table(self) -> None:
        if not self.ranks:
            return
        chosen = choose_ranks(self.analysis, ROWS)
        self._heading("Ranks")
        longest = max(sum(part.value for part in look.parts(rank)) for rank in self.ranks)
        width = max(12, min(48, self.console.width - (62 if self.gpu else 56)))
        shares = ("compute", "comm", "wait", "mem", "idle") if self.gpu else ("data", "optim", "comm", "wait")
        bars = [(rank, self._bar(rank, longest, width)) for rank in chosen]
        rows: list[Sequence[str | Text]] = []
        for rank, bar in bars:
            figures = (units.duration(look.step_time(rank)), *self._shares(rank), units.duration(look.lag_time(rank)))
            rows.append((str(rank.rank), bar, *figures))
        self._table(("rank", "", "step", *shares, "lag"), rows, names=1)
        rest = [rank for rank in self.ranks if rank not in chosen]
        if rest:
            times = [time for rank in rest if (time := look.step_time(rank)) is not None]
            between = f": {units.duration(min(times))} to {units.duration(max(times))} a step" if times else ""
            self._line(f"... {len(rest)} more alike{between}", "dim")
        drawn = "".join(row[1].plain for row in bars)
        known = WORDS if self.gpu else {**WORDS, "█": "rest, mostly compute"}
        words = [(self._safe(glyph), word) for glyph, word in known.items()]
        self._line("bars: " + ", ".join(f"{glyph} {word}" for glyph, word in words if glyph in drawn), "dim")

    def _bar(self, rank: Rank, longest: float, width: int) -> Text:
        bar = Text()
        at, done = 0.0, 0
        for part in look.parts(rank):
            at += part.value
            until = round(at / longest * width) if longest else 0
            bar.append(self._safe(GLYPHS[part.key] * (until - done)), style=COLOURS.get(GLYPHS[part.key], ""))
            done = until
        return bar

    def _shares(self, rank: Rank) -> list[str]:
        totals = {part.key: part.value for part in look.parts(rank)}
        whole = sum(totals.values())
        comm = sum(totals.get(key, 0) for key in ("comm", "transfer", "waiting"))
        waiting = units.share(totals["waiting"], whole) if "waiting" in totals else units.NONE
        if rank.device == "cpu":
            own = [units.share(totals.get("loading", 0), whole), units.share(totals.get("optimizer", 0), whole)]
            if self.gpu:  # a CPU rank among GPU ranks: a figure under another's heading would mislead
                return [units.NONE, units.share(comm, whole), waiting, units.NONE, units.NONE]
            return [*own, units.share(comm, whole), waiting]
        idle = sum(totals.get(key, 0) for key in ("idle", *look.CAUSE_KEYS.values()))
        figures = (totals["compute"], comm, None, totals["memory"], idle)
        shares = [units.share(figure, whole) for figure in figures]
        shares[2] = waiting
        return shares

    def _collectives(self) -> None:
        kinds = self.analysis.collectives
        if not kinds:
            return
        self._heading("Collectives, summed over ranks")
        rows = [
            (
                kind.kind + (f" [{units.shorten(kind.group, 12)}]" if kind.group else ""),
                units.count(kind.count),
                units.size(kind.bytes),
                units.duration(kind.total),
                units.duration(kind.exposed),
                units.share(kind.hidden, kind.total),
                units.rate(kind.bandwidth),
            )
            for kind in kinds
        ]
        self._table(("kind", "count", "bytes", "total", "exposed", "hidden", "bandwidth"), rows)

    def _layers(self) -> None:
        layers = self.analysis.fsdp_layers
        if not layers:
            return
        self._heading("FSDP all-gathers by layer, summed over ranks and steps")
        worst = sorted(layers, key=lambda layer: -layer.exposed)[:ROWS]
        rows = [
            (
                layer.layer,
                units.count(layer.count),
                units.duration(layer.gather),
                units.duration(layer.exposed),
                units.share(layer.hidden, layer.gather),
                units.percent(layer.early),
            )
            for layer in layers
            if layer in worst
        ]
        self._table(("layer", "count", "gather", "exposed", "hidden", "early"), rows)
        if len(layers) > len(worst):
            self._line(f"... {len(layers) - len(worst)} more with less exposed", "dim")

    def _idle(self) -> None:
        causes: dict[str, int] = {}
        for rank in self.ranks:
            for cause, time in (rank.split.idle_by_cause or {}).items():
                causes[cause] = causes.get(cause, 0) + time
        whole = sum(causes.values())
        if whole:
            self._heading("Idle GPUs, summed over ranks")
            rows = [
                (look.CAUSE_WORDS.get(cause, cause), units.duration(time), units.share(time, whole))
                for cause, time in sorted(causes.items(), key=lambda item: -item[1])
                if time
            ]
            self._table(("cause", "time", "share"), rows)
        if self.analysis.gaps:
            self._heading("Longest gaps")
            gaps = [
                (
                    units.duration(gap.duration),
                    str(gap.rank),
                    units.NONE if gap.step is None else str(gap.step),
                    look.CAUSE_WORDS.get(gap.cause, gap.cause),
                    units.shorten(gap.op or units.NONE, max(self.console.width - 46, 20)),
                )
                for gap in self.analysis.gaps[:5]
            ]
            self._table(("gap", "rank", "step", "cause", "what the host was in"), gaps, names=4)

    def _kernels(self) -> None:
        if not self.analysis.top_kernels:
            return
        self._heading("Top kernels" if self.gpu else "Top operations, by self time")
        rows = []
        for kernel in self.analysis.top_kernels[:10]:
            slowest = units.NONE
            if kernel.slowest_rank is not None:
                times = "" if kernel.slowest_ratio is None else f" {units.ratio(kernel.slowest_ratio)}"
                slowest = f"rank {kernel.slowest_rank}{times}"
            rows.append(
                (
                    units.shorten(kernel.name.removeprefix("void "), max(self.console.width - 54, 20)),
                    units.percent(kernel.share),
                    units.count(kernel.calls),
                    units.duration(kernel.total),
                    units.duration(kernel.mean),
                    slowest,
                )
            )
        self._table(("name", "share", "calls", "total", "mean", "slowest"), rows)


def choose_ranks(analysis: Analysis, limit: int) -> list[Rank]:
    """All ranks where they fit; else those that verdicts name, the worst, the best and the median; in order."""
    ranks = sorted(analysis.ranks, key=lambda rank: rank.rank)
    if len(ranks) <= limit:
        return ranks
    numbered = {rank.rank: rank for rank in ranks}
    named = [numbered[number] for number in look.flagged_ranks(analysis) if number in numbered]

    def badness(rank: Rank) -> tuple[float, float]:
        return (look.lag_time(rank) or 0, look.step_time(rank) or 0)

    by_badness = sorted(ranks, key=badness, reverse=True)
    chosen: list[Rank] = []
    for rank in [by_badness[-1], by_badness[len(ranks) // 2], *named, *by_badness]:
        if rank not in chosen and len(chosen) < min(limit, max(8, len(named) + 2)):
            chosen.append(rank)
    return sorted(chosen, key=lambda rank: rank.rank)
