"""Byte-level BPE by tiktoken's engine, for a ``tokenizer.json`` whose ids it gives exactly.

Why the ids are equal. Both engines cut a text into words and merge within a word, lowest rank first, leftmost among
equals. tokenizers merges the pairs its list names, tiktoken any two neighbours whose bytes together are a token. Let
every token kept here be *reachable*: merging its own bytes alone gives it (checked for each by the library itself).
While two neighbours l, r lie in a word, nothing has merged over their outer borders, so what happened inside was the
run on the bytes l + r alone, up to there. If l + r is a reachable token t, that run goes on to t, and (l, r) is its
last merge, which is in the list. If l + r is no reachable token, no merge in the list takes (l, r). So both engines see
the same candidates, and ordering tiktoken's ranks by those last merges makes them choose alike. Tokens that no merging
reaches are left out, but for those that ``ignore_merges`` lets a whole word be: they are put behind all others, which
is right only if merging stops at three or more parts of them, as then no pair of neighbours is one.

Words: the patterns below were compared in both regex engines, and their character classes for every code point; texts
with letters newer than Unicode 14, which an engine may not know yet, are left to tokenizers.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_llm.data.tokenizer_json import byte_alphabet

if TYPE_CHECKING:
    import tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _letters_first(contractions: str, digits: str, blanks: str) -> str:
    return rf"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{blanks}"


def _cased(suffix: str, digits: str) -> str:
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{suffix}"
    return rf"{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = _letters_first(_CONTRACTIONS, r"\p{N}{1,3}", _BLANKS)
CL100K = _letters_first(_CONTRACTIONS, r"\p{N}{1,3}", r"\s+\z|" + _BLANKS)
QWEN2 = _letters_first(_CONTRACTIONS, r"\p{N}", _BLANKS)
O200K = _cased(_CONTRACTIONS + "?", r"\p{N}{1,3}")
TEKKEN = _cased("", r"\p{N}")

_GPT2_SWIFT = r" ?\p{L}+|'(?:[sdmt]|ll|ve|re)| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# every digit by itself, and then GPT-2's pattern in what lies between: a blank before a digit ends such a piece
_GPT2_DIGITS = r" ?\p{L}+|'(?:[sdmt]|ll|ve|re)|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"

PATTERNS: Mapping[str, str] = {GPT2: _GPT2_SWIFT} | {p: p for p in (LLAMA3, CL100K, QWEN2, O200K, TEKKEN)}
"""Pattern as in a tokenizer.json -> one of the same meaning for tiktoken's regex engine."""

# Letters, marks and numbers of Unicode 15 to 17.
_NEWER = re.compile(
    "[\u0897\u088f\u0c5c\u0cdc\u0cf3\u0ece\u1acf-\u1aeb\u1c89-\u1c8a\ua7cb-\ua7d4\ua7da-\ua7dc\ua7f1"
    "\U000105c0-\U000105f3\U00010d40-\U00010d85\U00010ec2-\U00010ec7\U00010efa-\U00010eff\U0001123f-\U00011241"
    "\U00011380-\U000113e2\U000116d0-\U000116e3\U00011b60-\U00011b67\U00011bc0-\U00011bf9\U00011db0-\U00011de9"
    "\U00011f00-\U00011f5a\U0001342f\U00013440-\U000143fa\U00016100-\U00016139\U00016d40-\U00016d79"
    "\U00016ea0-\U00016ed3\U00016ff2-\U00016ff6\U000187f8-\U000187ff\U00018cff\U00018d09-\U00018df2"
    "\U0001b132\U0001b155\U0001ccf0-\U0001ccf9\U0001d2c0-\U0001d2d3\U0001df25-\U0001df2a\U0001e030-\U0001e08f"
    "\U0001e4d0-\U0001e5fa\U0001e6c0-\U0001e6ff\U0002a6de-\U0002a6ff\U0002b739-\U0002b73f\U0002cea2-\U0002ceaf"
    "\U0002ebe1-\U0002f7ff\U0003134b-\U0003fffd]"
)
_MAYBE_NEWER = re.compile("[\u088f-\u1c8a\ua7cb-\ua7f1\U000105c0-\U0003fffd]")  # three ranges are searched faster
_MAY_COMPOSE = re.compile("[^\x00-\u02ff]")  # the code points below are their own NFC and have nothing to join them


