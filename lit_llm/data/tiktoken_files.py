"""tiktoken's rank files, Mistral's tekken.json and GPT-2's vocabulary with merges as a tokenizer.json of equal ids.

Ranks say which bytes are tokens, and which come first: any two neighbours that make a token merge, lowest rank first.
The same in a tokenizer.json: for every token each pair of tokens that makes it, in the order of ranks, and whole words
looked up before (``ignore_merges``). Why that is equal is written in ``lit_llm.data.fast_bpe``.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

from lit_llm.data import fast_bpe
from lit_llm.data.tokenizer_json import byte_alphabet
from lit_llm.errors import UserError

RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")

_LLAMA3_NAMES = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(4))]
_LLAMA3_NAMES += ["<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"]
_LLAMA3_NAMES += [f"<|reserved_special_token_{i}|>" for i in range(5, 251)]
_TEKKEN_NAMES = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
_TEKKEN_NAMES += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"]
_TEKKEN_NAMES += ["[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
_CL100K_NAMES = {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
_EOT = "<|endoftext|>"

# number of ranks -> pattern, special tokens, EOS, BOS
_KNOWN: dict[int, tuple[str, dict[str, int], str, str | None]] = {
    50256: (fast_bpe.GPT2, {_EOT: 50256}, _EOT, None),  # r50k, GPT-2
    50280: (fast_bpe.GPT2, {_EOT: 50256}, _EOT, None),  # p50k
    100256: (fast_bpe.CL100K, _CL100K_NAMES | {"<|endofprompt|>": 100276}, _EOT, None),
    199998: (fast_bpe.O200K, {_EOT: 199999, "<|endofprompt|>": 200018}, _EOT, None),
    128000: (fast_bpe.LLAMA3, {t: 128000 + i for i, t in enumerate(_LLAMA3_NAMES)}, _LLAMA3_NAMES[1], _LLAMA3_NAMES[0]),
    151643: (fast_bpe.QWEN2, {_EOT: 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}, _EOT, None),
}
_NFC_COUNTS = (151643,)  # Qwen normalizes before

# how tiktoken itself writes patterns of the same meaning
_SPELLINGS = {
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": fast_bpe.GPT2,
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s": fast_bpe.CL100K,
}


def from_ranks(data: bytes, config: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Content of a tokenizer.json and of a tokenizer_config.json for a file of lines "base64 rank" (``.tiktoken``,
    Llama 3's ``tokenizer.model``).

    The word pattern is ``pat_str`` of the tokenizer_config.json beside it, else that of the published vocabulary with
    as many ranks; special tokens are those of the config's ``added_tokens_decoder``, else the published ones.

    Raises:
        UserError: a broken file, or a pattern that nothing tells.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UserError(f'{origin}:{number}: not a line of ranks, "base64 rank": {error}') from error
    pattern = config.get("pat_str")
    known = _KNOWN.get(len(ranks))
    if pattern is None and known is None:
        raise UserError(
            f"{origin}: {len(ranks)} ranks are no vocabulary whose word pattern is known: put it as "
            f'{{"pat_str": "..."}} into a tokenizer_config.json beside the file'
        )
    special = _config_tokens(config) or (dict(known[1]) if known else {})
    extra: dict[str, Any] = {}
    if known:
        extra["eos_token"] = known[2]
        if known[3]:
            extra |= {"bos_token": known[3], "add_bos_token": True}
    extra = {name: value for name, value in extra.items() if not isinstance(value, str) or value in special}
    if "bos_token" not in extra:
        extra.pop("add_bos_token", None)
    normalizer = {"type": "NFC"} if pattern is None and len(ranks) in _NFC_COUNTS else None
    chosen = pattern if isinstance(pattern, str) else known[0] if known else ""
    return _content(ranks, chosen, special, origin, normalizer), extra


def from_tekken(content: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """As ``from_ranks``, for Mistral's tekken.json: special tokens come before the ranks, BOS before a text."""
    try:
        config = content["config"]
        first, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        entries = content["vocab"][: size - first]
        ranks = {base64.b64decode(entry["token_bytes"]): first + int(entry["rank"]) for entry in entries}
        listed = content.get("special_tokens") or [{"rank": i, "token_str": t} for i, t in enumerate(_TEKKEN_NAMES)]
        names = {int(token["rank"]): str(token["token_str"]) for token in listed}
        pattern = str(config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{origin}: no valid tekken.json: {type(error).__name__} {error}") from error
    special = {names.get(i, f"<SPECIAL_{i}>"): i for i in range(first)}
    extra = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    extra = {name: token for name, token in extra.items() if token in special}
    return _content(ranks, pattern, special, origin), extra | {"add_bos_token": "bos_token" in extra}


def from_merges(
    vocab: Mapping[str, Any], merges: str, config: Mapping[str, Any], origin: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """As ``from_ranks``, for GPT-2's pair of files: vocab.json (encoder.json) and merges.txt (vocab.bpe)."""
    pairs = [line.split(" ") for line in merges.splitlines() if line.strip() and not line.startswith("#version")]
    wrong = next((pair for pair in pairs if len(pair) != 2 or "".join(pair) not in vocab), None)
    if wrong is not None:
        raise UserError(
            f"{origin}: the merge {' '.join(wrong)!r} makes no token of the vocabulary: are the files a pair?"
        )
    if any(letter not in vocab for letter in byte_alphabet()):
        raise UserError(f"{origin}: the vocabulary is no byte-level one (not all 256 bytes): give a tokenizer.json")
    special = _config_tokens(config) or {token: vocab[token] for token in (_EOT,) if token in vocab}
    content = _assemble({**vocab, **special}, pairs, fast_bpe.GPT2, special, None, whole_words=False)
    return content, {"eos_token": _EOT} if _EOT in special else {}


def _config_tokens(config: Mapping[str, Any]) -> dict[str, int]:
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return {}
    return {entry["content"]: int(i) for i, entry in entries.items() if isinstance(entry, dict) and "content" in entry}


def _content(
    ranks: Mapping[bytes, int],
    pattern: str,
    special: Mapping[str, int],
    origin: str,
    normalizer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise UserError(f"{origin}: not all 256 bytes have a rank: the file is cut short or no byte-level vocabulary")
    taken = set(ranks.values())
    if len(taken) < len(ranks) or not taken.isdisjoint(special.values()):
        raise UserError(f"{origin}: two tokens, special ones included, have the same id")
    words = {token.decode("latin-1").translate(letters): rank for token, rank in ranks.items()}
    merges = [
        [word[:i], word[i:]]
        for word in sorted(words, key=words.__getitem__)
        for i in range(1, len(word))
        if word[:i] in words and word[i:] in words
    ]
    pattern = _SPELLINGS.get(pattern, pattern)
    try:
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import Split

        split = Split(Regex(pattern), "isolated")
    except Exception as error:
        raise UserError(f"{origin}: the word pattern does not compile: {error}") from error
    word = next((token for token in special if len(split.pre_tokenize_str(token)) < 2), None)
    if word is not None:  # looked up as a whole, it would be read as the control token wherever it is typed
        raise UserError(f"{origin}: the word pattern takes the special token {word!r} for a word: rename one of them")
    return _assemble({**words, **special}, merges, pattern, special, normalizer, whole_words=True)


def _assemble(
    vocab: Mapping[str, int],
    merges: list[list[str]],
    pattern: str,
    special: Mapping[str, int],
    normalizer: dict[str, Any] | None,
    whole_words: bool,
) -> dict[str, Any]:
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    by_regex = {**by_bytes, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": t, **flags} for t, i in sorted(special.items(), key=lambda item: item[1])
        ],
        "normalizer": normalizer,
        "pre_tokenizer": by_regex
        if pattern == fast_bpe.GPT2
        else {"type": "Sequence", "pretokenizers": [split, by_bytes]},
        "post_processor": None,
        "decoder": {**by_bytes, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": whole_words,
            "vocab": dict(vocab),
            "merges": merges,
        },
    }
