"""A tokenizer's files as transformers' AutoTokenizer has to find them to give the same ids."""

from __future__ import annotations

import json
from typing import Any

from lit_llm.data.chat import CHATML
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.data.tokenizer_json import CONFIG_FILE, TOKENIZER_FILE
from lit_llm.data.tokenizer_training import CHAT_TOKENS

# Takes tokenizer.json as it is, in transformers 4 and 5; other classes rebuild parts of it by their own rules.
_CLASS = "PreTrainedTokenizerFast"
_OF_A_CLASS = ("auto_map", "add_eos_token", "add_prefix_space", "legacy", "from_slow", "use_fast")


def tokenizer_files(tokenizer: Tokenizer, chatml: bool = True) -> dict[str, str]:
    """File name to content.

    They are the files that the tokenizer carries, changed only where AutoTokenizer would read them otherwise: what is
    put before a text is done by tokenizer.json itself, and padding, truncation and dropout are off. Without a chat
    template, ChatML is written where the vocabulary has its tokens, for it is what lit-llm renders chats by then; not
    so with ``chatml`` False.
    """
    files = tokenizer.to_files()
    config: dict[str, Any] = json.loads(files.get(CONFIG_FILE, "{}"))
    changed = {name: value for name, value in config.items() if name not in _OF_A_CLASS}
    changed["tokenizer_class"] = _CLASS
    changed.setdefault("clean_up_tokenization_spaces", False)
    content: dict[str, Any] = json.loads(files[TOKENIZER_FILE])
    prefix = tokenizer.encode("")
    if _changed(content, prefix):
        files[TOKENIZER_FILE] = json.dumps(content, ensure_ascii=False)
    # transformers 5 makes a post-processor of its own where this is said, with BOS alone or with nothing.
    changed.pop("add_bos_token", None)
    if prefix == [tokenizer.bos_token_id] or not prefix:
        changed["add_bos_token"] = bool(prefix)
    # transformers 4 puts a rule of its own in place of the first one if the two say different things.
    first = content.get("pre_tokenizer") or {}
    if "add_prefix_space" in first:
        changed["add_prefix_space"] = first["add_prefix_space"]
    specials = {token["content"] for token in content.get("added_tokens", []) if token.get("special")}
    if chatml and tokenizer.chat_template is None and specials.issuperset(CHAT_TOKENS):
        changed["chat_template"] = CHATML
    files[CONFIG_FILE] = json.dumps(changed, ensure_ascii=False, indent=2) + "\n"
    return files


def _changed(content: dict[str, Any], prefix: list[int]) -> bool:
    """Switches off what Tokenizer does without, and lets the file put ``prefix`` before a text."""
    from tokenizers import Tokenizer as Backend

    off = {"truncation": None, "padding": None}
    changed = any(content.get(name) is not None for name in off)
    content.update(off)
    if content["model"].get("dropout"):
        content["model"]["dropout"] = None
        changed = True
    backend = Backend.from_str(json.dumps(content))
    if backend.encode("").ids == prefix:
        return changed
    content["post_processor"] = _before([(i, str(backend.id_to_token(i))) for i in prefix])
    return True


def _before(prefix: list[tuple[int, str]]) -> dict[str, Any]:
    """The post-processor that puts these ids before a text, and before the second of a pair."""
    first = [{"SpecialToken": {"id": token, "type_id": 0}} for _, token in prefix]
    second = [{"SpecialToken": {"id": token, "type_id": 1}} for _, token in prefix]
    text, other = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [*first, text],
        "pair": [*first, text, *second, other],
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]} for i, token in prefix},
    }
