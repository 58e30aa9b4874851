"""The analysis as JSON. Field names are a contract with the scripts of users."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lit_llm.trace.conditions import FIGURES
from lit_llm.trace.diff_json import difference_json
from lit_llm.trace.results import (
    Analysis,
    CollectiveKind,
    Difference,
    FsdpLayer,
    Gap,
    Kernel,
    Rank,
    Split,
    Step,
    Verdict,
)
from lit_llm.trace.writing import write_text


def to_json(analysis: Analysis, difference: Difference | None = None) -> dict[str, Any]:
    """``analysis`` as what :func:`json.dumps` takes.

    Times are floats in microseconds (fields ``*_us``) with three decimals, that is, every nanosecond, so that the parts
    of a window add up. What a trace can't tell is None (null), never 0. ``share`` and ``early`` are between 0 and 1,
    ``bandwidth`` is in bytes per second, ``start_us`` counts from the first step of any rank.
    ``figures`` are those that ``--fail_on`` knows, in percent, microseconds and counts.
    With a ``difference`` there is the field of that name: see :func:`~lit_llm.trace.diff_json.difference_json`.
    """
    origin = min((step.start for rank in analysis.ranks for step in rank.steps), default=0)
    straggler = analysis.straggler
    return {
        "source": analysis.source,
        "world_size": analysis.world_size,
        "missing_ranks": list(analysis.missing_ranks),
        "figures": {name: _finite(figure(analysis)) for name, figure in FIGURES.items()},
        "seconds": _finite(analysis.seconds),
        "ranks": [_rank(rank, origin) for rank in analysis.ranks],
        "collectives": [_collective(kind) for kind in analysis.collectives],
        "fsdp_layers": [_layer(layer) for layer in analysis.fsdp_layers],
        "top_kernels": [_kernel(kernel) for kernel in analysis.top_kernels],
        "gaps": [_gap(gap) for gap in analysis.gaps],
        "straggler": straggler
        and {
            "rank": straggler.rank,
            "median_lag_us": _us(straggler.median_lag),
            "steps_led": straggler.steps_led,
            "steps": straggler.steps,
            "cause": straggler.cause,
        },
        "verdicts": [_verdict(verdict) for verdict in analysis.verdicts],
        "health": [{"rank": health.rank, "message": health.message} for health in analysis.health],
        **({} if difference is None else {"difference": difference_json(difference)}),
    }


def write_json(analysis: Analysis, path: str | Path, difference: Difference | None = None) -> Path:
    """Writes :func:`to_json` to ``path``, whole or not at all.

    Raises:
        UserError: where nothing can be written there.
    """
    return write_text(path, json.dumps(to_json(analysis, difference), indent=1, allow_nan=False) + "\n")


def _us(ns: float | None) -> float | None:
    return None if ns is None or not math.isfinite(ns) else round(float(ns) / 1000, 3)


def _finite(value: float | None) -> float | None:
    """JSON has no word for infinity."""
    return None if value is None or not math.isfinite(value) else float(value)


def _split(split: Split) -> dict[str, Any]:
    causes = split.idle_by_cause
    return {
        "window_us": _us(split.window),
        "compute_us": _us(split.compute),
        "comm_exposed_us": _us(split.comm_exposed),
        "comm_hidden_us": _us(split.comm_hidden),
        "mem_exposed_us": _us(split.mem_exposed),
        "idle_us": _us(split.idle),
        "comm_waiting_us": _us(split.comm_waiting),
        "comm_transfer_us": _us(split.comm_transfer),
        "idle_by_cause": None if causes is None else {cause: _us(time) for cause, time in causes.items()},
        "dataloader_us": _us(split.dataloader),
        "optimizer_us": _us(split.optimizer),
    }


def _step(step: Step, origin: int) -> dict[str, Any]:
    return {
        "step": step.step,
        "start_us": _us(step.start - origin),
        "duration_us": _us(step.duration),
        "lag_us": _us(step.lag),
        "delay_us": _us(step.delay),
        **_split(step.split),
    }


def _rank(rank: Rank, origin: int) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "file": rank.file,
        "host": rank.host,
        "device": rank.device,
        "truncated": rank.truncated,
        "clock_offset_us": _us(rank.clock_offset),
        "clock_error_us": _us(rank.clock_error),
        "clock_applied": rank.clock_applied,
        "steps": [_step(step, origin) for step in rank.steps],
        **_split(rank.split),
        "launch_ahead_us": _us(rank.launch_ahead),
        "kernels": rank.kernels,
    }


def _collective(kind: CollectiveKind) -> dict[str, Any]:
    return {
        "kind": kind.kind,
        "group": kind.group,
        "group_size": kind.group_size,
        "count": kind.count,
        "total_us": _us(kind.total),
        "exposed_us": _us(kind.exposed),
        "hidden_us": _us(kind.hidden),
        "bytes": kind.bytes,
        "bandwidth": _finite(kind.bandwidth),
    }


def _layer(layer: FsdpLayer) -> dict[str, Any]:
    return {
        "layer": layer.layer,
        "count": layer.count,
        "gather_us": _us(layer.gather),
        "hidden_us": _us(layer.hidden),
        "exposed_us": _us(layer.exposed),
        "early": _finite(layer.early),
    }


def _kernel(kernel: Kernel) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "calls": kernel.calls,
        "total_us": _us(kernel.total),
        "mean_us": _us(kernel.mean),
        "p95_us": _us(kernel.p95),
        "share": _finite(kernel.share),
        "slowest_rank": kernel.slowest_rank,
        "slowest_ratio": _finite(kernel.slowest_ratio),
    }


def _gap(gap: Gap) -> dict[str, Any]:
    times = {"rank": gap.rank, "step": gap.step, "duration_us": _us(gap.duration)}
    return {**times, "cause": gap.cause, "op": gap.op}


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "code": verdict.code,
        "severity": verdict.severity,
        "confidence": verdict.confidence,
        "ranks": list(verdict.ranks),
        "steps": list(verdict.steps),
        "message": verdict.message,
        "evidence": verdict.evidence,
        "advice": verdict.advice,
    }
