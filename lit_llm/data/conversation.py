"""Conversations to ids, and which of them the assistant says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from lit_llm.data.chat_layout import ChatTemplate, Kind, Layout, Messages, Part, Run
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError

_HIDDEN = (
    "the chat template leaves out what the assistant says: use one that writes every turn (a chat_template.jinja "
    "beside the tokenizer)"
)
_ROLES = ("system", "developer", "user", "assistant", "tool")


def encode_conversation(tokenizer: Tokenizer, messages: Messages) -> tuple[list[int], np.ndarray]:
    """The ids of a whole conversation and which of them are trained: (tokens,) bool.

    The text is what the tokenizer's chat template (ChatML without one) makes of the messages, less white space at its
    end. Trained is what the assistant says, in every turn: its content as the template writes it and the token or text
    that ends the turn; neither header nor the line end behind a turn. No token reaches over the border of an answer,
    and control tokens typed in a content are plain text. BOS stands once where the template or the convention puts
    it, EOS once at the end; EOS is trained if the template gives the last answer no control token of its own.

    Raises:
        UserError: no turn of the assistant, messages the template fails on, or a template that rewrites what is said
            so far that its turns cannot be told apart.
    """
    chat = _chat(tokenizer)
    runs, unended = _runs(chat, messages, whole=True)
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError('the conversation has no turn of the assistant to learn from: add one ("role": "assistant")')
    ids, spans = _encode(chat, tokenizer, runs)
    if tokenizer.eos_token_id is None or ids[-1:] != [tokenizer.eos_token_id]:
        ids += tokenizer.encode("", eos=True, continues=True)
        if unended:
            spans.append((len(ids) - 1, len(ids)))
    trained = np.zeros(len(ids), dtype=bool)
    for start, stop in spans:
        trained[start:stop] = True
    if not spans or not any(stop > start for start, stop in spans):
        raise UserError(_HIDDEN)
    return ids, trained


def encode_prompt(tokenizer: Tokenizer, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
    """The ids of a conversation that the assistant is to go on with: those with which ``encode_conversation`` begins
    for the same messages and an answer, up to where the answer's header ends.

    Errors as in :func:`encode_conversation`, but no turn of the assistant is needed.
    """
    chat = _chat(tokenizer)
    runs, _ = _runs(chat, messages, whole=False, header=add_generation_prompt)
    return _encode(chat, tokenizer, runs)[0]


def turn_end_ids(tokenizer: Tokenizer) -> list[int]:
    """The control tokens that end an assistant's turn by the tokenizer's template; generation stops at any of them."""
    chat = _chat(tokenizer)
    found: list[int] = []
    for roles in (("user", "assistant"), ("user", "assistant", "user"), ("system", "user", "assistant")):
        layout = chat.layout([{"role": role, "content": role} for role in roles], False)
        for part in layout.parts if layout else ():
            found += [chat.control[part.end_token]] if part.end_token else []
    return sorted(set(found))


_chats: WeakKeyDictionary[Tokenizer, ChatTemplate] = WeakKeyDictionary()


def _chat(tokenizer: Tokenizer) -> ChatTemplate:
    chat = _chats.get(tokenizer)
    if chat is None:
        chat = _chats[tokenizer] = ChatTemplate(tokenizer)
    return chat


def _runs(chat: ChatTemplate, messages: Messages, whole: bool, header: bool = False) -> tuple[list[Run], bool]:
    """The text in runs, and whether its last turn is an answer that no control token ends."""
    text = chat.render(messages, header)
    for message in messages:
        if len(message) != 2 or message["role"] not in _ROLES:
            _refuse_control(chat, {**message, "content": None}, "beside its content")
        if not isinstance(message["content"], str):
            _refuse_control(chat, message["content"], "in a content that is no plain text")
    # thoughts or calls under keys of their own are said by the assistant too, and found as part of the answer
    further = any(len(message) != 2 and message["role"] == "assistant" for message in messages)
    layout = None if further else chat.layout(messages, header)
    spans = None if layout is None else _match(text, layout, messages)
    if layout is None or spans is None:
        runs, unended = _by_prefixes(chat, messages, text, whole, layout)
    else:
        runs, taken = [], 0
        for part, (start, stop) in zip(layout.parts, spans, strict=True):
            border = max(part.border, taken)
            runs += [(Kind.TEMPLATE, part.before[taken:border]), _aside(part.before[border:])]
            runs.append((Kind.ANSWER if part.answer else Kind.SAID, text[start:stop]))
            runs += part.end_runs()
            taken = len(part.end) + len(part.end_token)
        runs.append((Kind.TEMPLATE, layout.last[taken : layout.keep if whole else None]))
        unended = messages[-1]["role"] == "assistant" and not layout.parts[-1].end_token
    if header and not whole:
        runs.append((Kind.TEMPLATE, _blank(chat, messages)))
    return [run for run in runs if run[1]], unended


def _blank(chat: ChatTemplate, messages: Messages) -> str:
    """White space that stands between the prompt and an answer."""
    layout = chat.layout([*messages, {"role": "assistant", "content": "."}], False)
    part = layout.parts[-1] if layout and layout.parts else None
    prompt = chat.layout(messages, True)
    if part is None or prompt is None or part.index != len(messages) or not part.before.startswith(prompt.last):
        return ""
    blank = part.before[len(prompt.last) :]
    return "" if blank.strip() else blank


def _by_prefixes(
    chat: ChatTemplate, messages: Messages, text: str, whole: bool, layout: Layout | None
) -> tuple[list[Run], bool]:
    """``runs`` where the template rewrites what is said, such as thoughts: an answer starts where the prompt of
    the turns before it ends."""
    _refuse_control(chat, messages, "and the chat template rewrites what is said")
    known = {part.index: part for part in layout.parts} if layout else {}
    runs: list[Run] = []
    at, unended = 0, False
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        found = _answer(chat, messages, index, text, known.get(index), at)
        if found is None:
            if not whole:  # a prompt is not trained: its answers need not be told apart
                return [*runs, (Kind.TEMPLATE, text[at:])], False
            raise UserError(
                f"the chat template rewrites earlier turns, so that what the assistant says in message {index} "
                "cannot be found in the conversation: use a template that keeps each turn as it is (a "
                "chat_template.jinja beside the tokenizer), or give every answer in a conversation of its own"
            )
        start, body, end, token = found
        if whole and str(message["content"]).strip() and not text[body:end].strip():
            raise UserError(_HIDDEN)
        runs += [(Kind.TEMPLATE, text[at:start]), _aside(text[start:body]), (Kind.ANSWER, text[body:end])]
        runs += [(Kind.END, text[end:token]), (Kind.END_TOKEN, "")]
        at = token
        control = chat.pattern.match(text, token)
        if control:
            runs[-1] = (Kind.END_TOKEN, control[0])
            at = control.end()
        unended = index + 1 == len(messages) and not control
    rest = text[at:]
    if whole:
        if messages[-1]["role"] == "assistant" and layout and layout.last[layout.keep :].strip():
            rest = rest.removesuffix(layout.last[layout.keep :])
        rest = rest.rstrip()
    return [*runs, (Kind.TEMPLATE, rest)], unended


def _answer(
    chat: ChatTemplate, messages: Messages, index: int, text: str, part: Part | None, at: int
) -> tuple[int, int, int, int] | None:
    """Where in the text the prompt, what stands before the answer, the answer and its end's text end."""
    try:
        prompt = chat.render(messages[:index], True) if index else ""
        start = body = len(prompt)
        if start < at or not text.startswith(prompt):
            return None
        if part and text.startswith(part.before[part.border :], start):
            body += len(part.before) - part.border
        token = chat.pattern.search(text, body)
        if token and (part is None or part.end_token == token[0]):
            stop = token.start()
        else:
            turn = chat.render(messages[: index + 1], False)
            stop = body + len(text[body : len(turn)].rstrip())
            if not text.startswith(turn) or (token and token.start() < stop):
                return None
            if part and not part.end.strip() and text.startswith(part.end, stop):
                stop += len(part.end)
    except UserError:
        return None
    end = part.end if part and text.endswith(part.end, body, stop) else ""
    content = messages[index]["content"]
    headless = not index or chat.render(messages[:index], False) == prompt
    if headless and isinstance(content, str) and content.strip():
        # a template without a header of its own to answer after writes that where the answer is looked for
        body = max(body, text.find(content.strip(), body, stop - len(end)))
    return start, body, stop - len(end), stop


