"""The difference of two runs as JSON. Field names are a contract with the scripts of users."""

from __future__ import annotations

import math
from typing import Any

from lit_llm.trace.results import Difference, Figure, Verdict


def difference_json(found: Difference) -> dict[str, Any]:
    """``found`` as what :func:`json.dumps` takes.

    A figure is ``{"before", "after", "change"}``; one of time has the suffix ``_us``, is in microseconds a step and has
    also ``change_pct``, ``noise_us`` and ``beyond_noise``. What one of the runs can't tell is None (null).
    """
    return {
        "before": found.before,
        "after": found.after,
        "device": found.device,
        "summary": found.summary,
        "step": _time(found.step),
        "parts": {name: _time(one) for name, one in found.parts.items()},
        "comm_exposed": _time(found.exposed),
        "comm_hidden": _time(found.hidden),
        "ranks": [{"rank": row.rank, "part": row.part, **_time(row.time)} for row in found.ranks],
        "kernels": [
            {
                "name": row.name,
                "name_before": row.name_before,
                "status": row.status,
                "calls": _plain(row.calls),
                "mean": _time(row.mean),
                "total": {**_time(row.total), "beyond_noise": row.clear},
                "at_most_us": _us(row.at_most),
            }
            for row in found.kernels
        ],
        "collectives": [
            {
                "kind": row.kind,
                "count": _plain(row.count),
                "bytes": _plain(row.bytes),
                "total": _time(row.total),
                "exposed": _time(row.exposed),
            }
            for row in found.collectives
        ],
        "fsdp_layers": [
            {
                "layer": row.layer,
                "gather": _time(row.gather),
                "exposed": _time(row.exposed),
                "early": _plain(row.early),
            }
            for row in found.layers
        ],
        "new_verdicts": [_verdict(one) for one in found.new],
        "gone_verdicts": [_verdict(one) for one in found.gone],
        "notes": list(found.notes),
        "method": found.method,
    }


def _us(ns: float | None) -> float | None:
    return None if ns is None or not math.isfinite(ns) else round(ns / 1000, 3)


def _time(one: Figure) -> dict[str, Any]:
    ratio = one.ratio
    return {
        "before_us": _us(one.before),
        "after_us": _us(one.after),
        "change_us": _us(one.change),
        "change_pct": None if ratio is None or not math.isfinite(ratio) else round(100 * ratio, 3),
        "noise_us": _us(one.noise),
        "beyond_noise": one.clear,
    }


def _plain(one: Figure) -> dict[str, Any]:
    values = {"before": one.before, "after": one.after, "change": one.change}
    return {name: None if value is None or not math.isfinite(value) else value for name, value in values.items()}


def _verdict(one: Verdict) -> dict[str, Any]:
    return {"code": one.code, "severity": one.severity, "ranks": list(one.ranks), "message": one.message}
