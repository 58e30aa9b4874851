"""Which of a run's checkpoints stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Saved:
    """One file that this run, or the one it was resumed from, has written."""

    name: str
    step: int
    score: float | None


@dataclass(frozen=True)
class KeepRule:
    """The last ones, the best ones and those of round steps stay.

    Args:
        last: newest ones; -1: all.
        best: number of those with the best score.
        mode: min or max; whether the best score is the least or the greatest.
        every_n_steps: ones whose step is a multiple; None: none.
    """

    last: int
    best: int
    mode: str
    every_n_steps: int | None

    def kept(self, files: Sequence[Saved]) -> list[Saved]:
        """Those that stay, in the order given, which is that of writing."""
        last = files if self.last == -1 else files[-self.last :]
        best = self.ranked(files)[: self.best]
        return [one for one in files if one in last or one in best or self._is_round(one)]

    def ranked(self, files: Sequence[Saved]) -> list[Saved]:
        """Those with a score, the best first."""
        sign = 1 if self.mode == "min" else -1
        return sorted((one for one in files if one.score is not None), key=lambda one: sign * (one.score or 0.0))

    def _is_round(self, one: Saved) -> bool:
        return self.every_n_steps is not None and one.step % self.every_n_steps == 0