def word_pattern(content: Mapping[str, Any]) -> str | None:
    """The regex by which a tokenizer.json cuts words, for tiktoken's engine; None where it is not a known one."""
    splitter = content.get("pre_tokenizer") or {}
    parts = splitter.get("pretokenizers", []) if splitter.get("type") == "Sequence" else [splitter]
    if not parts or parts[-1].get("type") != "ByteLevel" or parts[-1].get("add_prefix_space", True):
        return None
    by_regex = parts[-1].get("use_regex", True)
    if len(parts) == 1:
        return PATTERNS[GPT2] if by_regex else None
    if len(parts) != 2:
        return None
    first = parts[0]
    if by_regex:
        return _GPT2_DIGITS if first.get("type") == "Digits" and first.get("individual_digits") is True else None
    if first.get("type") != "Split" or first.get("behavior") != "Isolated" or first.get("invert"):
        return None
    return PATTERNS.get((first.get("pattern") or {}).get("Regex", ""))


class FastBPE:
    """tiktoken's engine with the ids of a tokenizer.json; made by :func:`build`."""

    def __init__(
        self, core: Any, ids: np.ndarray, added: AddedTokens, normalize: Callable[[str], str] | None = None
    ) -> None:
        self._core, self._ids, self._added, self._normalize = core, ids, added, normalize

    def encode(self, text: str) -> np.ndarray | None:
        """Ids (tokens,) uint32 of ``text``, its control tokens plain; None for a text that is not for this engine.

        Raises:
            UnicodeEncodeError: the text holds a lone surrogate.
        """
        if not text.isascii():
            if _MAYBE_NEWER.search(text) and _NEWER.search(text):
                return None
            # every part of a text in NFC is in NFC, so that it does not matter where added tokens cut it
            if self._normalize is not None and _MAY_COMPOSE.search(text) and self._normalize(text) != text:
                return None
        try:
            if not self._added.occur(text):
                return self._ids[_numbers(self._core.encode_ordinary(text))]
            rows = [np.zeros(0, np.uint32)]
            for segment, token_id in self._added.split(text):
                rows.append(self._ids[_numbers(self._core.encode_ordinary(segment))])
                if token_id is not None:
                    rows.append(np.array([token_id], np.uint32))
            return np.concatenate(rows)
        except (KeyboardInterrupt, SystemExit, MemoryError, UnicodeEncodeError):
            raise
        except BaseException:  # very long runs of blanks end its regex engine, by an error or a panic
            return None


def _numbers(ranks: list[int]) -> np.ndarray:
    """The list as (ranks,) uint32; three times as fast as by numpy itself."""
    return np.frombuffer(array("I", ranks), np.uint32)


class AddedTokens:
    """Where tokens added to the vocabulary stand in a text: longest first from the left, control tokens passed over."""

    def __init__(self, plain: Mapping[str, int], special: Iterable[str]) -> None:
        self._plain = dict(plain)
        every = sorted({*plain, *special}, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, every)) or "(?!)")

    def occur(self, text: str) -> bool:
        return any(token in text for token in self._plain)

    def split(self, text: str) -> Iterable[tuple[str, int | None]]:
        """The text between these tokens, each with the id that follows it."""
        start = 0
        for match in self._find.finditer(text):
            if match.group() in self._plain:
                yield text[start : match.start()], self._plain[match.group()]
                start = match.end()
        yield text[start:], None


