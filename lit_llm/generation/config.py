"""How to decode: one frozen dataclass, the fields of ``--model.generation.*``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lit_llm.errors import UserError


@dataclass(frozen=True)
class GenerationConfig:
    """Options of decoding. The default is greedy; ``temperature`` above 0 samples.

    The order is: repetition penalty, temperature, top_k, top_p, min_p, draw. Greedy decoding takes the best id after
    the penalty; the filters always keep it, so they change nothing there.

    Args:
        max_new_tokens: most tokens to add to a prompt, at least 1.
        temperature: 0 is greedy; above 0 the logits are divided by it before the draw.
        top_k: draw among the k best ids; null is off, and so is a number above the vocabulary size.
        top_p: draw among the smallest set of best ids whose probabilities sum to at least top_p, in [0, 1]; 0 keeps the
            best id alone, 1 and null are off (Holtzman et al. 2020, section 3.1).
        min_p: draw among ids whose probability is at least min_p times that of the best, in [0, 1]; null is off.
        repetition_penalty: logits of ids in the prompt or generated before are divided by it if positive and multiplied
            if negative, once however often the id occurred; 1 is off (Keskar et al. 2019, section 4.1).
        stop: texts that end a completion; they are cut from its text. Needs a tokenizer.
        eos_token_id: id or ids that end a completion; null means the model's own, [] means none.
        seed: of the draws.

    Raises:
        UserError: a value out of its range; the line names ``generation.`` and the field.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: list[str] | None = None
    eos_token_id: int | list[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._whole("max_new_tokens", low=1)
        self._whole("seed")
        self._real("temperature", "at least 0; 0 is greedy", lambda x: x >= 0)
        self._real("repetition_penalty", "above 0; 1 is off", lambda x: x > 0)
        if self.top_k is not None:
            self._whole("top_k", low=1, off="; null is off")
        for name in ("top_p", "min_p"):
            if getattr(self, name) is not None:
                self._real(name, "in [0, 1]; null is off", lambda x: 0 <= x <= 1)
        if self.stop is not None:
            if not isinstance(self.stop, list | tuple) or not all(isinstance(s, str) and s for s in self.stop):
                raise UserError(f"generation.stop must be a list of non-empty texts or null, got {self.stop!r}")
            self._set("stop", list(self.stop))
        if isinstance(self.eos_token_id, list | tuple):
            self._set("eos_token_id", [_whole("eos_token_id", i, low=0) for i in self.eos_token_id])
        elif self.eos_token_id is not None:
            self._whole("eos_token_id", low=0, off="; null means the model's own, [] means none")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the documented way for a frozen dataclass's own __post_init__

    def _whole(self, name: str, low: int | None = None, off: str = "") -> None:
        self._set(name, _whole(name, getattr(self, name), low, off))

    def _real(self, name: str, range_: str, inside: Callable[[float], bool]) -> None:
        value = _number(getattr(self, name))
        if value is None or not inside(value):
            raise UserError(f"generation.{name} must be a number {range_}; got {getattr(self, name)!r}")
        self._set(name, float(value))


def _number(value: Any) -> int | float | None:
    """A finite number, also out of text: YAML reads 1e-5 as a string. None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, int):
        return value
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _whole(name: str, value: Any, low: int | None = None, off: str = "") -> int:
    number = _number(value)
    if number is None or number != int(number) or (low is not None and number < low):
        least = "" if low is None else f" of at least {low}"
        raise UserError(f"generation.{name} must be a whole number{least}{off}; got {value!r}")
    return int(number)
