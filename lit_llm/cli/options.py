"""Options of the commands that need no Lightning, and hints for misspelt words."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from lit_llm.errors import UserError


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are UserErrors: one line, no usage text."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"lit-llm {command}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(f"{message}; see `{self.prog} --help`")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The options, or UserError with the nearest known option for an unknown one."""
        parsed, unknown = self.parse_known_args(words)
        if unknown:
            known = [name for name in self._option_string_actions if name.startswith("--")]
            self.error(f"unknown {unknown[0]!r}; {did_you_mean(unknown[0].partition('=')[0], known)}")
        return parsed


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The nearest of the known words, or all of them when they are few.

    Of dotted words those that differ in the last part only count first.
    """
    words = list(known)
    head, dot, last = word.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in words if dot and name.rpartition(".")[0] == head}
    near = difflib.get_close_matches(last, siblings, n=1)
    if near:
        return f"did you mean {siblings[near[0]]}?"
    listed = list(siblings.values()) or words
    near = difflib.get_close_matches(word, words, n=1) if not siblings else []
    if near:
        return f"did you mean {near[0]}?"
    return f"known are {', '.join(listed)}" if len(listed) <= 20 else "see --help and --print_config"
