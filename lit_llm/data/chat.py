"""Conversations to text: the tokenizer's own Jinja template, or ChatML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lit_llm.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    template: str | None = None,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    pad_token: str | None = None,
    unk_token: str | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The text that ``template`` (None: ChatML) makes of ``messages``.

    Args:
        messages: turns with ``role`` and ``content``; other keys reach the template untouched.
        template: Jinja source as Hugging Face models ship it; it runs in a sandbox. A template that prints the date
            (``strftime_now``) gives another text each day.
        bos_token: what the template sees under this name, '' for None: without one there is nothing to begin with.
        eos_token: the same, but to print it is an error for None; ``pad_token`` and ``unk_token`` likewise.
        add_generation_prompt: end with the header of the assistant's turn.

    Raises:
        UserError: messages of another shape, a template that does not parse, refuses these messages, or prints a
            variable nobody gives it. Such a variable may be tested, compared and looped over (it counts as empty).
    """
    import jinja2

    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UserError('messages must be a list of turns such as [{"role": "user", "content": "hi"}]')
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UserError(f"message {number} must be a mapping with a role and a content, not {message!r:.80}")
        if template is None and not isinstance(message["content"], str):
            raise UserError(f"the content of message {number} must be text, not {message['content']!r:.80}")
    named = {"eos_token": eos_token, "pad_token": pad_token, "unk_token": unk_token}
    try:
        return _compile(CHATML if template is None else template).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token or "",
            **{name: token for name, token in named.items() if token is not None},
        )
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the chat template does not parse: line {error.lineno}: {error.message}") from error
    except jinja2.UndefinedError as error:
        raise UserError(f"the chat template needs {error}") from error
    except Exception as error:  # a template is a program of its own: it may fail in any way
        raise UserError(f"the chat template fails on these messages: {error}") from error


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import TemplateError, Undefined, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Missing(Undefined):
        """False and empty, as templates expect of what they may be given or not; to print it is an error."""

        __slots__ = ()

        @property
        def _undefined_message(self) -> str:
            if self._undefined_hint:
                return self._undefined_hint
            name = str(self._undefined_name)
            if isinstance(self._undefined_obj, Mapping):
                return f"{name!r} in a message that has none: add it to the data or use a template without it"
            if name in ("eos_token", "pad_token", "unk_token"):
                return (
                    f"{name}, which the tokenizer does not name: "
                    f'put {{"{name}": "..."}} into a tokenizer_config.json beside it'
                )
            return (
                f"the variable {name!r}, which is not given: set it at the template's beginning "
                f'({{% set {name} = "..." %}}) or use another chat_template.jinja'
            )

        def __str__(self) -> str:
            self._fail_with_undefined_error()
            return ""

    class Generation(Extension):
        """``{% generation %}`` marks what the assistant says in some templates; the text is simply its body."""

        tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        # jinja's own filter escapes HTML, which models have never seen
        if isinstance(value, Undefined):
            return str(value)
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=Missing, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
