"""SentencePiece models, tiktoken ranks, tekken.json and GPT-2's files give the ids of the libraries they come from."""

from __future__ import annotations

import base64
import io
import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from lit_llm.data import Tokenizer, train_tokenizer
from lit_llm.data import fast_bpe as fast
from lit_llm.data.tokenizer_json import byte_alphabet
from lit_llm.errors import UserError
from tests.test_tokenizer import random_text

CORPUS = [
    "The cat sat on the mat, and the dog on the log.",
    "def hello(name): return f'hello {name}' # 1 + 2 = 345",
    "It'll run when we've seen 12345 cats; the other cats sat there and then.",
    "naïve café über, the Ärger of the others",
] * 12
WORDS = ["the", " cat", " ", "  ", "\n", "\t", "Hello", "É", "数学", "123", "...", "<s>", "</s>", "<unk>", "<pad>"]
WORDS += [
    "<0x41>",
    "▁",
    "\u3000",
    "é",
    "e\u0301",
    "🙂",
    "\0",
    "ﬁ",
    "[REF]",
    " [REF] ",
    "'s",
    "'S",
    "9999",
    " \n",
    "//\n",
]


def samples(count: int = 250, words: Sequence[str] = WORDS) -> list[str]:
    rng = random.Random(0)
    texts = ["".join(rng.choices(words, k=rng.randint(0, 12))) for _ in range(count)]
    return [*CORPUS[:4], "", " ", "   ", " a", "a ", *texts, *(random_text(rng, 12) for _ in range(count // 5))]


def trained_model(**options: Any) -> bytes:
    spm = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    options = {"vocab_size": 360, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1, "pad_id": 3} | options
    spm.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=out, **options)
    return out.getvalue()


def their_ids(model: bytes) -> Callable[[str], list[int]]:
    import sentencepiece as spm

    processor = spm.SentencePieceProcessor(model_proto=model)
    return lambda text: list(processor.encode(text))


# ------------------------------------------------------------------- SentencePiece


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
        | {"remove_extra_whitespaces": False},  # the Llama family
        {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "add_dummy_prefix": False}
        | {"remove_extra_whitespaces": False, "user_defined_symbols": ["[REF]", "▁▁"]},  # Gemma's way
        {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
        | {"remove_extra_whitespaces": False, "user_defined_symbols": ["[REF]"]},
        {"model_type": "bpe", "normalization_rule_name": "identity"},
        {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
        {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"}
        | {"remove_extra_whitespaces": False, "split_by_whitespace": False},
        {"model_type": "unigram", "normalization_rule_name": "identity", "user_defined_symbols": ["[REF]"]},
        {"model_type": "unigram"},  # T5's way, NMT's NFKC
        {"model_type": "bpe", "byte_fallback": True},
    ],
    ids=["llama", "gemma", "symbols", "bpe", "unigram", "phrases", "unigram-symbols", "t5", "bpe-nmt"],
)
def test_a_sentencepiece_model_gives_its_own_ids(tmp_path: Path, options: dict[str, Any]) -> None:
    model = trained_model(**options)
    (tmp_path / "tokenizer.model").write_bytes(model)
    tokenizer = Tokenizer(tmp_path)
    theirs = their_ids(model)
    unigram = options["model_type"] == "unigram"
    # typed control tokens are plain text to both, though the unigram one may cut them otherwise
    words = [word for word in WORDS if not (unigram and word.startswith("<"))]
    if "normalization_rule_name" not in options:
        words = [word for word in words if word not in ("\0", "e\u0301", "▁")]
    texts = samples(words=words)
    if "normalization_rule_name" not in options:
        texts = texts[: 250 + 9]  # random code points: the two normalizers know different versions of Unicode
    for text in texts:
        if text not in ("[REF]", "▁▁"):
            assert tokenizer.encode(text, bos=False) == theirs(text), text
    specials = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert specials == {1, 2, 3}
    for text in ("<s>", "</s>a", "<pad>", "x <s> y", "<unk>", "<0x41>"):
        assert not specials & set(tokenizer.encode(text, bos=False)), text
        if options.get("byte_fallback"):
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a</s>", bos=False, allow_special=True)[-1] == 2
    again = Tokenizer.from_files(tokenizer.to_files())
    assert again.encode("The cat", eos=True) == tokenizer.encode("The cat", eos=True)


def test_what_a_sentencepiece_text_begins_with(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(
        trained_model(
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
        )
    )
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("the cat")[0] == tokenizer.bos_token_id  # the Llama family's way
    for text in ("the cat\n sat", " the", "  the\n", "\n\nthe"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        whole = tokenizer.encode(text, bos=False)
        assert tokenizer.encode("", bos=False) + tokenizer.encode(text, continues=True) != whole  # no blank before it
    text = "The cat\n  sat\n the dog \n\n"
    cut = tokenizer.last_cut(text)
    assert cut is not None
    assert tokenizer.encode(text[:cut]) + tokenizer.encode(text[cut:], continues=True) == tokenizer.encode(text)
    # behind a control token a blank is that blank, not two
    ids = tokenizer.encode("a</s> the", bos=False, allow_special=True)
    assert ids == [*tokenizer.encode("a", bos=False), 2, *tokenizer.encode("the", bos=False)]
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "eos_token": "<pad>"}')
    told = Tokenizer(tmp_path / "tokenizer.model")
    assert (told.encode("the cat")[0] == 1, told.eos_token_id) == (False, 3)
    # whoever else reads the tokenizer.json puts BOS there as well, or not
    for which, prefix in ((tokenizer, [1]), (told, [])):
        assert Backend.from_str(which.to_files()["tokenizer.json"]).encode("the").ids == [*prefix, *told.encode("the")]


def test_tokens_that_a_config_adds_are_taken_in(tmp_path: Path) -> None:
    model = trained_model(model_type="bpe", byte_fallback=True, normalization_rule_name="identity")
    (tmp_path / "tokenizer.model").write_bytes(model)
    size = Tokenizer(tmp_path).vocab_size
    tokens = {
        str(size): {"content": "<|im_end|>", "special": True},
        str(size + 2): {"content": "<t>", "special": False},
    }
    config = {"added_tokens_decoder": tokens, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (size + 3, size)
    ids = tokenizer.encode("the<|im_end|><t>")
    assert (size in ids, ids[-1]) == (False, size + 2)
    assert size in tokenizer.encode("the<|im_end|>", allow_special=True)
    tokens["1"] = {"content": "the"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="'the' the id 1"):
        Tokenizer(tmp_path)


def test_texts_cut_at_safe_places_keep_the_ids_of_a_unigram_model(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(trained_model(model_type="unigram"))
    tokenizer = Tokenizer(tmp_path)
    rng = random.Random(5)
    words = [word for word in WORDS if word not in ("\0", "e\u0301", "▁")]
    for _ in range(200):
        text = "".join(rng.choices(words, k=6)) + "the cat" + "".join(rng.choices(words, k=6))
        cut = tokenizer.last_cut(text)
        assert cut is not None
        assert tokenizer.encode(text[:cut]) + tokenizer.encode(text[cut:], continues=True) == tokenizer.encode(text)


@pytest.mark.parametrize("data", [b"", b"\x0a", b"\x0a\xff\xff\xff", b"hello", b"\x12\x02\x18\x03", bytes(range(256))])
def test_a_broken_sentencepiece_model_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(UserError, match=r"tokenizer\.model: (no valid|a) SentencePiece model"):
        Tokenizer(tmp_path)


def test_other_sentencepiece_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.model").write_bytes(trained_model(model_type="char"))
    with pytest.raises(UserError, match=r"x\.model: .* kind that is not read"):
        Tokenizer(tmp_path / "x.model")


# ------------------------------------------------------------------- ranks


def ranks_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    """The merges of a trained tokenizer as tiktoken has them, its control token left out."""
    model = json.loads(tokenizer.to_files()["tokenizer.json"])["model"]
    alphabet = byte_alphabet()
    tokens = [bytes([byte]) for byte in range(256)]
    for left, right in model["merges"]:
        token = bytes(alphabet[letter] for letter in left + right)
        if token not in tokens:
            tokens.append(token)
    return {token: rank for rank, token in enumerate(tokens)}


def rank_lines(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return ranks_of(train_tokenizer([*CORPUS, "数学和语文 " * 9, "  \n\n \t x" * 9], 400))


PATTERNS = [fast.GPT2, fast.LLAMA3, fast.QWEN2, fast.O200K, fast.TEKKEN]


def tiktoken_ids(pattern: str, ranks: dict[bytes, int]) -> Callable[[str], list[int]]:
    tiktoken = pytest.importorskip("tiktoken")
    return tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}).encode_ordinary


def test_ranks_give_tiktokens_ids(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    from tiktoken_ext import openai_public as public

    own = [public.r50k_pat_str]
    source = Path(public.__file__).read_text(encoding="utf-8")
    own += [
        line.split('r"""')[1].split('"""')[0] for line in source.splitlines() if "pat_str" in line and "{1,3}+" in line
    ]
    assert len(own) == 2
    (tmp_path / "x.tiktoken").write_bytes(rank_lines(ranks))
    for pattern in [*PATTERNS, *own]:
        tokens = {"500": {"content": "<|eot|>", "special": True}}
        config = {"pat_str": pattern, "eos_token": "<|eot|>", "added_tokens_decoder": tokens}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer(tmp_path)
        theirs = tiktoken_ids(pattern, ranks)
        assert tokenizer.engine == "tiktoken"
        for text in samples(100):
            assert tokenizer.encode(text) == theirs(text), (pattern, text)
            assert tokenizer.check_engine(text)
        assert tokenizer.eos_token_id == 500
        assert "pat_str" not in tokenizer.to_files()["tokenizer_config.json"]


def test_a_tekken_file_puts_its_special_tokens_first(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in ranks.items()]
    size = len(vocab) - 5  # the file holds more ranks than it wants used
    config = {
        "pattern": fast.TEKKEN,
        "default_vocab_size": size + 30,
        "default_num_special_tokens": 30,
        "version": "v3",
    }
    path = tmp_path / "tekken_1.json"
    path.write_text(json.dumps({"config": config, "vocab": vocab}))
    tokenizer = Tokenizer(path)
    theirs = tiktoken_ids(fast.TEKKEN, dict(list(ranks.items())[:size]))
    assert (tokenizer.vocab_size, tokenizer.engine) == (size + 30, "tiktoken")
    for text in samples(100):
        assert tokenizer.encode(text, eos=True) == [1, *(i + 30 for i in theirs(text)), 2]
    assert tokenizer.encode("[INST]", allow_special=True) == [1, 3]


def test_a_known_number_of_ranks_names_the_vocabulary(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    made = dict(ranks)
    rng = random.Random(0)
    while len(made) < 128_000:
        made.setdefault(rng.randbytes(6), len(made))
    (tmp_path / "tokenizer.model").write_bytes(rank_lines(made))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == 128_256
    theirs = tiktoken_ids(fast.LLAMA3, made)
    for text in samples(50):
        assert tokenizer.encode(text, eos=True) == [128_000, *theirs(text), 128_001]
    assert tokenizer.encode("<|eot_id|>", allow_special=True) == [128_000, 128_009]


def test_gpt2s_pair_of_files(tmp_path: Path) -> None:
    trained = train_tokenizer(CORPUS, 400)
    model = json.loads(trained.to_files()["tokenizer.json"])["model"]
    merges = "#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"])
    for vocab_name, merges_name in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        folder = tmp_path / vocab_name
        folder.mkdir()
        (folder / vocab_name).write_text(json.dumps(model["vocab"]), encoding="utf-8")
        (folder / merges_name).write_text(merges, encoding="utf-8")
        for path in (folder, folder / vocab_name, folder / merges_name):
            tokenizer = Tokenizer(path)
            for text in samples(50):
                assert tokenizer.encode(text, eos=True) == trained.encode(text, eos=True)
    (folder / merges_name).write_text("a b c\n")
    with pytest.raises(UserError, match="merge 'a b c'"):
        Tokenizer(folder)
    (folder / merges_name).write_text(merges)
    (folder / vocab_name).write_text('{"a": 1, "b": 2}')
    with pytest.raises(UserError, match="are the files a pair"):
        Tokenizer(folder)


def test_broken_rank_files_are_named(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    path = tmp_path / "x.tiktoken"
    for data, message in (
        (rank_lines(ranks), r"\d+ ranks are no vocabulary whose word pattern is known"),
        (rank_lines(ranks) + b"??? 9\n", rf"x\.tiktoken:{len(ranks) + 1}: not a line of ranks"),
        (rank_lines(ranks) + b"QUJD\n", rf"x\.tiktoken:{len(ranks) + 1}: not a line of ranks"),
    ):
        path.write_bytes(data)
        with pytest.raises(UserError, match=message):
            Tokenizer(path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pat_str": fast.GPT2}))
    cases = [(dict(list(ranks.items())[5:]), "256 bytes"), ({**ranks, b"\0\0\0": 3}, "same id")]
    for wrong, message in cases:
        path.write_bytes(rank_lines(wrong))
        with pytest.raises(UserError, match=message):
            Tokenizer(path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pat_str": "(((("}))
    path.write_bytes(rank_lines(ranks))
    with pytest.raises(UserError, match="word pattern does not compile"):
        Tokenizer(path)
    tokens = {"900": {"content": "<|x|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pat_str": r"\S+|\s+", "added_tokens_decoder": tokens}))
    with pytest.raises(UserError, match=r"special token '<\|x\|>' for a word"):
        Tokenizer(path)
    (tmp_path / "tekken.json").write_text('{"config": {}}')
    with pytest.raises(UserError, match=r"no valid tekken\.json"):
        Tokenizer(tmp_path)


# ------------------------------------------------------------------- real ones


@pytest.mark.slow
def test_mistrals_own_files(tmp_path: Path) -> None:
    cache = Path(__file__).parents[1] / ".cache" / "assets"
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob("mistral_common-*.whl")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            str(cache),
            "mistral-common==1.13.1",
        ]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("the package index with mistral-common cannot be reached")
    with zipfile.ZipFile(next(cache.glob("mistral_common-*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if "/data/" in name and (".model" in name or "tekken" in name)]
        assert len(names) >= 5
        for number, name in enumerate(names):
            data = wheel.read(name)
            if "tekken" in name:
                path = tmp_path / f"tekken_{number}.json"
                path.write_bytes(data)
                content = json.loads(data)
                used = content["vocab"][: 131_072 - 1000]
                own = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in used}
                plain = tiktoken_ids(content["config"]["pattern"], own)

                def theirs(text: str, plain: Callable[[str], list[int]] = plain) -> list[int]:
                    return [i + 1000 for i in plain(text)]
            else:
                path = tmp_path / f"{number}.model"
                path.write_bytes(data)
                theirs = their_ids(data)
            tokenizer = Tokenizer(path)
            for text in samples(1000):
                if text != "[REF]":
                    assert tokenizer.encode(text, bos=False) == theirs(text), (name, text)
                    assert tokenizer.check_engine(text)
