"""Where a long text may be cut so that the ids of its parts in a row are those of the whole, whatever follows.

Three kinds of places, each for the tokenizers of which it is certain:

- Byte-level BPE with a known word pattern: between an ASCII letter or digit and white space, and behind a single line
  end before a letter. No alternative of those patterns goes from a letter or digit on to white space, or from a line
  end on to a letter; all stop there as at the text's end, and what looks ahead has seen all it asks for.
- BPE over whole texts (as in SentencePiece's): before a line end, if the line end is a token and no merge takes it, so
  that no merge reaches over it. Not for Unigram: sums of scores round differently when they begin elsewhere.
- Words cut before every blank, that begin with it (Metaspace): between an ASCII letter or digit and a blank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lit_llm.data.fast_bpe import word_pattern
from lit_llm.data.tokenizer_json import at_start

_LETTER = "A-Za-z\u4e00-\u9fa5"
_WORDS = rf"(?<=[A-Za-z0-9])(?=[ \t\r\n])|(?<=\S\n)(?=[{_LETTER}])"
_IN_WORDS = rf"[A-Za-z0-9][ \t\r\n]|\n[{_LETTER}]"  # an added token with such a pair could lie over a cut
_LINES = r"(?<=[^\n ▁])(?=\n)"
_BLANKS = r"(?<=[A-Za-z0-9])(?= [A-Za-z0-9])"

_LOCAL_NORMALIZERS = ("NFC", "NFKC", "Precompiled")  # change nothing over the border of a letter and a blank


class SafeCuts:
    """The last safe place of a text, by a regex of such places."""

    def __init__(self, places: str) -> None:
        self._places = re.compile(places)

    def last(self, text: str) -> int | None:
        """The last position in ``text``, neither 0 nor its end, where it may be cut; None if it has none."""
        window = 4096
        while True:
            start = max(len(text) - window, 0)
            found = [m.start() for m in self._places.finditer(text, max(start, 1)) if m.start() < len(text)]
            if found:
                return found[-1]
            if not start:
                return None
            window *= 16


def safe_cuts(content: Mapping[str, Any]) -> SafeCuts | None:
    """What is certain of this tokenizer.json; None where nothing is."""
    added = content.get("added_tokens") or []
    plain = [token for token in added if not token["special"]]
    if any(token.get("lstrip") or token.get("rstrip") or token.get("single_word") for token in plain):
        return None
    normalizers = list(_members(content.get("normalizer"), "normalizers"))
    splitters = list(_members(content.get("pre_tokenizer"), "pretokenizers"))
    if word_pattern(content) is not None:
        known = all(part.get("type") == "NFC" for part in normalizers)
        return SafeCuts(_WORDS) if known and not _spanned(added, _IN_WORDS) else None
    first, later = splitters[:1], splitters[1:]
    if any(part.get("type") != "Metaspace" for part in first) or any(part.get("type") != "Split" for part in later):
        return None
    # what is put before every stretch between added tokens would be missing in a later part
    before_each = any(part.get("type") == "Prepend" for part in normalizers) or any(
        part.get("prepend_scheme", "always") == "always" for part in first
    )
    if plain and before_each:
        return None
    if first and first[0].get("split", True):
        known = all(
            part.get("type") in ("Prepend", *_LOCAL_NORMALIZERS) or _is_blank_rule(part) for part in normalizers
        )
        return SafeCuts(_BLANKS) if known and not _spanned(added, " ") else None
    known = not later and all(part.get("type") == "Prepend" or _is_blank_rule(part) for part in normalizers)
    if known and _line_ends_stand_alone(content.get("model") or {}) and not _spanned(added, "\n"):
        return SafeCuts(_LINES)
    return None


def _members(component: Any, name: str) -> Iterator[Mapping[str, Any]]:
    if isinstance(component, dict):
        if component.get("type") == "Sequence":
            for member in component.get(name, []):
                yield from _members(member, name)
        else:
            yield component


def _is_blank_rule(part: Mapping[str, Any]) -> bool:
    """A replacement of blanks by their mark, of several by one, or at the text's beginning or end."""
    pattern = part.get("pattern") or {}
    return part.get("type") == "Replace" and (
        (pattern == {"String": " "} and part.get("content") == "▁")
        or pattern.get("Regex") in (" {2,}", r"[ ▁]+\z")
        or at_start(part)
    )


def _spanned(added: list[Mapping[str, Any]], pair: str) -> bool:
    return any(re.search(pair, token["content"]) for token in added)


def _line_ends_stand_alone(model: Mapping[str, Any]) -> bool:
    """Whether this BPE has a token for a line end, known or by its byte, that no merge takes."""
    if model.get("type", "BPE") != "BPE" or model.get("ignore_merges") or "merges" not in model:
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    known = "\n" in model["vocab"] or (model.get("byte_fallback") and "<0x0A>" in model["vocab"])
    for merge in model["merges"]:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        if "\n" in left or "\n" in right or "<0x0A>" in (left, right):
            return False
    return bool(known)