def _refuse_control(chat: ChatTemplate, value: Any, why: str) -> None:
    for text in _strings(value):
        token = chat.pattern.search(text)
        if token:
            raise UserError(
                f"a message holds the text of the control token {token[0]!r} {why}, where it cannot be kept plain "
                "text: take it out"
            )


def _aside(text: str) -> Run:
    """What stands between the prompt and the answer; white space is encoded as part of the prompt."""
    return (Kind.ASIDE if text.strip() else Kind.TEMPLATE), text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _forms(content: str) -> Iterator[str]:
    """A content as templates write it."""
    yield content
    yield content.strip()
    yield content.lstrip("\n")
    yield content.rstrip("\n")
    yield content.strip("\n")
    yield content.lstrip()
    yield content.rstrip()


def _match(text: str, layout: Layout, messages: Messages) -> list[tuple[int, int]] | None:
    """Where each content stands in the text, if the text is exactly the layout with the contents put in."""
    parts = layout.parts
    if not parts or not text.startswith(parts[0].before):
        return None
    spans: list[tuple[int, int]] = []
    at = len(parts[0].before)
    for part, after in zip(parts, [*(p.before for p in parts[1:]), layout.last], strict=True):
        for form in _forms(messages[part.index]["content"]):
            stop = at + len(form)
            if text.startswith(form, at) and text.startswith(after, stop):
                break
        else:
            return None
        spans.append((at, stop))
        at = stop + len(after)
    return spans if at == len(text) else None


