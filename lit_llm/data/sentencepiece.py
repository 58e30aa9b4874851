"""A SentencePiece ``.model`` as a tokenizer.json of equal ids.

The file is a protocol buffer (sentencepiece_model.proto); the few fields that matter are read here without its package.
Where HF's library can't do as SentencePiece does: a text that is one user-defined symbol and nothing else has no blank
put before it, and characters are normalized inside of such symbols too.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lit_llm.errors import UserError

_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


@dataclass
class _Model:
    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # text, score, kind
    kind: int = _UNIGRAM
    byte_fallback: bool = False
    blank_behind: bool = False
    ids: dict[str, int] = field(default_factory=lambda: {"unk": 0, "bos": 1, "eos": 2, "pad": -1})
    charsmap: bytes = b""
    blank_before: bool = True
    one_blank: bool = True
    escape: bool = True


def convert(data: bytes, origin: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Content of a tokenizer.json and of a tokenizer_config.json that stand for this ``.model``.

    BOS is put before a text where models of this kind are trained so: BPE with byte fallback, the Llama family.

    Raises:
        UserError: no SentencePiece model of the BPE or unigram kind.
    """
    try:
        model = _read(data)
    except (IndexError, ValueError, struct.error) as error:
        raise UserError(f"{origin}: no valid SentencePiece model: {error}; give the .model file it trained") from error
    kinds = {kind for _, _, kind in model.pieces}
    blank_in_symbol = any(kind == _USER_DEFINED and re.search("[ ▁]", text) for text, _, kind in model.pieces)
    if (
        model.kind not in (_UNIGRAM, _BPE)
        or _UNUSED in kinds
        or model.blank_behind
        or not model.escape
        or (blank_in_symbol and model.one_blank)
    ):
        raise UserError(
            f"{origin}: a SentencePiece model of a kind that is not read (BPE and unigram are, without unused "
            "pieces and with blanks before words): convert it with transformers and give the tokenizer.json"
        )
    if not model.pieces:
        raise UserError(f"{origin}: no valid SentencePiece model: it has no pieces")
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(model),
        "normalizer": _normalizer(model),
        "pre_tokenizer": _splitter(model),
        "post_processor": None,
        "decoder": _decoder(model),
        "model": _bpe(model) if model.kind == _BPE else _unigram(model),
    }
    config: dict[str, Any] = {
        f"{name}_token": model.pieces[i][0] for name, i in model.ids.items() if 0 <= i < len(model.pieces)
    }
    config["add_bos_token"] = model.kind == _BPE and model.byte_fallback and "bos_token" in config
    return content, config


# ------------------------------------------------------------------- the protocol buffer


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field number and value of each entry: an int, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError(f"broken at byte {at}")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _read(data: bytes) -> _Model:
    model = _Model()
    names = {40: "unk", 41: "bos", 42: "eos", 43: "pad"}
    for number, value in _fields(data):
        if number == 1:
            text, score, kind = b"", 0.0, _NORMAL
            for key, part in _fields(_bytes(value)):
                if key == 1:
                    text = _bytes(part)
                elif key == 2:
                    score = struct.unpack("<f", _bytes(part))[0]
                elif key == 3:
                    kind = _int(part)
            model.pieces.append((text.decode("utf-8"), score, kind))
        elif number == 2:
            for key, part in _fields(_bytes(value)):
                if key in names:
                    model.ids[names[key]] = _int(part) if _int(part) < 1 << 31 else -1  # negative: none
                elif key == 3:
                    model.kind = _int(part)
                elif key == 24:
                    model.blank_behind = bool(part)
                elif key == 35:
                    model.byte_fallback = bool(part)
        elif number == 3:
            for key, part in _fields(_bytes(value)):
                if key == 2:
                    model.charsmap = _bytes(part)
                elif key == 3:
                    model.blank_before = bool(part)
                elif key == 4:
                    model.one_blank = bool(part)
                elif key == 5:
                    model.escape = bool(part)
    return model


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where a message or text belongs")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a text where a number belongs")
    return value