def build(content: Mapping[str, Any], backend: tokenizers.Tokenizer) -> FastBPE | None:
    """The fast engine for this tokenizer.json, ``backend`` being what was loaded from it; None where there is none
    whose ids are proved to be the same, or tiktoken is missing."""
    model = content.get("model") or {}
    pattern = word_pattern(content)
    usual = (
        model.get("type", "BPE") == "BPE"
        and "merges" in model
        and not any(model.get(name) for name in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"))
    )
    normalizer = content.get("normalizer")
    if pattern is None or not usual or not (normalizer is None or normalizer == {"type": "NFC"}):
        return None
    normalize = None if normalizer is None else backend.normalizer.normalize_str
    added = _added_tokens(backend, normalize)
    whole_words = model.get("ignore_merges", False)
    merging = backend.model
    if whole_words:
        from tokenizers.models import BPE

        merges = [tuple(m.split(" ")) if isinstance(m, str) else (m[0], m[1]) for m in model["merges"]]
        merging = BPE(vocab=model["vocab"], merges=merges)  # type: ignore[arg-type]  # pairs all
    ranks = (
        None if added is None else _ranks(model, merging, lambda token: whole_words and _may_be_word(backend, token))
    )
    if added is None or ranks is None:
        return None
    try:
        from tiktoken._tiktoken import CoreBPE

        core = CoreBPE({token: rank for rank, token in enumerate(ranks)}, {}, pattern)
    except Exception:  # not installed, or another version than this was written for
        return None
    return FastBPE(core, np.array(list(ranks.values()), np.uint32), added, normalize)


def _added_tokens(backend: tokenizers.Tokenizer, normalize: Callable[[str], str] | None) -> AddedTokens | None:
    plain: dict[str, int] = {}
    special: list[tuple[str, bool]] = []
    kinds: set[bool] = set()
    for token_id, token in backend.get_added_tokens_decoder().items():
        # what is found in a text by itself; a token may also have been made special after it was added
        if token.special:
            special.append((token.content, token.normalized))
            continue
        if token.lstrip or token.rstrip or token.single_word or not token.content:
            return None
        if normalize is not None and normalize(token.content) != token.content:
            return None
        kinds.add(token.normalized)
        plain[token.content] = token_id
    if len(kinds) > 1:  # they are looked for one kind after the other
        return None
    return AddedTokens(plain, [text for text, normalized in special if normalized in kinds])


def _may_be_word(backend: tokenizers.Tokenizer, token: bytes) -> bool:
    """Whether this token can be a whole word of some text. What holds no white space is cut alike alone and among
    others: the patterns look ahead for nothing else."""
    try:
        text = token.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return any(map(str.isspace, text)) or len(backend.pre_tokenizer.pre_tokenize_str(text)) == 1


def _ranks(model: Mapping[str, Any], merging: Any, may_be_word: Callable[[bytes], bool]) -> dict[bytes, int] | None:
    """Token -> its id, in the order in which tiktoken has to rank them; None where no order is proved right.
    ``merging`` is the library's model, without ``ignore_merges``."""
    vocab: dict[str, int] = model["vocab"]
    alphabet = byte_alphabet()
    letters = set(alphabet)
    if not letters <= vocab.keys() or len(set(vocab.values())) < len(vocab):
        return None
    made = [m.replace(" ", "", 1) if isinstance(m, str) else m[0] + m[1] for m in model["merges"]]
    if letters.issuperset("".join(made)):
        byte_level = made
    else:  # what no byte-level word can hold is left out
        byte_level = [token for token in made if letters.issuperset(token)]
    last = {token: number for number, token in enumerate(made)}  # the last merge that makes it
    # in the order of the first such merge; single bytes are left out
    reachable = [token for token in dict.fromkeys(byte_level) if len(merging.tokenize(token)) == 1]
    translate = {ord(letter): chr(byte) for letter, byte in alphabet.items()}
    unreachable = [
        token
        for token in vocab.keys() - set(reachable) - letters
        if letters.issuperset(token) and may_be_word(token.translate(translate).encode("latin-1"))
    ]
    if any(len(merging.tokenize(token)) < 3 for token in unreachable):
        return None
    first = {token: number for number, token in reversed(list(enumerate(made)))}
    if any(last[a] > first[b] for a, b in zip(reachable, reachable[1:], strict=False)):
        pairs = ((m.split(" ")[0], m.split(" ")[1]) if isinstance(m, str) else (m[0], m[1]) for m in model["merges"])
        rank = {pair: number for number, pair in enumerate(pairs)}
        for token in reachable:
            if first[token] < last[token]:
                last[token] = _last_merge(token, rank)
        reachable.sort(key=last.__getitem__)
    tokens = [*alphabet, *reachable, *unreachable]
    joined, at, ids = "".join(tokens).translate(translate).encode("latin-1"), 0, {}
    for token in tokens:  # a character each byte
        ids[joined[at : at + len(token)]] = vocab[token]
        at += len(token)
    return ids


def _last_merge(token: str, rank: Mapping[tuple[str, str], int]) -> int:
    """The number of the merge that completes a reachable token."""
    parts: Sequence[str] = list(token)
    number = -1
    while len(parts) > 1:
        number = min(rank.get(pair, len(rank)) for pair in zip(parts, parts[1:], strict=False))
        merged: list[str] = []
        for part in parts:
            if merged and rank.get((merged[-1], part)) == number:
                merged[-1] += part
            else:
                merged.append(part)
        parts = merged
    return number
