"""Answers in words: what is wrong, how sure that is, what it rests on, and which option to change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lit_llm.trace.lags import Lags
from lit_llm.trace.per_rank import RankSummary
from lit_llm.trace.results import CollectiveKind, FsdpLayer, Severity, Split, Verdict
from lit_llm.trace.straggler import LEAST, Finding, excess_of, slowdown, step_length, threshold
from lit_llm.trace.text import hosts_of, ms, percent, ranks_text

EXPOSED = (0.15, 0.30)
"""Share of the time in which communication is exposed: warning, critical."""
STARVED = (0.10, 0.25)
LAUNCH = (0.15, 0.35)
SYNC = (0.03, 0.10)
COPIES = (0.05, 0.15)
GATHER = 0.5
"""Share of a layer's gathers that is exposed, from which on its prefetch is missing."""
STALL = 0.2
"""Of a step, from which on a single delay is a stall."""

_ADVICE = {
    "data_loading": "Raise data.num_workers (and prefetch), or look at what this rank's storage and data set do; with "
    "num_workers 0 the batch is made while the device waits.",
    "slow_device": "The same kernels take longer here: check the device's clocks, temperature, power limit and who else uses "
    "it, and swap the machine if it stays slow.",
    "slow_host": "The host is late with its work: look for other processes, CPU binding, garbage collection and Python code "
    "that runs on this rank alone (loggers, callbacks); --model.compile true needs fewer launches.",
    "uneven_work": "This rank computes more: balance the tokens of the micro-batches (packing, equal lengths) and look for "
    "code that runs on it alone.",
    "unknown": "Compare this rank's lanes in the timeline with another's; record more steps (active) for a surer answer.",
}


def _severity(value: float, levels: tuple[float, float]) -> Severity | None:
    if value < levels[0]:
        return None
    return "critical" if value >= levels[1] else "warning"


