"""Reading ``tokenizer.json`` and the files that lie beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lit_llm.errors import UserError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
CARRIED_FILES = (TOKENIZER_FILE, CONFIG_FILE, "special_tokens_map.json", TEMPLATE_FILE)
MODEL_FILES = ("generation_config.json", "config.json")  # read for their token ids only, never carried along


def parse(files: Mapping[str, str], name: str, origin: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        content = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: no valid {name}: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{origin}: no valid {name}: it holds no JSON object")
    return content


def processor_prefix(content: dict[str, Any]) -> list[int]:
    """The ids that the file's post-processor puts before a text."""
    prefix: list[int] = []
    for part in _parts(content.get("post_processor")):
        if part["type"] == "TemplateProcessing":
            for piece in part["single"]:
                if "SpecialToken" not in piece:
                    break
                prefix += part["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
        elif part["type"] in ("BertProcessing", "RobertaProcessing"):
            prefix.append(part["cls"][1])
    return prefix


def continuing(content: dict[str, Any]) -> dict[str, Any] | None:
    """The tokenizer without what it does at a text's beginning (a blank put there, blanks dropped); None where it does
    nothing there."""
    return _changed(content, _without_prefix)


def among_specials(content: dict[str, Any]) -> dict[str, Any] | None:
    """The tokenizer without its rules for a text's beginning, which would hold behind every control token too; None
    where it has none."""
    return _changed(content, lambda part: None if at_start(part) else part)


def _changed(content: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any] | None:
    parts = {role: _mapped(content.get(role), change) for role in ("normalizer", "pre_tokenizer")}
    return None if all(part == content.get(role) for role, part in parts.items()) else content | parts


def _mapped(component: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    if not isinstance(component, dict):
        return component
    if component.get("type") != "Sequence":
        return change(component)
    name = "normalizers" if "normalizers" in component else "pretokenizers"
    members = [_mapped(member, change) for member in component.get(name, [])]
    return component | {name: [member for member in members if member is not None]}


def at_start(normalizer: Mapping[str, Any]) -> bool:
    """Whether this replaces something at the beginning of a text alone."""
    pattern = normalizer.get("pattern")
    return isinstance(pattern, dict) and pattern.get("Regex", "").startswith(r"\A")


def _without_prefix(part: dict[str, Any]) -> dict[str, Any] | None:
    kind = part.get("type")
    if kind == "Prepend" or at_start(part):
        return None
    if kind == "Metaspace":
        kept = {name: value for name, value in part.items() if name != "add_prefix_space"}
        scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
        return part if scheme == "never" else kept | {"prepend_scheme": "never"}
    if kind == "ByteLevel" and part.get("add_prefix_space"):
        return part | {"add_prefix_space": False}
    return part


def byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: a printable byte of Latin-1 is its own character, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
    return {letters[byte]: byte for byte in range(256)}


def byte_measure(content: dict[str, Any]) -> Callable[[str], int]:
    """The function from a token of the vocabulary to the bytes of text it stands for."""
    kinds = {part["type"] for part in _parts(content.get("decoder") or content.get("pre_tokenizer"))}
    if "ByteLevel" in kinds:
        alphabet = set(byte_alphabet())
        # a character of the alphabet is a byte; the decoder takes a token with any other character as it stands
        return lambda token: len(token) if alphabet.issuperset(token) else len(token.encode())
    byte = re.compile("<0x[0-9A-Fa-f]{2}>")
    blanks = bool(kinds & {"Metaspace", "Replace"})

    def measure(token: str) -> int:
        if "ByteFallback" in kinds and byte.fullmatch(token):
            return 1
        return len((token.replace("▁", " ") if blanks else token).encode())

    return measure


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """A component of tokenizer.json and, for a sequence, its members."""
    if isinstance(component, dict) and "type" in component:
        yield component
        for members in ("decoders", "pretokenizers", "processors"):
            for member in component.get(members, []):
                yield from _parts(member)
