"""What became of kernels, collectives and FSDP layers, whose totals a trace has, between two runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from lit_llm.trace.results import (
    Analysis,
    CollectiveChange,
    Figure,
    Kernel,
    KernelChange,
    LayerChange,
)

_NUMBER = re.compile(r"\d+")
_NEW = 0.01
"""A kernel that the other run does not list is new or gone if it can have taken at most this share there."""

Noise = Callable[[float | None, float | None], float | None]
Side = tuple[Analysis, int]


def compare_kernels(before: Side, after: Side, noise: Noise) -> list[KernelChange]:
    """The largest changes of time first.

    Kernels are matched by name; those that are left by the name with its numbers left out, then also without what
    stands in brackets: autotuned and generated kernels are named anew each time.

    Args:
        before: a run, and the steps of all its ranks.
        after: the other.
        noise: of two totals, a step and rank.
    """
    (first, steps_before), (second, steps_after) = before, after
    left, right = list(first.top_kernels), list(second.top_kernels)
    found: list[KernelChange] = []
    for key in (lambda name: name, without_numbers, without_arguments):
        olds, news = _by(left, key), _by(right, key)
        for name in [one for one in news if one in olds]:
            old, new = olds[name], news[name]
            left = [one for one in left if one not in old]
            right = [one for one in right if one not in new]
            found.append(_pair(old, steps_before, new, steps_after))
    for kernels, status, bound, many in (
        (left, "gone", _unlisted(second.top_kernels) / steps_after, steps_before),
        (right, "new", _unlisted(first.top_kernels) / steps_before, steps_after),
    ):
        found += [_single(one, many, bound, status) for one in kernels]  # type: ignore[arg-type]
    for change in found:
        change.total.noise = noise(change.total.before, change.total.after)
    return sorted(found, key=lambda one: (-abs(one.change), one.name))


def without_numbers(name: str) -> str:
    """``name`` with one sign for each number."""
    return _NUMBER.sub("#", name)


def without_arguments(name: str) -> str:
    """``name`` without numbers, template arguments and parameters.

    Not of PyTorch's own kernels (``at::native``): their template arguments say what they compute.
    """
    if "at::native" in name:
        return without_numbers(name)
    kept, depth, last = [], 0, ""
    for letter in name:
        if letter in "<(":
            depth += 1
        elif letter in ">)" and not (letter == ">" and last == "-"):
            depth = max(depth - 1, 0)
        elif depth == 0:
            kept.append(letter)
        last = letter
    return without_numbers("".join(kept)).strip() or without_numbers(name)


def _by(kernels: Sequence[Kernel], key: Callable[[str], str]) -> dict[str, list[Kernel]]:
    found: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        found.setdefault(key(kernel.name), []).append(kernel)
    return found


def _unlisted(kernels: Sequence[Kernel]) -> float:
    """The most that a kernel which is not listed can have taken: the list is of the longest, and shares are of all."""
    if not kernels:
        return 0.0
    shortest = min(kernels, key=lambda one: one.total)
    longest = max(kernels, key=lambda one: one.total)
    rest = max(1.0 - sum(one.share for one in kernels), 0.0)
    whole = longest.total / longest.share if longest.share > 0 else 0.0
    # Shares are floats: what is left of them is not to be taken for a kernel.
    return 0.0 if rest < 1e-9 else min(float(shortest.total), rest * whole)


def _pair(old: Sequence[Kernel], steps_before: int, new: Sequence[Kernel], steps_after: int) -> KernelChange:
    name = max(new, key=lambda one: one.total).name
    earlier = max(old, key=lambda one: one.total).name
    calls, total = [], []
    for kernels, many in ((old, steps_before), (new, steps_after)):
        calls.append(sum(one.calls for one in kernels) / many)
        total.append(sum(one.total for one in kernels) / many)
    means = Figure(*(took / count if count else None for took, count in zip(total, calls, strict=True)))
    same = len(old) == len(new) == 1 and name == earlier
    change = KernelChange(name, "same" if same else "alike", Figure(*calls), means, Figure(*total))
    change.name_before = None if name == earlier else earlier
    return change


def _single(kernel: Kernel, many: int, bound: float, status: Literal["new", "gone"]) -> KernelChange:
    total = kernel.total / many
    values = (kernel.calls / many, kernel.mean, total)
    calls, mean, took = (Figure(None, one) if status == "new" else Figure(one, None) for one in values)
    certain = bound <= _NEW * total
    return KernelChange(kernel.name, status if certain else "unlisted", calls, mean, took, at_most=bound)


def compare_collectives(before: Side, after: Side, noise: Noise, spread: float | None) -> list[CollectiveChange]:
    """By kind, the largest change of what is exposed first.

    Args:
        before: a run, and the steps of all its ranks.
        after: the other.
        noise: of two totals, a step and rank.
        spread: of exposed communication between steps; None: not known.
    """
    found = []
    for kind in dict.fromkeys(row.kind for analysis, _ in (after, before) for row in analysis.collectives):
        one, two = (_of_kind(side, kind) for side in (before, after))
        row = CollectiveChange(kind, *(Figure(one[name], two[name]) for name in ("count", "bytes", "total", "exposed")))
        for time in (row.total, row.exposed):
            least = noise(time.before, time.after)
            time.noise = None if least is None or spread is None else max(least, spread)
        found.append(row)
    return sorted(found, key=lambda row: -abs((row.exposed.after or 0) - (row.exposed.before or 0)))


def _of_kind(side: Side, kind: str) -> dict[str, float | None]:
    """A step and rank. A collective counts once for all its ranks, its bytes are of one of them."""
    analysis, many = side
    rows = [row for row in analysis.collectives if row.kind == kind]
    if not rows:
        return dict.fromkeys(("count", "bytes", "total", "exposed"))
    sizes = [min(row.group_size or len(analysis.ranks), len(analysis.ranks)) for row in rows]
    moved = [row.bytes * size for row, size in zip(rows, sizes, strict=True) if row.bytes is not None]
    return {
        "count": sum(row.count * size for row, size in zip(rows, sizes, strict=True)) / many,
        "bytes": sum(moved) / many if len(moved) == len(rows) else None,
        "total": sum(row.total for row in rows) / many,
        "exposed": sum(row.exposed for row in rows) / many,
    }


def compare_layers(before: Side, after: Side, noise: Noise) -> list[LayerChange]:
    """In their order in the run after.

    Args:
        before: a run, and the steps of all its ranks.
        after: the other.
        noise: of two totals, a step and rank.
    """
    rows = [{row.layer: row for row in analysis.fsdp_layers} for analysis, _ in (before, after)]
    found = []
    for layer in dict.fromkeys([*rows[1], *rows[0]]):
        gathers, bare, early = [], [], []
        for of_run, (_, many) in zip(rows, (before, after), strict=True):
            row = of_run.get(layer)
            gathers.append(None if row is None else row.gather / many)
            bare.append(None if row is None else row.exposed / many)
            early.append(None if row is None else row.early)
        least = noise(*gathers)
        times = Figure(gathers[0], gathers[1], least), Figure(bare[0], bare[1], least)
        found.append(LayerChange(layer, *times, Figure(*early)))
    return found
