"""A record (a mapping from a JSON, CSV or Parquet file or a data set) as a text or a conversation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lit_llm.data.document import Conversation, Document, Item
from lit_llm.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
EMPTY_ANSWER = "conversations with an empty answer"
ASIDE = "chats whose record has a text too (--text_key messages takes them)"

_SHAREGPT = {"human": "user", "gpt": "assistant"}
# In the order in which they are looked for: the keys that make a record a conversation.
_CHAT_KEYS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
_EXTRA_KEYS = ("input", "system")


def record_item(
    record: Mapping[str, Any],
    source: str,
    size: int,
    text_key: str,
    skipped: Counter[str],
    *,
    half_characters: bool = False,
) -> Item | None:
    """What ``record`` says; None (counted in ``skipped``) for a conversation in which an answer is blank.

    The first of these that is there counts: the text under ``text_key`` (with ``messages`` beside it these are counted
    in ``skipped``; ``text_key`` may be "messages" itself); ``messages``, a list of
    ``{"role", "content"}``; ``conversations``, the same or ShareGPT's ``{"from", "value"}``; ``prompt`` and
    ``completion`` (each a string, or a list of messages); Alpaca's ``instruction`` and ``output``, with ``input`` put
    below the instruction after a blank line. A ``system`` text beside ``conversations`` or ``instruction`` becomes the
    first turn. Other keys, ``tools`` among them, are not looked at; of a message only role and content are kept.

    Args:
        source: where it stands, for messages.
        size: bytes of input it took.
        half_characters: whether its strings may hold lone surrogates (only JSON escapes can make them); they are
            refused then.

    Raises:
        UserError: no key of the above; a text, role or content that is none; no message or no assistant's turn.
    """
    has_text = record.get(text_key) is not None or (text_key in record and chat_keys(record) is None)
    if has_text and not (text_key == "messages" and isinstance(record[text_key], list)):
        text = record[text_key]
        if text_key != "messages" and isinstance(record.get("messages"), list):
            skipped[ASIDE] += 1
        if not isinstance(text, str):
            raise UserError(f"{source}: {text_key!r} must be text, it is {_kind(text)}; drop the line or mend it")
        if half_characters:
            _check_surrogates(text, source)
        return Document(text, source, size)
    keys = chat_keys(record)
    if keys is None:
        names = ", ".join(map(repr, list(record)[:8])) or "none"
        raise UserError(
            f"{source}: no key {text_key!r}, the keys are {names}; name the right one by --text_key (a chat has "
            "'messages', 'conversations', 'prompt' and 'completion', or 'instruction' and 'output')"
        )
    messages = list(_messages(record, keys, source))
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if not messages:
        raise UserError(f"{source}: {keys[0]!r} holds no message; drop the record")
    if not answers:
        raise UserError(f"{source}: no assistant's turn, so nothing to learn from; add the answer or drop the record")
    if half_characters:
        for message in messages:
            _check_surrogates(message["content"], source)
    if not all(answer.strip() for answer in answers):
        skipped[EMPTY_ANSWER] += 1
        return None
    return Conversation(messages, source, size)


def chat_keys(record: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The keys that make ``record`` a conversation; keys with null, as columns have them, only for want of others."""
    for keys in _CHAT_KEYS:
        if all(record.get(key) is not None for key in keys):
            return keys
    return next((keys for keys in _CHAT_KEYS if all(key in record for key in keys)), None)


def columns(names: Iterable[str], text_key: str) -> list[str]:
    """Those of a table's columns ``names`` that ``record_item`` looks at; all, where it finds nothing in them."""
    names = list(dict.fromkeys(names))
    wanted = {text_key} | {key for keys in _CHAT_KEYS if set(keys) <= set(names) for key in (*keys, *_EXTRA_KEYS)}
    return [name for name in names if name in wanted] or names


def holds_records(value: Any) -> bool:
    """Whether ``value`` is a list of records."""
    return isinstance(value, list) and bool(value) and all(isinstance(record, dict) for record in value)


def is_record(record: Mapping[str, Any], text_key: str) -> bool:
    """Whether ``record`` has the text or the keys of a conversation."""
    return text_key in record or chat_keys(record) is not None


def is_record_key(key: str, text_key: str) -> bool:
    """Whether a record may have the key ``key`` for its text or conversation, or beside it."""
    return key in (text_key, "tools", *_EXTRA_KEYS) or any(key in keys for keys in _CHAT_KEYS)


def _messages(record: Mapping[str, Any], keys: tuple[str, ...], source: str) -> Iterator[dict[str, str]]:
    if keys == ("instruction", "output"):
        user, answer = (_text(record, key, source) for key in keys)
        details = _text(record, "input", source) if record.get("input") is not None else ""
        yield from _system(record, source)
        yield {"role": "user", "content": f"{user}\n\n{details}" if details.strip() else user}
        yield {"role": "assistant", "content": answer}
        return
    if keys == ("prompt", "completion"):
        for key, role in zip(keys, ("user", "assistant"), strict=True):
            if isinstance(record[key], str):
                yield {"role": role, "content": record[key]}
            else:
                yield from _turns(record, key, source, "text or a list of messages")
        return
    turns = _turns(record, keys[0], source, "a list of messages")
    if keys == ("conversations",) and turns and turns[0]["role"] != "system":
        yield from _system(record, source)
    yield from turns


def _system(record: Mapping[str, Any], source: str) -> Iterator[dict[str, str]]:
    if record.get("system") is not None and (text := _text(record, "system", source)).strip():
        yield {"role": "system", "content": text}


def _turns(record: Mapping[str, Any], key: str, source: str, what: str) -> list[dict[str, str]]:
    """The messages under ``key``, with our role names and contents that are text."""
    turns = record[key]
    if not isinstance(turns, list):
        raise UserError(f"{source}: {key!r} must be {what}, it is {_kind(turns)}; drop the record or mend it")
    messages = []
    for number, turn in enumerate(turns, 1):
        where = f"{source}: {key!r}, message {number}"
        if not isinstance(turn, Mapping):
            raise UserError(f"{where} must be an object with 'role' and 'content', it is {_kind(turn)}")
        if turn.get("role") is not None or "from" not in turn:
            role, content_key = turn.get("role"), "content"
        else:
            role, content_key = turn["from"], "value"
            role = _SHAREGPT.get(role, role) if isinstance(role, str) else role
        if role not in ROLES:
            said = "no role" if role is None else f"unknown role {role!r}"
            raise UserError(f"{where}: {said}; known are {', '.join(ROLES)}: rename it or drop the record")
        content = turn.get(content_key)
        if content is None and role == "assistant" and turn.get("tool_calls"):
            content = ""  # it calls a tool and says nothing
        messages.append({"role": role, "content": _content(content, f"{where}: {content_key!r}")})
    return messages


def _content(content: Any, where: str) -> str:
    """A message's text; its parts are joined where it comes in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where} must be text, it is {_kind(content)}; drop the record or mend it")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            said = "no text" if kind in (None, "text") else f"of type {kind!r}"
            raise UserError(f"{where} has a part that is {said}; only text can be learnt, so drop the record")
        texts.append(part["text"])
    return "".join(texts)


def _text(record: Mapping[str, Any], key: str, source: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise UserError(f"{source}: {key!r} must be text, it is {_kind(value)}; drop the record or mend it")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _check_surrogates(text: str, source: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{source}: half a surrogate pair (\\u{ord(text[error.start]):04x}) is no text") from error
