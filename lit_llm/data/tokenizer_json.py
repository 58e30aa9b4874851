"""Reading ``tokenizer.json`` and the files that lie beside it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_llm.errors import UserError

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
CARRIED_FILES = (TOKENIZER_FILE, CONFIG_FILE, "special_tokens_map.json", TEMPLATE_FILE)
MODEL_FILES = ("generation_config.json", "config.json")  # read for their token ids only, never carried along


def read_files(path: Path) -> dict[str, str]:
    """The texts of the tokenizer's files; those of a file under another name than tokenizer.json are it alone."""
    if os.path.isdir(path):
        main, beside = path / TOKENIZER_FILE, True
        if not os.path.exists(main):
            raise UserError(f"{path}: no {TOKENIZER_FILE} in this folder")
    else:
        main, beside = path, path.name == TOKENIZER_FILE
        if not os.path.exists(main):
            raise UserError(f"no tokenizer at {path}: name a {TOKENIZER_FILE} or a folder that holds one")
    paths = {TOKENIZER_FILE: main}
    if beside:
        names = (*CARRIED_FILES[1:], *MODEL_FILES)
        paths |= {name: main.parent / name for name in names if (main.parent / name).is_file()}
    try:
        return {name: file.read_text(encoding="utf-8-sig") for name, file in paths.items()}
    except UnicodeDecodeError as error:
        raise UserError(f"{main}: the tokenizer's files are not UTF-8 text: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {main}: {error.strerror}") from error


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


def load_backend(text: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    if getattr(backend.model, "dropout", None) is not None:
        backend.model.dropout = None
    return backend


def special_ids(backend: tokenizers.Tokenizer) -> set[int]:
    return {i for i, token in backend.get_added_tokens_decoder().items() if token.special}


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


def words_end_at_lines(content: dict[str, Any]) -> bool:
    """Whether no token can reach from a letter over a line end behind it.

    So it is with GPT-2's way of cutting text into words, where a word holds white space only at its beginning and none
    depends on what comes before it. Other ways are taken for unknown.
    """
    splitter = content.get("pre_tokenizer") or {}
    return (
        splitter.get("type") == "ByteLevel"
        and splitter.get("use_regex", True)
        and not splitter.get("add_prefix_space")
        and content.get("normalizer") is None
        and all(token["special"] for token in content.get("added_tokens", []))
    )


def byte_measure(content: dict[str, Any]) -> Callable[[str], int]:
    """The function from a token of the vocabulary to the bytes of text it stands for."""
    kinds = {part["type"] for part in _parts(content.get("decoder") or content.get("pre_tokenizer"))}
    if "ByteLevel" in kinds:
        from tokenizers.pre_tokenizers import ByteLevel

        alphabet = set(ByteLevel.alphabet())
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