class Judge:
    """Turns the figures of all ranks into verdicts.

    Args:
        ranks: the ranks that may be judged.
        left_out: ranks whose figures can't be trusted, as their files are cut off.
        lags: arrivals and waits.
    """

    def __init__(self, ranks: Sequence[RankSummary], left_out: Sequence[RankSummary], lags: Lags) -> None:
        self.ranks, self.left_out, self.lags = list(ranks), list(left_out), lags
        self.step_ns = step_length(ranks)
        self.gpu = bool(ranks) and ranks[0].device == "gpu"
        self.verdicts: list[Verdict] = []

    def number(self, place: int) -> int:
        """The rank at a place."""
        rank = self.ranks[place].rank
        assert rank is not None
        return rank

    def add(self, code: str, severity: Severity, ranks: list[int], message: str, evidence: str, advice: str = "", **more: object) -> None:
        """Adds a verdict."""
        self.verdicts.append(Verdict(code, severity, ranks, message, evidence, advice, **more))  # type: ignore[arg-type]

    # Across ranks

    def straggler(self, finding: Finding | None, world_size: int | None) -> None:
        """A slow rank, none, or not enough to say."""
        ranks = self.ranks
        if len(ranks) < 2:
            if (world_size or 1) > 1:
                self.add(
                    "not_enough_evidence", "info", [], f"One rank of {world_size} was read: who lags can't be told",
                    "a rank's lateness shows in the others' waits", "Record all ranks, or every k-th (TraceCapture ranks).",
                )  # fmt: skip
            return
        steps = int((self.lags.delay >= 0).any(axis=1).sum())
        if steps < 2:
            seen = "no collective could be matched between ranks" if not steps else "one step alone is comparable"
            self.add(
                "not_enough_evidence", "info", [], "Whether a rank lags can't be told", seen,
                "Record two or more of the same steps on every rank (TraceCapture active, 3 by default).", confidence="low",
            )  # fmt: skip
            return
        if finding is None:
            self._no_straggler(steps)
            return
        everybody = [finding.place, *finding.others]
        who, share = ranks_text([self.number(place) for place in everybody]), finding.delay / max(finding.step_ns, 1)
        host = hosts_of([ranks[place] for place in everybody])
        severity: Severity = "critical" if share > 0.25 else "warning"
        confidence = "high" if finding.strong and finding.cause != "unknown" else "medium"
        if not finding.strong:
            severity, confidence = "info", "low"
        reason = {
            "data_loading": "waits for its data",
            "slow_device": "computes the same more slowly",
            "slow_host": "is held up by its host",
            "uneven_work": "has more to compute",
            "unknown": "is late, the cause does not show",
        }[finding.cause]
        self.add(
            "straggler", severity, [self.number(place) for place in everybody],
            f"{who}{host} {reason}: the others wait {ms(finding.delay)} of each {ms(finding.step_ns)} step for "
            f"{'it' if len(everybody) == 1 else 'them'} ({percent(share)})",
            f"latest in {finding.led} of {finding.steps} steps; {self._excess_text(finding)}",
            _ADVICE[finding.cause], confidence=confidence, steps=list(self.lags.steps),
        )  # fmt: skip

    def _excess_text(self, finding: Finding) -> str:
        names = {"data": "data", "ops": "compute", "launch": "launching", "rest": "untraced host code"}
        parts = [
            f"{ms(value)} more {names[what]}"
            for what, value in sorted(finding.excess.items(), key=lambda item: -item[1])
            if what in names and value > 0.1 * finding.delay
        ]
        text = "a step it takes " + (", ".join(parts) or "no longer in anything that the trace shows") + " than the median of the others"
        if finding.cause == "slow_device":
            ratios, weights = slowdown(self.ranks, finding.place, finding.others)
            if len(ratios):
                text += f"; the same kernels take {percent(float(np.average(ratios, weights=weights)) - 1)} longer"
        if finding.cause == "uneven_work" and finding.excess["calls"] > 0:
            text += f"; {finding.excess['calls']:,} more {'kernels' if self.gpu else 'ops'} a step"
        return text

    def _no_straggler(self, steps: int) -> None:
        delay = self.lags.delay
        worst = float(np.median(delay.max(axis=1)[(delay >= 0).any(axis=1)]))
        least = threshold(self.ranks, self.step_ns)
        self.add(
            "no_straggler", "info", [], f"No rank keeps the others waiting, within {ms(least)} a step",
            f"{len(self.ranks)} ranks over {steps} steps; the latest of a step delays it by {ms(worst)} in the median",
            confidence="high" if worst < least / 2 and steps >= 3 else "medium",
        )  # fmt: skip

    def one_off_stalls(self, finding: Finding | None) -> None:
        """A step in which one rank, or the run as a whole, stood still."""
        chronic = {finding.place, *finding.others} if finding is not None else set()
        told: set[int] = set()
        if len(self.lags.steps) >= 2 and len(self.ranks) >= 2:
            for row, step in enumerate(self.lags.steps):
                delays = np.array([-1 if place in chronic else value for place, value in enumerate(self.lags.delay[row])])
                place = int(delays.argmax())
                others = np.delete(self.lags.delay[:, place], row)
                usual = max(float(np.median(others[others >= 0])) if (others >= 0).any() else 0.0, 0.0)
                beyond = delays[place] - usual
                if beyond <= max(STALL * self.step_ns, 2 * LEAST[self.ranks[0].device]):
                    continue
                told.add(step)
                self._stall(step, [place], int(delays[place]), excess_of(self.ranks, place, step=step))
        self._common_stalls(told)

    def _common_stalls(self, told: set[int]) -> None:
        """Steps that took all ranks much longer than the others did."""
        lengths: dict[int, list[int]] = {}
        for one in self.ranks:
            for number, (start, end) in zip(one.marks.numbers.tolist(), one.windows.tolist(), strict=True):
                lengths.setdefault(number, []).append(end - start)
        middle = {step: float(np.median(values)) for step, values in lengths.items()}
        if len(middle) < 3:
            return
        steps = sorted(middle)
        inner = steps if not self.gpu else steps[:-1]  # the last window of a GPU reaches to the end of all its work
        for step in inner:
            usual = float(np.median([middle[one] for one in inner if one != step]))
            if step in told or middle[step] < 1.5 * usual or middle[step] - usual < 20e6:
                continue
            more = {
                what: int(
                    np.median([_of_step(one, what, step) for one in self.ranks])
                    - np.median([_of_step(one, what, other) for one in self.ranks for other in inner if other != step])
                )
                for what in ("data", "ops", "launch", "rest")
            }
            self._stall(step, [], int(middle[step] - usual), more)

    def _stall(self, step: int, places: list[int], delay: int, excess: dict[str, int]) -> None:
        names = {"data": "fetching its data", "ops": "computing", "launch": "launching", "rest": "in code that is not traced"}
        what = max(names, key=lambda key: excess.get(key, 0))
        clear = excess.get(what, 0) > 0.4 * delay
        who = f"rank {self.number(places[0])}{hosts_of([self.ranks[places[0]]])}" if places else "every rank"
        severity: Severity = "warning" if self.gpu or delay > 0.5 * self.step_ns else "info"
        if not self.gpu and places and not clear:
            severity = "info"
        self.add(
            "one_off_stall", severity, [self.number(place) for place in places],
            f"Step {step} stood still for {ms(delay)}: {who} was late{', ' + names[what] if clear else ''}; other steps were not",
            f"{ms(max(excess.get(what, 0), 0))} more {names[what]} than usual" if clear else "no part that the trace shows was longer",
            "A single stall: look at what happened then (checkpoint, evaluation, garbage collection, storage); "
            + ("if it repeats, raise data.num_workers." if what == "data" and clear else "record more windows to see if it repeats."),
            confidence="medium" if clear else "low", steps=[step],
        )  # fmt: skip

    # Over all ranks

    def _share(self, take: str, cause: str | None = None) -> float:
        """Median over ranks of a part of their time."""
        values = []
        for one in self.ranks:
            # on a CPU-only trace what lies between steps has no window to be a share of
            splits = [one.split] if one.split.window is not None else one.step_splits
            parts = [_part(split, take, cause) for split in splits]
            whole = one.split.window or int((one.marks.windows[:, 1] - one.marks.windows[:, 0]).sum())
            if whole and all(part is not None for part in parts):
                values.append(sum(part or 0 for part in parts) / whole)
        return float(np.median(values)) if values else 0.0

    def communication(self, splits: Sequence[Split], kinds: Sequence[CollectiveKind]) -> None:
        """Communication that nothing hides; without what is only waiting for a rank that another verdict names."""
        waiting, exposed = (sum(getattr(one, name) or 0 for one in splits) for name in ("comm_waiting", "comm_exposed"))
        known = bool(splits) and all(one.comm_waiting is not None for one in splits)
        waited = waiting / exposed if exposed else 0.0
        named = known and any(one.code in ("straggler", "one_off_stall") and one.ranks for one in self.verdicts)
        share = self._share("comm_exposed")
        severity = _severity(share * (1 - waited) if named else share, EXPOSED)
        if severity is None:
            return
        worst = max(kinds, key=lambda one: one.exposed, default=None)
        kind = ""
        if worst is not None:
            kind = f"; most of it is {worst.kind}{f' among {worst.group}' if worst.group else ''} "
            kind += f"({percent(worst.exposed / max(sum(one.exposed for one in kinds), 1))})"
        if not self.gpu:  # what a laptop's processes take over gloo says little about a cluster's network
            severity = "info"
        if known and waited > 0.6:
            advice = "It is mostly waiting for late ranks, not the network: deal with the rank that lags, or even out the work."
        elif worst is not None and worst.kind in ("all_gather", "reduce_scatter"):
            advice = (
                "Raise trainer.strategy.prefetch, keep parameters gathered (trainer.strategy.reshard_after_forward false) if they "
                "fit, shard over fewer devices (replicate x shard), or give each gather more compute (data.micro_batch_size)."
            )
        else:
            advice = (
                "Reduce less often (more micro-batches a step), use other bucket sizes (DataParallelStrategy bucket_size_mb, "
                "compression bf16), or give each step more compute (data.micro_batch_size)."
            )
        split = f"; {percent(waited)} of it waiting for late ranks, {percent(1 - waited)} transferring" if known else ""
        self.add(
            "communication_bound", severity, [],
            f"{percent(share)} of the time goes to communication that no compute hides",
            f"median over {len(self.ranks)} ranks{split}{kind}", advice, confidence="high" if known or self.gpu else "medium",
        )  # fmt: skip

    def prefetch(self, layers: Sequence[FsdpLayer]) -> None:
        """FSDP units whose gather does not hide; those with nothing before them are left out."""
        rest = [(one, name, phase) for one in layers for name, phase in one.phases.items() if not phase.first and phase.gather > 0]
        bare = [row for row in rest if row[2].exposed > GATHER * row[2].gather]
        steps = sum(max(len(one.marks), 1) for one in self.ranks)
        share = sum(phase.exposed for _, _, phase in bare) / max(steps, 1) / max(self.step_ns, 1)
        units = list(dict.fromkeys(one.layer for one, _, _ in bare))
        names = ", ".join(units[:6]) + (f" and {len(units) - 6} more" if len(units) > 6 else "")
        early = [one.early for one, _, _ in bare if one.early is not None]
        odd = self.gpu and len(units) <= len({one.layer for one, _, _ in rest}) // 2  # others do hide, so these could
        if not bare or share < (0.003 if odd else 0.01):
            return
        severity: Severity = "warning" if self.gpu and share >= (0.02 if odd else 0.05) else "info"
        worst, where, phase = max(bare, key=lambda row: row[2].exposed)
        self.add(
            "prefetch_missing", severity, [],
            f"The gather of {names} does not hide behind the compute before it: {percent(share)} of a step",
            f"{worst.layer} in the {where}: {ms(phase.exposed / phase.count)} of {ms(phase.gather / phase.count)} a gather exposed; "
            f"{len(rest) - len(bare)} of {len(rest)} (units x forward, backward) hide theirs"
            + (f"; {percent(float(np.mean(early)))} of these units' gathers were called for early" if early else ""),
            "Set trainer.strategy.prefetch to 1 or more, keep what is large gathered (reshard_after_forward false), or raise "
            "data.micro_batch_size so that a layer computes longer than the next takes to arrive.",
        )  # fmt: skip

    def idle(self) -> None:
        """What a GPU waits for besides communication."""
        if not self.gpu:
            return
        ahead = [one.launch_ahead for one in self.ranks if one.launch_ahead is not None]
        behind = float(np.median(ahead)) if ahead else None
        launch = self._share("idle", "launch") + self._share("idle", "other")
        if (severity := _severity(launch, LAUNCH)) is not None and (behind is None or behind < 1e6):
            self.add(
                "launch_bound", severity, [],
                f"The GPU waits {percent(launch)} of the time for the host to launch its next kernel",
                f"{percent(self._share('idle', 'launch'))} in ops and runtime calls, {percent(self._share('idle', 'other'))} in code "
                "that is not traced" + (f"; kernels start {ms(behind)} after their launch in the median" if behind is not None else ""),
                "Give each kernel more to do (data.micro_batch_size), need fewer of them (--model.compile true), and keep Python "
                "out of the step.",
            )  # fmt: skip
        waits = self._share("idle", "dependency")
        if (severity := _severity(waits, LAUNCH)) is not None:
            self.add(
                "dependency_wait", severity, [],
                f"The GPU idles {percent(waits)} of the time although its next work is launched",
                f"median over {len(self.ranks)} ranks; streams wait for events of one another or of the host, or kernels are so "
                "short that the gaps between them count",
                "Look at the streams in the timeline for who waits for whom; fuse short kernels (--model.compile true).",
            )  # fmt: skip
        self._host_sync()
        copies = self._share("mem_exposed")
        if (severity := _severity(copies, COPIES)) is not None:
            self.add(
                "memory_copies", severity, [], f"{percent(copies)} of the time goes to copies and fills that no compute hides",
                f"median over {len(self.ranks)} ranks", "Copy batches from pinned memory without blocking, keep tensors on the device, "
                "and look for .cpu(), .to() and cpu_offload in the step.",
            )  # fmt: skip

    def _host_sync(self) -> None:
        share = self._share("idle", "host_sync")
        severity = _severity(share, SYNC) or ("info" if share > 0.003 else None)
        if severity is None:
            return
        rows: dict[str, list[int]] = {}
        lines: dict[str, str] = {}
        for one in self.ranks:
            for name, count, total, line in one.idle.syncs if one.idle is not None else []:
                row = rows.setdefault(name, [0, 0])
                row[0], row[1] = row[0] + count, row[1] + total
                if line:
                    lines[name] = line
        worst = max(rows, key=lambda name: rows[name][1]) if rows else "a call"
        count = rows[worst][0] / max(sum(max(len(one.marks), 1) for one in self.ranks), 1) if rows else 0
        where = f" at {lines[worst]}" if worst in lines else ""
        self.add(
            "host_sync", severity, [], f"The GPU idles {percent(share)} of the time because the host waits for it ({worst}{where})",
            f"{worst} {count:,.1f} times a step on a rank" if rows else "blocking calls in the step",
            "Take .item(), .cpu(), print of a tensor and boolean masks out of the step, or read values a step later; record with "
            "with_stack true to see the line.",
        )  # fmt: skip

    def data(self, finding: Finding | None) -> None:
        """All ranks wait for their data."""
        share = self._share("idle", "data_loading") if self.gpu else self._share("dataloader")
        levels = STARVED if not self.gpu else (STARVED[0] / 2, STARVED[1] / 2)
        severity = _severity(share, levels)
        if severity is None or (finding is not None and finding.cause == "data_loading" and len(self.ranks) <= 2):
            return
        self.add(
            "data_starved", severity, [], f"Every rank waits for its data: {percent(share)} of the time",
            f"median over {len(self.ranks)} ranks", _ADVICE["data_loading"], confidence="high",
        )  # fmt: skip

    def close(self) -> list[Verdict]:
        """All verdicts, the gravest first; healthy where none is grave."""
        if self.left_out:
            numbers = [one.rank for one in self.left_out if one.rank is not None]
            self.add(
                "not_enough_evidence", "info", numbers, f"{ranks_text(numbers)}: the file is cut off, so nothing is concluded from it",
                "a cut file lacks kernels of all times, not the last ones alone", "Record again; the run may have died while writing.",
            )  # fmt: skip
        codes = {one.code for one in self.verdicts}
        grave = [one for one in self.verdicts if one.severity != "info"]
        uncertain = self.ranks and not grave and not codes & {"straggler", "one_off_stall", "prefetch_missing", "communication_bound"}
        if uncertain:
            self.add("healthy", "info", [], "Nothing here is slow for a reason that the traces show", "all checks are within their bounds")
        if self.ranks and max(len(one.marks) for one in self.ranks) < 2:  # start-up and the like may be all there is
            for one in self.verdicts:
                if one.severity != "info" or one.code == "healthy":
                    one.confidence = "low"
        order = {"critical": 0, "warning": 1, "info": 2}
        return sorted(self.verdicts, key=lambda one: order[one.severity])


def _part(one: Split, take: str, cause: str | None) -> int | None:
    if cause is not None:
        return (one.idle_by_cause or {}).get(cause)
    value: int | None = getattr(one, take)
    return value


def _of_step(one: RankSummary, what: str, step: int) -> int:
    values = one.work[what][one.marks.numbers == step]
    return int(values[0]) if len(values) else 0
