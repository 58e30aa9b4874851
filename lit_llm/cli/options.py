"""Options of the commands that need no Lightning, and hints for misspelt words."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from lit_llm.errors import UserError


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are UserErrors: one line, no usage text."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"lit-llm {command}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(f"{message}; see `{self.prog} --help`")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """The options, or UserError with the nearest known option for an unknown one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [name for name in self._option_string_actions if name.startswith("--")]
            self.error(f"unknown {unknown[0]!r}; {did_you_mean(unknown[0].partition('=')[0], known)}")
        return parsed


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The nearest of the known words, or all of them when they are few."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1)
    if near:
        return f"did you mean {near[0]}?"
    # A part that is right tells more than the letters: optimizer.learning_rate is near to optimizer.lr.
    head = word.rpartition(".")[0]
    siblings = [known_word for known_word in words if head and known_word.rpartition(".")[0] == head]
    listed = siblings or words
    return f"known are {', '.join(listed)}" if len(listed) <= 20 else "see --help and --print_config"