# ------------------------------------------------------------------- the parts of a tokenizer.json


def _added_tokens(model: _Model) -> list[dict[str, Any]]:
    # user-defined ones are looked for in the normalized text, which leaves that in one piece
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    return [
        {"id": i, "content": text, **flags, "normalized": kind == _USER_DEFINED, "special": kind != _USER_DEFINED}
        for i, (text, _, kind) in enumerate(model.pieces)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _normalizer(model: _Model) -> dict[str, Any] | None:
    parts: list[dict[str, Any]] = []
    if model.charsmap:
        parts.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    symbols = "|".join(re.escape(text) for text, _, kind in model.pieces if kind == _USER_DEFINED)
    if model.one_blank:
        parts += [_replace(r"[ ▁]+\z", ""), _replace(" {2,}", " ")]
    if model.blank_before:
        # Metaspace puts none before a text that begins with a mark, a blank or a symbol, SentencePiece does. A symbol
        # alone is left as it is, for the symbols themselves go through here.
        marked = "|".join(filter(None, ("▁" if model.one_blank else "[ ▁]", symbols)))
        parts.append(_replace(rf"\A(?!(?:{symbols})\z)(?={marked})" if symbols else rf"\A(?={marked})", "▁"))
    if model.one_blank:
        parts.append(_replace(r"\A ", "▁" if model.blank_before else ""))
    if symbols:
        parts.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    return {"type": "Sequence", "normalizers": parts} if parts else None


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _splitter(model: _Model) -> dict[str, Any]:
    scheme = "first" if model.blank_before else "never"
    # no piece holds a blank behind its beginning: words may be taken one by one, which is faster
    by_words = model.kind == _UNIGRAM and all("▁" not in text[1:] for text, _, kind in model.pieces if kind == _NORMAL)
    blanks = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": by_words}
    if model.kind == _BPE:
        return blanks
    # the library's unigram model would find these in a text: part their first character from what makes them
    kept = [text for text, _, kind in model.pieces if kind in (_UNKNOWN, _CONTROL) and len(text) > 1]
    patterns = [f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in kept]
    if any(kind == _BYTE for _, _, kind in model.pieces):
        patterns.append("<(?=0x[0-9A-F]{2}>)")
    split = {"type": "Split", "pattern": {"Regex": "|".join(patterns)}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [blanks, split]} if patterns else blanks


def _decoder(model: _Model) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    if any(kind == _BYTE for _, _, kind in model.pieces):
        parts.append({"type": "ByteFallback"})
    parts.append({"type": "Fuse"})
    if model.blank_before:
        parts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": parts}


def _bpe(model: _Model) -> dict[str, Any]:
    # SentencePiece merges any two neighbours that make a piece, best score first
    vocab = {text: i for i, (text, _, _) in enumerate(model.pieces)}
    usable = {text for text, _, kind in model.pieces if kind in (_NORMAL, _USER_DEFINED)}
    best_first = sorted((piece for piece in model.pieces if piece[2] == _NORMAL), key=lambda piece: -piece[1])
    merges = [
        [text[:i], text[i:]]
        for text, _, _ in best_first
        for i in range(1, len(text))
        if text[:i] in usable and text[i:] in usable
    ]
    unknown = model.pieces[model.ids["unk"]][0] if 0 <= model.ids["unk"] < len(model.pieces) else None
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }


def _unigram(model: _Model) -> dict[str, Any]:
    lowest = min((score for _, score, kind in model.pieces if kind == _NORMAL), default=0.0)
    vocab = [[text, score if kind in (_NORMAL, _USER_DEFINED) else lowest] for text, score, kind in model.pieces]
    return {"type": "Unigram", "unk_id": model.ids["unk"], "vocab": vocab, "byte_fallback": model.byte_fallback}
