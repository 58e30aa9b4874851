"""What a chat template writes, told apart: its own text, what users say, what the assistant says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from functools import cached_property
from typing import Any

from lit_llm.data.chat import render_chat
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError

Messages = Sequence[Mapping[str, Any]]

# Stands for the content of message %d where a template is tried out: private characters, which no template asks for.
_MARK = "\ue0f8%d\ue0f9"
_MARKS = re.compile("\ue0f8([0-9]+)\ue0f9")
_KEPT = 4096  # layouts of a tokenizer


class Kind(Enum):
    TEMPLATE = auto()  # written by the template: its control tokens are such
    ASIDE = auto()  # the same, between the prompt and the answer: no token reaches into it from the prompt
    SAID = auto()  # by the user or the system
    ANSWER = auto()
    END = auto()  # of an answer: text
    END_TOKEN = auto()


Run = tuple[Kind, str]


@dataclass(frozen=True, slots=True)
class Part:
    """A content in the text that a template makes of some roles, with what stands before it."""

    before: str
    index: int  # of the message
    answer: bool
    border: int  # how much of ``before`` belongs to the prompt, for an answer
    end: str = ""  # of an answer: what ends it, other than a control token
    end_token: str = ""

    def end_runs(self) -> list[Run]:
        return [(Kind.END, self.end), (Kind.END_TOKEN, self.end_token)]


@dataclass(frozen=True, slots=True)
class Layout:
    """The text that a template makes of some roles, whatever is said."""

    parts: tuple[Part, ...]
    last: str  # what stands behind the last content
    keep: int  # how much of ``last`` belongs to a whole conversation


_Pieces = tuple[list[tuple[str, int]], str]  # (what stands before, message's number) of each content, what comes last


class ChatTemplate:
    """A tokenizer's template and what is known of it. It must not hold the tokenizer, which is its key."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.template = tokenizer.chat_template
        self.tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token} | _other_tokens(tokenizer)
        self.control = {
            token.content: i for i, token in tokenizer._backend.get_added_tokens_decoder().items() if token.special
        }
        # the longest first, as the tokenizers library reads them
        names = sorted(self.control, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, names)) if names else "(?!)")
        self._layouts: dict[str, Layout | None] = {}
        self._tails: dict[str, tuple[int, str | None]] = {}
        self._literals: dict[str, int] = {}

    def render(self, messages: Messages, header: bool) -> str:
        return render_chat(messages, self.template, add_generation_prompt=header, **self.tokens)

    @cached_property
    def dated(self) -> bool:
        return self.template is not None and "strftime_now" in self.template

    def literal_tokens(self, text: str) -> int:
        """How many control tokens the template's own text holds."""
        if text not in self._literals:
            if len(self._literals) >= _KEPT:
                self._literals.clear()
            self._literals[text] = len(self.pattern.findall(text))
        return self._literals[text]

    def layout(self, messages: Messages, header: bool) -> Layout | None:
        """The layout of these roles; None if a content of the assistant does not stand in it exactly once."""
        key = self._key(messages, header)
        if key not in self._layouts:
            if len(self._layouts) >= _KEPT:
                self._layouts.clear()
            self._layouts[key] = self._find_layout(messages, header)
        return self._layouts[key]

    def _key(self, messages: Messages, header: bool) -> str:
        """All that the template's own text depends on."""
        day = f"{datetime.now().date()}\0" if self.dated else ""
        if all(len(message) == 2 and isinstance(message["content"], str) for message in messages):
            turns = "\0".join(m["role"] + ("\1" + m["content"] if _kept(m) else "") for m in messages)
        else:
            turns = repr([_marked(i, message) for i, message in enumerate(messages)])
        return f"{header}\0{day}{turns}"

    def _find_layout(self, messages: Messages, header: bool) -> Layout | None:
        pieces = self._pieces(messages, header)
        if pieces is None:
            return None
        found, last = pieces
        places = [index for _, index in found]
        if any(m["role"] == "assistant" and places.count(i) != 1 for i, m in enumerate(messages)):
            return None
        ignores_header = self._pieces(messages, True) == self._pieces(messages, False)
        parts: list[Part] = []
        keep = len(last)
        for number, (before, index) in enumerate(found):
            if messages[index]["role"] != "assistant":
                parts.append(Part(before, index, answer=False, border=len(before)))
                continue
            prompt = self._tail(messages[:index], True)
            border = len(prompt) if prompt is not None and before.startswith(prompt) else len(before)
            after = found[number + 1][0] if number + 1 < len(found) else last
            tail = self._tail(messages[: index + 1], False, index)
            tail = after if tail is None else tail
            if ignores_header and prompt == before and not self.pattern.search(tail):
                tail = self._without_header(messages[: index + 1], tail)
            end, token = self._end(tail, after, final=number + 1 == len(found) and not header)
            parts.append(Part(before, index, True, border, end, token))
            if number + 1 == len(found) and index + 1 == len(messages):
                rest = after[len(end) + len(token) :]
                # a template that asks for the next answer though it was not told to
                unwanted = ignores_header and rest.strip() and prompt is not None and prompt.endswith(rest)
                keep = len(end) + len(token) + (0 if unwanted else len(rest.rstrip()))
        if not parts or not parts[-1].answer:
            keep = len(last.rstrip())
        return Layout(tuple(parts), last, keep)

    def _pieces(self, messages: Messages, header: bool) -> _Pieces | None:
        try:
            text = self.render([_marked(i, message) for i, message in enumerate(messages)], header)
        except UserError:
            return None  # it fails on these roles, or on contents that say nothing
        *found, last = _MARKS.split(text)
        return list(zip(found[::2], map(int, found[1::2]), strict=True)), last

    def _tail(self, messages: Messages, header: bool, index: int | None = None) -> str | None:
        """What the template writes behind the last content (which must be that of message ``index``)."""
        if not messages:
            return None
        key = self._key(messages, header)
        if key not in self._tails:
            if len(self._tails) >= _KEPT:
                self._tails.clear()
            pieces = self._pieces(messages, header)
            self._tails[key] = (pieces[0][-1][1], pieces[1]) if pieces and pieces[0] else (-1, None)
        last, tail = self._tails[key]
        return tail if index in (None, last) else None

    def _without_header(self, messages: Messages, tail: str) -> str:
        """``tail`` less what asks for the next answer, where a template writes that always: what stands behind an
        answer if a question follows, too."""
        follows = self._pieces([*messages, {"role": "user", "content": "."}], False)
        if follows is None or not follows[0] or follows[0][-1][1] != len(messages):
            return tail
        follow = follows[0][-1][0]
        return tail[: next((n for n, (a, b) in enumerate(zip(tail, follow, strict=False)) if a != b), len(follow))]

    def _end(self, tail: str, after: str, final: bool) -> tuple[str, str]:
        """The text and the control token with which an answer ends.

        ``tail`` is what the template writes if nothing follows, ``after`` what stands there in the conversation.
        """
        token = self.pattern.search(tail)
        if token:
            end = tail[: token.start()], token[0]
        else:
            end = tail.rstrip() or ("" if final else tail), ""
        return end if after.startswith("".join(end)) else ("", "")


def _kept(message: Mapping[str, Any]) -> bool:
    """Whether a content stays as it is where a template is tried out: templates treat what is empty in its own way."""
    content = message["content"]
    return not isinstance(content, str) or not (message["role"] == "assistant" or content.strip())


def _marked(index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    return message if _kept(message) else {**message, "content": _MARK % index}


def _other_tokens(tokenizer: Tokenizer) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("pad_token", "unk_token"):
        entry = tokenizer._config.get(name)
        entry = entry.get("content") if isinstance(entry, dict) else entry
        found[name] = entry if isinstance(entry, str) else None
    return found
