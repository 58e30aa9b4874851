"""Prompts for predict: a list, or a file of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_llm.data.records import ROLES
from lit_llm.errors import UserError

Prompt = str | list[dict[str, str]]


def read_prompts(prompts: Sequence[str] | None, prompts_file: str | None) -> list[Prompt]:
    """All prompts, in order: a string, or a chat as a list of messages.

    Args:
        prompts: given one by one.
        prompts_file: .txt with a prompt a line, or .jsonl with ``{"prompt": ...}`` or ``{"messages": [...]}`` a line.

    Raises:
        UserError: none given, both given, or a bad file or line, by name and number.
    """
    if prompts is not None and prompts_file is not None:
        raise UserError("give data.prompts or data.prompts_file, not both")
    if prompts_file is not None:
        found = list(_read_file(Path(prompts_file)))
        if not found:
            raise UserError(f"{prompts_file} holds no prompt; write one a line")
        return found
    if not prompts:
        raise UserError("predict needs prompts: give data.prompts (a list) or data.prompts_file (.txt or .jsonl)")
    return list(prompts)


def _read_file(path: Path) -> Iterator[Prompt]:
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"data.prompts_file {path}: the name must end in .txt (a prompt a line) or .jsonl")
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(f"data.prompts_file {path} can't be read: {error.strerror}") from None
    for number, raw in enumerate(lines, 1):
        raw = raw.removesuffix(b"\r")
        if not raw.strip():
            continue
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{path}:{number} is not valid UTF-8; save the file as UTF-8") from None
        yield line if path.suffix == ".txt" else _from_json(line, f"{path}:{number}")


def _from_json(line: str, place: str) -> Prompt:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not JSON ({error.msg}); write one object a line") from None
    if isinstance(record, dict):
        if isinstance(record.get("prompt"), str):
            return record["prompt"]
        messages = record.get("messages")
        if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
            _check_turns(messages, place)
            return messages
    raise UserError(f'{place} has neither "prompt" (a text) nor "messages" (a list of {{"role", "content"}} objects)')


def _check_turns(messages: list[dict[str, str]], place: str) -> None:
    for number, message in enumerate(messages, 1):
        if message["role"] not in ROLES:
            raise UserError(
                f"{place}: message {number} has the unknown role {message['role']!r}; known are {', '.join(ROLES)}"
            )
    if messages[-1]["role"] == "assistant":
        raise UserError(f"{place} ends with the assistant's turn, which is what is asked for: leave that one out")


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
    )
