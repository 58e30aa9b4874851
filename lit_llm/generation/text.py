"""Text out of tokens, piece by piece, equal to decoding them all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_RARE = "\U0010fffd"  # a private-use character that no vocabulary holds: it encodes to bare bytes, if the tokenizer can


class TextTokenizer(Protocol):
    """What generation needs of a tokenizer; `lit_llm.data.Tokenizer` is one."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        ...


class TextStream:
    """Turns the tokens of one completion into pieces of text that join to ``tokenizer.decode`` of them all.

    A token cannot be decoded alone: it may lose its leading space or be part of a character. So a short window of
    tokens is decoded twice, with and without the new one, and the difference handed on. Held back until later tokens
    settle it: an unfinished character; with byte-fallback vocabularies (Llama 2, Mistral v1) a run of byte tokens, as
    one bad byte turns all of the run into replacement marks; and what may be the beginning of a stop text.

    Args:
        tokenizer: has ``encode`` and ``decode``.
        stop: texts that end the completion; the first to be complete is cut off with all that follows.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._size: int | None = getattr(tokenizer, "vocab_size", None)
        self._stop = tuple(stop)
        self._window: list[int] = []
        self._known = 0  # characters of the window's text that are settled already
        self._pending = ""  # settled, but perhaps the beginning of a stop text
        self._settles: dict[int, bool] = {}
        self._in_run = False
        try:
            rare = tokenizer.encode(_RARE)
        except Exception:  # a vocabulary of whole words without one for the unknown: it has no bytes either
            rare = []
        bare = [i for i in rare if self._decode([i]) == _REPLACEMENT]
        self._bad_byte: int | None = None  # set where a bad byte spoils those before it
        if bare and not self._decode([*bare, bare[-1]]).startswith(_RARE):
            self._bad_byte = bare[-1]
        self.text = ""  # all pieces so far
        self.stopped = False  # a stop text has occurred

    def push(self, token: int) -> str:
        """Takes the next token and returns the text that is certain by now, often empty."""
        assert not self.stopped
        self._window.append(token)
        decoded = self._decode(self._window)
        tail = self._pending + decoded[self._known :]
        cut = min((at for at in map(tail.find, self._stop) if at >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            return self._hand_on(tail[:cut])
        if decoded.endswith(_REPLACEMENT) or not self._settled_by(token):
            return ""
        if len(decoded) > self._known:
            # What a decoder does to the first token of a text, such as dropping its space, then falls on a token that
            # is settled, both times it is decoded.
            self._window = [token]
            self._known = len(self._decode(self._window))
        keep = len(tail) - _overlap(tail, self._stop)
        self._pending = tail[keep:]
        return self._hand_on(tail[:keep])

    def finish(self) -> str:
        """The rest, as ``decode`` gives it, once no more tokens come. Empty after a stop text."""
        if self.stopped:
            return ""
        rest = self._pending + self._decode(self._window)[self._known :]
        self._window, self._known, self._pending = [], 0, ""
        return self._hand_on(rest)

    def _decode(self, ids: Sequence[int]) -> str:
        # A model may have more ids than its tokenizer, which stand for no text.
        known = ids if self._size is None else [i for i in ids if i < self._size]
        return self._tokenizer.decode(known, skip_special_tokens=True)

    def _hand_on(self, piece: str) -> str:
        self.text += piece
        return piece

    def _settled_by(self, token: int) -> bool:
        """Whether all text so far stays as it is when a bad byte comes next."""
        if self._bad_byte is None:
            return True
        if token not in self._settles:
            self._settles[token] = self._decode([token, self._bad_byte]).count(_REPLACEMENT) == 1
        # A token without text, such as a special one, does not end a run of bytes.
        self._in_run = not self._settles[token] or (self._in_run and not self._decode([token]))
        return not self._in_run


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that a stop text begins with."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