def _encode(chat: ChatTemplate, tokenizer: Tokenizer, runs: Sequence[Run]) -> tuple[list[int], list[tuple[int, int]]]:
    """The ids and the spans of the trained ones. What is not trained is encoded as one text between two answers."""
    pieces: list[tuple[str, bool, int | None]] = []  # text, whether it is plain, ids trained of it (None: all)
    buffer: list[Run] = []

    def flush() -> None:
        if not buffer:
            return
        text = "".join(run[1] for run in buffer)
        first = int(buffer[0][0] is Kind.END_TOKEN)
        said = any(kind is Kind.SAID for kind, _ in buffer)
        if not said or len(chat.pattern.findall(text)) == sum(
            chat.literal_tokens(run) for kind, run in buffer if kind is not Kind.SAID
        ):
            pieces.append((text, False, first))
        else:  # somebody typed a control token
            for number, (kind, run) in enumerate(buffer):
                pieces.append((run, kind is Kind.SAID, first if number == 0 else 0))
        buffer.clear()

    for kind, text in runs:
        if kind in (Kind.ANSWER, Kind.END):
            flush()
            pieces.append((text, kind is Kind.ANSWER and chat.pattern.search(text) is not None, None))
            continue
        if kind in (Kind.ASIDE, Kind.END_TOKEN):
            flush()
        buffer.append((kind, text))
    flush()
    if not pieces or pieces[0][2] is None:
        pieces.insert(0, ("", False, 0))  # a BOS before the answer is not trained
    head, *others = pieces
    special = iter(
        tokenizer.encode_batch([text for text, plain, _ in others if not plain], allow_special=True, continues=True)
    )
    ids = tokenizer.encode(head[0], allow_special=not head[1])
    spans: list[tuple[int, int]] = []
    for text, plain, trained in others:
        new = tokenizer.encode(text, continues=True) if plain else next(special)
        if trained != 0:
            spans.append((len(ids), len(ids) + (len(new) if trained is None else trained)))
        ids += new
    return ids, spans
