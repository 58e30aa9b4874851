"""The fast engine gives the library's ids or stands aside; a text cut at a safe place keeps its ids."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from lit_llm.data import Tokenizer, train_tokenizer
from lit_llm.data import fast_bpe as fast
from lit_llm.errors import UserError
from tests.data_helpers import llama3_style, sentencepiece_style, word_level

CORPUS = [
    "def hello(name):\n    return f'hello {name}'\n\n\n",
    "The cat sat on the mat. It'll run, we've seen 12345 cats 2024-01-02; IT'S ok!\r\n" * 3,
    "数学和语文。\n第二行\n" * 3 + "été ÉTÉ\n\tx == 10 // 3 /// path/to/file\n\n  …" * 3,
] * 3
WORDS = [
    "'s",
    "'S",
    "'LL",
    "'ſ",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\n\n",
    "\t",
    "cat",
    "CAT",
    "aBc",
    "é",
    "É",
    "e\u0301",
    "数学",
]
WORDS += [
    "123",
    "1",
    "٣",
    "½",
    "。",
    "...",
    "//",
    "/\n",
    "<|endoftext|>",
    "\u3000",
    "\u0085",
    "ǅ",
    "ʰ",
    "ा",
    "'",
    "🙂",
    "\0",
]
WORDS += ["<t>", "<t>x", "\u1e030"]
PATTERNS = {"gpt2": fast.GPT2, "llama3": fast.LLAMA3, "cl100k": fast.CL100K, "qwen2": fast.QWEN2, "o200k": fast.O200K}
PATTERNS |= {"tekken": fast.TEKKEN}


def byte_level(pattern: str | None, vocab_size: int = 420, digits: bool = False) -> Backend:
    backend = Backend(models.BPE())
    parts: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    parts += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    parts += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts) if len(parts) > 1 else parts[0]
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size, show_progress=False, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
        ),
    )
    return backend


def tokenizer_of(backend: Backend, change: Callable[[dict[str, Any]], None] | None = None) -> Tokenizer:
    content = json.loads(backend.to_str())
    if change:
        change(content)
    return Tokenizer.from_files({"tokenizer.json": json.dumps(content)})


def sample(rng: random.Random, length: int = 30) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(0, length)))


def kinds() -> dict[str, Tokenizer]:
    made = {name: tokenizer_of(byte_level(pattern)) for name, pattern in PATTERNS.items()}
    made["byte_level"] = tokenizer_of(byte_level(None))
    made["digits"] = tokenizer_of(byte_level(None, digits=True))
    nfc = byte_level(fast.QWEN2)
    nfc.normalizer = normalizers.NFC()
    nfc.add_tokens([AddedToken("<t>", normalized=False), AddedToken("<t>x", normalized=False)])
    made["qwen3"] = tokenizer_of(nfc)
    whole = byte_level(fast.LLAMA3)
    made["ignore_merges"] = tokenizer_of(whole, lambda content: content["model"].update(ignore_merges=True))
    return made


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return kinds()


def test_both_engines_give_the_same_ids(tokenizers: dict[str, Tokenizer]) -> None:
    rng = random.Random(0)
    for name, tokenizer in tokenizers.items():
        assert tokenizer.engine == "tiktoken", name
        taken = 0
        for text in [*CORPUS, *(sample(rng) for _ in range(300))]:
            found = tokenizer._fast.encode(text)  # type: ignore[union-attr]
            if found is not None:
                taken += 1
                assert found.tolist() == tokenizer.encode(text), (name, text)
            assert tokenizer.check_engine(text)
        assert taken > 50, name


def test_parts_have_bos_and_eos_where_they_begin_and_end(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in (*tokenizers.values(), tokenizer_of(llama3_style()), tokenizer_of(sentencepiece_style())):
        texts = ["he cat", "\nthe end", "", "all \u1e030", "e\u0301"]
        begins, ends = [True, False, False, True, False], [False, True, True, True, False]
        rows = tokenizer.encode_parts(texts, begins, ends)
        assert all(row.dtype == np.uint32 for row in rows)
        for text, begin, end, row in zip(texts, begins, ends, rows, strict=True):
            assert row.tolist() == tokenizer.encode(text, eos=end, continues=not begin)
    with pytest.raises(UserError, match="surrogate"):
        tokenizers["gpt2"].encode_parts(["a", "b\ud800"], [True, True], [False, False])
    with pytest.raises(TypeError, match="NoneType"):
        tokenizers["gpt2"].encode_parts([None], [True], [False])  # type: ignore[list-item]
    with pytest.raises(UserError, match="no EOS token"):
        tokenizer_of(Backend.from_str(word_level(9).to_str().replace("</s>", "w8"))).encode_parts(
            ["w1"], [True], [True]
        )


def test_the_engine_can_be_held_and_survives_pickling(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = pickle.loads(pickle.dumps(tokenizers["gpt2"]))
    assert tokenizer.engine == "tiktoken"
    tokenizer.use_engine("tokenizers")
    assert tokenizer.engine == pickle.loads(pickle.dumps(tokenizer)).engine == "tokenizers"
    assert tokenizer.encode_parts(["the cat"], [True], [False])[0].tolist() == tokenizer.encode("the cat")
    tokenizer.use_engine(None)
    assert tokenizer.engine == "tiktoken"
    with pytest.raises(ValueError, match="tokenizers"):
        tokenizer.use_engine("fast")


def test_what_is_not_proved_is_left_to_the_library(tokenizers: dict[str, Tokenizer]) -> None:
    def model(**fields: Any) -> Callable[[dict[str, Any]], None]:
        return lambda content: content["model"].update(fields)

    def unknown_pattern(content: dict[str, Any]) -> None:
        content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{L}+|\P{L}+"

    def lower(content: dict[str, Any]) -> None:
        content["normalizer"] = {"type": "Lowercase"}

    def missing_byte(content: dict[str, Any]) -> None:
        del content["model"]["vocab"]["Ā"]

    def added(**flags: bool) -> Callable[[dict[str, Any]], None]:
        token = {"id": 999, "content": "<t>", "special": False, "normalized": False}
        token |= {"single_word": False, "lstrip": False, "rstrip": False} | flags
        return lambda content: content["added_tokens"].append(token)

    backend = byte_level(fast.LLAMA3)
    assert tokenizer_of(backend, added()).engine == "tiktoken"
    changes = [model(byte_fallback=True), unknown_pattern, lower, missing_byte, added(rstrip=True)]
    for change in (*changes, added(single_word=True)):
        assert tokenizer_of(backend, change).engine == "tokenizers"
    assert tokenizer_of(sentencepiece_style()).engine == "tokenizers"


def merges_only(merges: list[tuple[str, str]], extra: list[str] = [], **model: Any) -> Tokenizer:  # noqa: B006
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for token in [left + right for left, right in merges] + extra:
        vocab.setdefault(token, len(vocab))
    backend = Backend(models.BPE(vocab=vocab, merges=merges, **model))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer_of(backend)


def test_merges_that_tiktoken_would_order_or_make_otherwise() -> None:
    rng = random.Random(1)
    cases = [
        merges_only([("a", "b"), ("b", "c"), ("c", "d"), ("ab", "cd"), ("bc", "d"), ("a", "bcd")]),  # bcd unreachable
        merges_only([("b", "c"), ("a", "b"), ("ab", "c"), ("d", "a"), ("a", "bc")]),  # abc by its second maker
        merges_only([("a", "b")], extra=["abc", "bc", "dd"]),  # tokens that no merge makes
        merges_only([("a", "a"), ("aa", "a"), ("aa", "aa"), ("aaa", "aa")]),
    ]
    for tokenizer in cases:
        assert tokenizer.engine == "tiktoken"
        for _ in range(300):
            assert tokenizer.check_engine("".join(rng.choices("abcd ", k=rng.randint(0, 30))))
    for _ in range(60):  # any list of merges over a few letters
        pool, merges = list("abc"), []
        for _ in range(rng.randint(1, 12)):
            pair = rng.choice(pool), rng.choice(pool)
            if pair not in merges:
                merges.append(pair)
                pool.append("".join(pair))
        for whole in (False, True):
            tokenizer = merges_only(merges, ignore_merges=whole)
            if not whole:
                assert tokenizer.engine == "tiktoken"
            for _ in range(40):
                assert tokenizer.check_engine("".join(rng.choices("abc", k=rng.randint(0, 25))))
    # a word found whole, whose parts a pair of tiktoken's would make inside another word
    assert merges_only([("a", "b")], extra=["bc"], ignore_merges=True).engine == "tokenizers"
    far = merges_only([("a", "b")], extra=["acdb"], ignore_merges=True)
    assert far.engine == "tiktoken"
    assert far.encode_parts(["acdb acdb"], [True], [False])[0].tolist() == far.encode("acdb acdb")


def test_added_tokens_shadow_each_other_as_in_the_library() -> None:
    backend = byte_level(None)
    backend.add_special_tokens(["<|a|>", "x<t"])
    backend.add_tokens([AddedToken(t, normalized=False) for t in ("a|>b", "<t>", "<t><t>", "\n\n")])
    tokenizer = tokenizer_of(backend)
    assert tokenizer.engine == "tiktoken"
    rng = random.Random(3)
    for _ in range(500):
        assert tokenizer.check_engine("".join(rng.choices(["<|a|>", "a|>b", "<t>", "<t", "x", "\n", "b", ">"], k=9)))


def test_runs_that_end_the_regex_engine_are_taken_by_the_library(tokenizers: dict[str, Tokenizer]) -> None:
    for text in (" " * 1_200_000, "\n" * 1_200_000 + "x", "a" * 300_000):
        (row,) = tokenizers["gpt2"].encode_parts([text], [True], [False])
        assert row.tolist() == tokenizers["gpt2"].encode(text)


def test_the_swift_search_misses_no_newer_letter() -> None:
    newer = fast._NEWER.findall("".join(chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000))
    assert len(newer) > 9000
    assert all(map(fast._MAYBE_NEWER.match, newer))


@pytest.mark.slow
def test_the_character_classes_of_both_regex_engines_are_the_same() -> None:
    from tiktoken._tiktoken import CoreBPE

    points = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000 and not fast._NEWER.match(chr(i))]
    kinds = [r"\s", r"\p{L}", r"\p{N}", r"\p{M}", r"\p{Lu}", r"\p{Ll}", r"\p{Lt}", r"\p{Lm}", r"\p{Lo}"]
    for kind in (*kinds, r"[^\s\p{L}\p{N}]", "(?i:s)", "(?i:t)", "(?i:l)"):
        split = pre_tokenizers.Split(Regex(rf"(?:{kind})\.|(?m:.)"), "isolated")
        for start in range(0, len(points), 100_000):
            chunk = [c for c in points[start : start + 100_000] if c != "."]
            text = "".join(c + "." for c in chunk)
            theirs = {piece[0] for piece, _ in split.pre_tokenize_str(text) if len(piece) == 2}
            tokens = [bytes([i]) for i in range(256)]
            pairs = {len(tokens) + i: c for i, c in enumerate(chunk)}
            tokens += [(c + ".").encode() for c in chunk] + [c.encode() for c in chunk if not c.isascii()]
            core = CoreBPE({token: i for i, token in enumerate(tokens)}, {}, rf"(?:{kind})\.|(?s:.)")
            assert {pairs[i] for i in core.encode_ordinary(text) if i in pairs} == theirs, kind


# ------------------------------------------------------------------- cuts


def unigram(split: bool) -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    trainer = trainers.UnigramTrainer(vocab_size=120, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def test_a_text_cut_at_the_last_safe_place_keeps_its_ids(tokenizers: dict[str, Tokenizer]) -> None:
    def whole(content: dict[str, Any]) -> None:
        content["pre_tokenizer"] = None
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}

    rng = random.Random(4)
    others = {
        "sentencepiece": tokenizer_of(sentencepiece_style()),
        "llama2": tokenizer_of(sentencepiece_style(), whole),
    }
    others["unigram"] = tokenizer_of(unigram(split=True))
    for name, tokenizer in (tokenizers | others).items():
        cuts = 0
        for _ in range(300):
            text = sample(rng, 8) + rng.choice(["", "he sat", " 12 ", "a\nb"]) + sample(rng, 8)
            cut = tokenizer.last_cut(text)
            if cut is not None:
                assert 0 < cut < len(text)
                cuts += 1
                for end in ("", sample(rng, 4)):  # whatever follows
                    parts = tokenizer.encode_parts([text[:cut], text[cut:] + end], [True, False], [False, False])
                    assert np.concatenate(parts).tolist() == tokenizer.encode(text + end), (name, text, cut)
        assert cuts > 20, name
    assert tokenizers["gpt2"].last_cut("a cat\n" + "x" * 10_000) == 6
    assert tokenizers["gpt2"].last_cut("cat " * 5_000) == 4 * 4999 + 3
    assert tokenizers["gpt2"].last_cut("") is None


def test_where_no_cut_is_certain() -> None:
    def line_end_in(content: dict[str, Any]) -> None:
        content["model"]["vocab"] |= {"\n": 900, "e\n": 901}
        content["model"]["merges"].append(["e", "\n"])

    def token(text: str) -> Callable[[dict[str, Any]], None]:
        new = {"id": 999, "content": text, "special": True, "normalized": False}
        new |= {"single_word": False, "lstrip": False, "rstrip": False}
        return lambda content: content["added_tokens"].append(new)

    text = "the cat sat\nhe said\n"
    for tokenizer in (
        tokenizer_of(unigram(split=False)),
        tokenizer_of(sentencepiece_style(), line_end_in),
        tokenizer_of(sentencepiece_style(), token("<\n>")),
        tokenizer_of(byte_level(None), token("<my token>")),
        tokenizer_of(word_level(9)),
    ):
        assert tokenizer.last_cut(text) is None
    assert tokenizer_of(sentencepiece_style()).last_cut(text) == 19
    assert train_tokenizer(CORPUS, 300).last_cut(text) == 19


def test_a_tokenizer_in_use_needs_no_tiktoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tiktoken._tiktoken", None)
    tokenizer = train_tokenizer(CORPUS, 300)
    assert tokenizer.engine == "tokenizers"
    assert tokenizer.encode_parts(["the cat"], [True], [False])[0].tolist() == tokenizer.encode("the cat")
