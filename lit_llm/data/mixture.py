"""Which source each sample of a mixture comes from: a schedule that is never a whole sample off its proportions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property

import numpy as np

from lit_llm.errors import UserError

MAX_PERIOD = 1 << 20


class Mixture:
    """Deals samples to sources in proportion to their weights, by a fixed schedule with random access.

    At every prefix of n samples the count of source k is strictly less than one sample away from w_k x n, however many
    sources there are. That such a schedule exists is Tijdeman's theorem (1980, The chairman assignment problem): sample
    j of a source (from 1 on) may come at the earliest at place floor((j - 1) / w_k) + 1 and must come by
    ceil(j / w_k), and giving each place to the source that may take it and whose deadline is nearest meets them all.

    The weights are taken as the decimal numbers that are written (0.3 is 3/10) and become whole numbers without a
    common divisor; the schedule repeats after their sum, the period. Where that would be above ``MAX_PERIOD``
    (2**20), they are rounded to shares of 1/2**20, none below one share: the counts are then within two samples of the
    weights' proportions over the first million samples, and within one part in a million of all samples later (a
    source lighter than one share gets one share).

    Args:
        weights: a number, or text such as ``"1/3"``, above 0 for each source; their sum is free.
        names: what the sources are called in messages; their numbers if None.

    Raises:
        UserError: no source, or a weight that is no finite number above 0.
    """

    def __init__(self, weights: Sequence[float | str | Fraction], names: Sequence[str] | None = None) -> None:
        if not len(weights):
            raise UserError("a mixture needs at least one store; give one or more, each with a weight")
        names = [str(number) for number in range(len(weights))] if names is None else names
        exact = [_exact(weight, name) for weight, name in zip(weights, names, strict=True)]
        self._shares = np.array(_whole_numbers(exact), dtype=np.int64)

    @property
    def period(self) -> int:
        """Samples after which the schedule repeats."""
        return int(self._shares.sum())

    @property
    def shares(self) -> np.ndarray:
        """(sources,) int64: samples of each source in a period."""
        return self._shares.copy()

    def source_of(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the samples at some places of the mixture come from.

        Args:
            indices: (n,) places, from 0 to 2**62.

        Returns:
            (n,) int64 numbers of sources, and (n,) int64 places within each one's own sequence, counted from 0.
        """
        sources, within = self._schedule
        periods, places = np.divmod(np.asarray(indices, dtype=np.int64), self.period)
        chosen = sources[places].astype(np.int64)
        return chosen, periods * self._shares[chosen] + within[places]

    def counts(self, n: int) -> np.ndarray:
        """(sources,) int64: how many of the first ``n`` samples come from each source; n at most 2**62."""
        periods, places = divmod(int(n), self.period)
        rest = np.bincount(self._schedule[0][:places], minlength=len(self._shares)) if places else 0
        return self._shares * periods + rest

    @cached_property
    def _schedule(self) -> tuple[np.ndarray, np.ndarray]:
        """One period: (period,) source at each place, and the same source's samples before it, int32."""
        shares, period = self._shares, self.period
        sources = np.repeat(np.arange(len(shares)), shares)
        earlier = np.arange(period) - np.repeat(np.cumsum(shares) - shares, shares)  # j - 1
        share = shares[sources]
        release = earlier * period // share
        deadline = -(-(earlier + 1) * period // share)
        # One number says which goes first: the nearest deadline, then the lower source.
        urgency = deadline * len(shares) + sources
        order = np.argsort(release, kind="stable")
        waiting: list[int] = []
        urgencies = urgency[order].tolist()
        arrived = np.searchsorted(release[order], np.arange(period), side="right").tolist()
        dealt, first = [], 0
        for last in arrived:
            for number in range(first, last):
                heapq.heappush(waiting, urgencies[number])
            dealt.append(heapq.heappop(waiting))
            first = last
        schedule = np.array(dealt, dtype=np.int64) % len(shares)
        within = np.empty(period, dtype=np.int32)
        within[np.argsort(schedule, kind="stable")] = earlier
        return schedule.astype(np.int32), within


def _exact(weight: float | str | Fraction, name: str) -> Fraction:
    try:
        exact = Fraction(str(weight))
    except (ValueError, ZeroDivisionError):  # nan, inf, words
        exact = Fraction(0)
    if exact <= 0 or isinstance(weight, bool):
        raise UserError(
            f"the weight of store {name} is {weight}; weights are finite numbers above 0, leave the store out if it is "
            "not wanted"
        )
    return exact


def _whole_numbers(weights: Sequence[Fraction]) -> list[int]:
    """The weights as whole numbers with a sum of at most MAX_PERIOD."""
    scale = math.lcm(*(weight.denominator for weight in weights))
    numbers = [int(weight * scale) for weight in weights]
    divisor = math.gcd(*numbers)
    numbers = [number // divisor for number in numbers]
    total = sum(numbers)
    if total <= MAX_PERIOD:
        return numbers
    if len(numbers) > MAX_PERIOD // 2:
        raise UserError(f"{len(numbers)} stores are too many to mix, at most {MAX_PERIOD // 2}")
    # Largest remainders first; what the smallest got too much is taken from the largest.
    shares = [max(1, number * MAX_PERIOD // total) for number in numbers]
    by_remainder = sorted(range(len(numbers)), key=lambda k: -(numbers[k] * MAX_PERIOD % total))
    missing = MAX_PERIOD - sum(shares)
    for k in [k for k in by_remainder if numbers[k] * MAX_PERIOD >= total][: max(missing, 0)]:
        shares[k] += 1
    while sum(shares) > MAX_PERIOD:
        shares[shares.index(max(shares))] -= 1
    return shares
