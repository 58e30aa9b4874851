"""A record as a text or a conversation: every form, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lit_llm.data.document import Conversation, Document
from lit_llm.data.records import ASIDE, EMPTY_ANSWER, columns, record_item
from lit_llm.errors import UserError

Turns = list[tuple[str, str]]


def turns(record: dict[str, Any], text_key: str = "text") -> Turns:
    item = record_item(record, "f:3", 7, text_key, Counter())
    assert isinstance(item, Conversation)
    assert (item.source, item.size) == ("f:3", 7)
    assert all(message.keys() == {"role", "content"} for message in item.messages)
    return [(message["role"], message["content"]) for message in item.messages]


def said(*messages: tuple[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, **more} for role, content in messages]


QA = said(("user", "q"), ("assistant", "a"))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": QA, "tools": [{"name": "t"}], "id": 1}, [("user", "q"), ("assistant", "a")]),
        (
            {"messages": said(("system", "s"), ("user", "q"), ("assistant", "a"), ("tool", "t"), ("assistant", "b"))},
            [("system", "s"), ("user", "q"), ("assistant", "a"), ("tool", "t"), ("assistant", "b")],
        ),
        ({"messages": said(("assistant", "first"), ("user", "q"))}, [("assistant", "first"), ("user", "q")]),
        ({"messages": said(("developer", ""), ("assistant", "a"))}, [("developer", ""), ("assistant", "a")]),
        (
            {
                "messages": said(
                    ("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}])
                )
                + said(("assistant", "c"))
            },
            [("user", "ab"), ("assistant", "c")],
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
            [("system", "s"), ("user", "q"), ("assistant", "a")],
        ),
        (
            {"conversations": [{"from": "system", "value": "own"}, {"from": "gpt", "value": "a"}], "system": "s"},
            [("system", "own"), ("assistant", "a")],
        ),
        ({"conversations": QA}, [("user", "q"), ("assistant", "a")]),
        ({"prompt": "q", "completion": " a", "system": "not looked at"}, [("user", "q"), ("assistant", " a")]),
        (
            {"prompt": said(("system", "s"), ("user", "q")), "completion": said(("assistant", "a"))},
            [("system", "s"), ("user", "q"), ("assistant", "a")],
        ),
        ({"prompt": said(("user", "q")), "completion": "a"}, [("user", "q"), ("assistant", "a")]),
        ({"instruction": "do", "output": "done"}, [("user", "do"), ("assistant", "done")]),
        ({"instruction": "do", "input": " \n", "output": "done"}, [("user", "do"), ("assistant", "done")]),
        ({"instruction": "do", "input": None, "output": "done"}, [("user", "do"), ("assistant", "done")]),
        (
            {"instruction": "do", "input": "this", "output": "done", "system": "s"},
            [("system", "s"), ("user", "do\n\nthis"), ("assistant", "done")],
        ),
        # one form wins over another, a key with null (a column that other rows fill) over none
        ({"messages": QA, "prompt": "x", "completion": "y"}, [("user", "q"), ("assistant", "a")]),
        ({"messages": None, "prompt": "x", "completion": "y"}, [("user", "x"), ("assistant", "y")]),
    ],
)
def test_conversations(record: dict[str, Any], expected: Turns) -> None:
    assert turns(record) == expected


def test_text_wins_over_a_conversation() -> None:
    record = {"text": "t", "body": "b", "messages": QA}
    assert record_item(record, "f:1", 3, "text", Counter()) == Document("t", "f:1", 3)
    assert record_item(record, "f:1", 3, "body", Counter()) == Document("b", "f:1", 3)
    assert turns(record, text_key="gone") == [("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "no key 'text', the keys are none"),
        ({"prompt": "q", "id": 1}, "no key 'text', the keys are 'prompt', 'id'; name the right one by --text_key"),
        ({"text": None, "id": 1}, "'text' must be text, it is null"),
        ({"text": b"x"}, "'text' must be text, it is of type bytes"),
        ({"messages": None}, "'messages' must be a list of messages, it is null"),
        ({"messages": "[]"}, "'messages' must be a list of messages, it is of type str"),
        ({"messages": []}, "'messages' holds no message"),
        ({"messages": said(("user", "q"))}, "no assistant's turn"),
        ({"prompt": said(("user", "q")), "completion": []}, "no assistant's turn"),
        ({"messages": [*QA, "x"]}, "'messages', message 3 must be an object .* of type str"),
        ({"messages": said(("bot", "q"))}, "message 1: unknown role 'bot'; known are system, developer, user, assist"),
        ({"messages": said(("User", "q"))}, "unknown role 'User'"),
        ({"messages": [{"content": "q"}]}, "message 1: no role; known are"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, r"unknown role \['user'\]"),
        ({"conversations": [{"from": "observation", "value": "q"}]}, "unknown role 'observation'"),
        ({"conversations": [{"from": ["x"], "value": "q"}]}, r"unknown role \['x'\]"),
        ({"messages": said(("user", None))}, "message 1: 'content' must be text, it is null"),
        ({"messages": [{"role": "user"}]}, "message 1: 'content' must be text, it is null"),
        ({"messages": said(("user", 5))}, "message 1: 'content' must be text, it is of type int"),
        ({"messages": said(("user", [{"type": "image", "image": "x"}]))}, "a part that is of type 'image'; only text"),
        ({"messages": said(("user", ["x"]))}, "a part that is no text"),
        ({"messages": said(("user", [{"type": "text"}]))}, "a part that is no text"),
        ({"conversations": [{"from": "human", "value": {}}]}, "message 1: 'value' must be text, it is of type dict"),
        ({"prompt": 1, "completion": "a"}, "'prompt' must be text or a list of messages, it is of type int"),
        ({"prompt": "q", "completion": None}, "'completion' must be text or a list of messages, it is null"),
        ({"instruction": "do", "output": None}, "'output' must be text, it is null"),
        ({"instruction": "do", "output": "x", "input": ["y"]}, "'input' must be text, it is of type list"),
        ({"instruction": "do", "output": "x", "system": 1}, "'system' must be text, it is of type int"),
    ],
)
def test_what_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        record_item(record, "a.jsonl:9", 1, "text", Counter())
    assert str(error.value).startswith("a.jsonl:9: ")
    assert "\n" not in str(error.value)


def test_null_texts_give_way_to_chats() -> None:
    skipped: Counter[str] = Counter()
    chat = record_item({"text": None, "messages": QA}, "f", 1, "text", skipped)
    assert isinstance(chat, Conversation)
    assert not skipped
    assert isinstance(record_item({"text": "a", "messages": QA}, "f", 1, "text", skipped), Document)
    assert skipped == {ASIDE: 1}
    assert isinstance(record_item({"text": "a", "messages": QA}, "f", 1, "messages", skipped), Conversation)


def test_a_call_of_a_tool_is_an_empty_answer() -> None:
    skipped: Counter[str] = Counter()
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    assert record_item({"messages": [*said(("user", "q")), call]}, "f", 1, "text", skipped) is None
    assert skipped == {EMPTY_ANSWER: 1}


def test_blank_answers_are_counted() -> None:
    skipped: Counter[str] = Counter()
    for answer in ("", " \n", []):
        assert record_item({"messages": said(("user", "q"), ("assistant", answer))}, "f", 1, "text", skipped) is None
    assert record_item({"messages": QA + said(("assistant", ""))}, "f", 1, "text", skipped) is None
    assert record_item({"messages": said(("user", ""), ("assistant", "a"))}, "f", 1, "text", skipped) is not None
    assert skipped == {EMPTY_ANSWER: 4}


@pytest.mark.parametrize("record", [{"text": "a\ud83d"}, {"prompt": "q\ude42", "completion": "a"}])
def test_half_characters_are_refused(record: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"f:1: half a surrogate pair \(.ud"):
        record_item(record, "f:1", 1, "text", Counter(), half_characters=True)


def test_columns_that_are_read() -> None:
    assert columns(["id", "text", "messages"], "text") == ["text", "messages"]
    assert columns(["id", "text"], "text") == ["text"]
    assert columns(["id", "body", "messages", "prompt"], "text") == ["messages"]
    assert columns(["output", "id", "input", "instruction"], "text") == ["output", "input", "instruction"]
    assert columns(["id", "prompt"], "text") == ["id", "prompt"]
