"""Which files a tokenizer is read from, whatever its format, and as what they are carried on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lit_llm.data.tokenizer_json import CARRIED_FILES, CONFIG_FILE, MODEL_FILES, TOKENIZER_FILE, parse
from lit_llm.errors import UserError

_MODEL_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
_MERGE_NAMES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


def read_files(path: Path) -> dict[str, str]:
    """The texts of the tokenizer's files, a tokenizer.json among them, made from another format where there is none.

    ``path`` is a file, or a folder with a tokenizer.json, a SentencePiece model or tiktoken ranks (tokenizer.model,
    ``*.tiktoken``), a tekken.json, or GPT-2's vocab.json and merges.txt. Beside a .json under another name than
    tokenizer.json or tekken.json nothing is read.

    Raises:
        UserError: nothing of the kind there, or not readable.
    """
    main = _main_file(path)
    beside = main.suffix != ".json" or main.name in (TOKENIZER_FILE, *_MODEL_NAMES, *_merge_files())
    names = (*CARRIED_FILES[1:], *MODEL_FILES) if beside else ()
    try:
        data = main.read_bytes()
        files = {
            name: (main.parent / name).read_text(encoding="utf-8-sig")
            for name in names
            if (main.parent / name).is_file()
        }
        return files | _converted(main, data, files)
    except UnicodeDecodeError as error:
        raise UserError(f"{main}: the tokenizer's files are not UTF-8 text: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {error.filename or main}: {error.strerror}") from error


def _main_file(path: Path) -> Path:
    if not os.path.isdir(path):
        if not os.path.exists(path):
            raise UserError(
                f"no tokenizer at {path}: name a {TOKENIZER_FILE} or a folder that holds one (no hub is asked)"
            )
        return path
    found = _found_in(path)
    if found is None:
        ranks = sorted(path.glob("*.tiktoken"))
        if len(ranks) == 1:
            return ranks[0]
        raise UserError(
            f"{path}: no {TOKENIZER_FILE} in this folder, nor tokenizer.model, tekken.json, vocab.json with merges.txt "
            "or one .tiktoken file"
        )
    return found


def _found_in(folder: Path) -> Path | None:
    names = (TOKENIZER_FILE, *_MODEL_NAMES, *(vocab for vocab, merges in _MERGE_NAMES if (folder / merges).is_file()))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder has a file of a tokenizer, readable or not."""
    return _found_in(folder) is not None or any(folder.glob("*.tiktoken"))


def _merge_files() -> list[str]:
    return [name for pair in _MERGE_NAMES for name in pair]


def _converted(main: Path, data: bytes, files: Mapping[str, str]) -> dict[str, str]:
    """tokenizer.json and what its config becomes, from whatever ``main`` is."""
    from lit_llm.data import sentencepiece, tiktoken_files

    origin = str(main)
    config = parse(files, CONFIG_FILE, origin)
    list(added_tokens(config.get("added_tokens_decoder")))  # refuses bad ones before anything reads them
    pair = next((pair for pair in _MERGE_NAMES if main.name in pair and (main.parent / pair[1]).is_file()), None)
    if pair is not None:
        vocab = parse(
            {name: (main.parent / name).read_text(encoding="utf-8-sig") for name in pair[:1]}, pair[0], origin
        )
        merges = (main.parent / pair[1]).read_text(encoding="utf-8-sig")
        content, own = tiktoken_files.from_merges(vocab, merges, config, origin)
    elif main.suffix in (".model", ".tiktoken") or tiktoken_files.RANK_LINE.match(data):
        if main.suffix == ".tiktoken" or tiktoken_files.RANK_LINE.match(data):
            content, own = tiktoken_files.from_ranks(data, config, origin)
        else:
            content, own = sentencepiece.convert(data, origin)
    else:
        text = data.decode("utf-8-sig")
        if main.name != "tekken.json" and not _is_tekken(text):
            return {TOKENIZER_FILE: text}
        content, own = tiktoken_files.from_tekken(parse({TOKENIZER_FILE: text}, TOKENIZER_FILE, origin), origin)
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    merged = defaults | own | {name: value for name, value in config.items() if name != "pat_str"}
    _add_tokens(content, config)
    bos: Any = merged.get("bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    ids = [token["id"] for token in content["added_tokens"] if token["content"] == bos]
    if merged.get("add_bos_token") is True and ids:
        content["post_processor"] = _bos_first(bos, ids[0])
    return {
        TOKENIZER_FILE: json.dumps(content, ensure_ascii=False),
        CONFIG_FILE: json.dumps(merged, ensure_ascii=False, indent=2),
    }


def added_tokens(entries: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Id and entry of each token in a config's added_tokens_decoder. UserError for one that is none."""
    for i, entry in entries.items() if isinstance(entries, dict) else ():
        if not str(i).isdecimal() or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise UserError(
                f"{CONFIG_FILE}: added_tokens_decoder wants ids and mappings with a content, not {i!r}: {entry!r:.60}"
            )
        yield int(i), entry


def _add_tokens(content: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Take in the config's added_tokens_decoder: tokens the file knows as plain pieces or not at all, and flags."""
    entries = config.get("added_tokens_decoder")
    vocab = content["model"]["vocab"]
    by_text = {token["content"]: token for token in content["added_tokens"]}
    for i, entry in sorted(added_tokens(entries), key=lambda item: item[0]):
        text = entry["content"]
        if text not in by_text:
            if isinstance(vocab, dict) and vocab.setdefault(text, i) != i:
                raise UserError(f"{CONFIG_FILE}: added_tokens_decoder gives {text!r} the id {i}, it has {vocab[text]}")
            by_text[text] = {"id": i, "content": text, "normalized": False}
        flags = {name: entry.get(name, False) for name in ("single_word", "lstrip", "rstrip")}
        by_text[text] |= flags | {"special": entry.get("special", True)}
    content["added_tokens"] = sorted(by_text.values(), key=lambda token: token["id"])


def _bos_first(bos: str, token_id: int) -> dict[str, Any]:
    """The post-processor that puts BOS before a text, so that other readers of the tokenizer.json do so too."""
    first = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    second = [{"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {bos: {"id": bos, "ids": [token_id], "tokens": [bos]}}
    return {"type": "TemplateProcessing", "single": first, "pair": [*first, *second], "special_tokens": special}


def _is_tekken(text: str) -> bool:
    return text[:4096].lstrip().startswith("{") and '"default_num_special_tokens"' in text[:65536]
