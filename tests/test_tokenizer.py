"""The tokenizer's conventions: BOS and EOS once, text back unchanged, bytes per token, chats."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from lit_llm.data import Tokenizer, train_tokenizer
from lit_llm.errors import UserError
from tests.data_helpers import BOS, EOS, LLAMA3_TEMPLATE, llama3_style, sentencepiece_style, word_level, write_tokenizer

CORPUS = ["def hello(name):\n    return f'hello {name}'\n", "the cat sat on the mat, the dog on the log. " * 9]


def count(tokenizer: Tokenizer, ids: list[int]) -> tuple[int, int]:
    """How often BOS and EOS stand in ``ids``."""
    return sum(i == tokenizer.bos_token_id for i in ids), sum(i == tokenizer.eos_token_id for i in ids)


def random_text(rng: random.Random, length: int = 40) -> str:
    ranges = [(0, 0x7F), (0x80, 0x7FF), (0x2000, 0x20FF), (0x4E00, 0x9FFF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(0, length)))


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(CORPUS, 270)


@pytest.fixture
def llama3(tmp_path: Path) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path / "llama3", llama3_style()))


# ------------------------------------------------------------------- training and round trips


def test_any_text_comes_back_unchanged(trained: Tokenizer) -> None:
    rng = random.Random(0)
    texts = [random_text(rng) for _ in range(300)]
    texts += ["", " ", "\r\n\r\n \t", "a\u2028b\ufeffc\x00", "<|endoftext|> is typed <|endoftext|>", "🙂 数学 é"]
    for text, ids in zip(texts, trained.encode_batch(texts), strict=True):
        assert trained.decode(ids) == text
        assert trained.decode(trained.encode(text, eos=True)) == text
        assert trained.eos_token_id not in ids
        assert ids == trained.encode(text)


def test_training_is_deterministic_and_honours_the_size(trained: Tokenizer) -> None:
    assert trained.vocab_size == 270
    assert train_tokenizer(iter(CORPUS), 270).to_files() == trained.to_files()
    code = (
        "from lit_llm.data import train_tokenizer; from tests.test_tokenizer import CORPUS;"
        "print(train_tokenizer(CORPUS, 270).fingerprint)"
    )
    single = subprocess.run(
        [sys.executable, "-c", code],
        env={"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert single.stdout.strip() == trained.fingerprint
    assert train_tokenizer(["ab"], 8192).vocab_size == 259  # what there is
    with pytest.raises(UserError, match="256 .* too small"):
        train_tokenizer(CORPUS, 256)


def test_the_trained_tokenizer_loads_in_transformers(trained: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trained.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "the cat sat: 数学\n\n  🙂"
    assert theirs(text)["input_ids"] == trained.encode(text)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (trained.eos_token_id, None)


def test_a_tokenizer_trained_for_chats_speaks_chatml(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(CORPUS, 280, chat=True)
    assert (tokenizer.vocab_size, tokenizer.eos_token, tokenizer.pad_token_id) == (280, "<|im_end|>", 0)
    messages = [{"role": "user", "content": "the cat"}]
    ids = tokenizer.encode_chat(messages)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 2, 1)
    assert (
        tokenizer.decode(ids, skip_special_tokens=False)
        == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    )
    assert 2 not in tokenizer.encode("<|im_end|>")
    tokenizer.save(tmp_path)
    assert Tokenizer(tmp_path).chat_template == tokenizer.chat_template
    with pytest.raises(UserError, match="need 259"):
        train_tokenizer(CORPUS, 258)


def test_a_text_that_goes_on_has_nothing_put_before_it(tmp_path: Path, llama3: Tokenizer) -> None:
    assert llama3.encode("hi", continues=True) == llama3.encode("hi", bos=False)
    assert llama3.encode("hi", continues=True, bos=True) == llama3.encode("hi")
    metaspace = Tokenizer(write_tokenizer(tmp_path / "a", sentencepiece_style()))
    content = json.loads(sentencepiece_style().to_str()) | {"pre_tokenizer": None}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
    prepend = Tokenizer.from_files({"tokenizer.json": json.dumps(content)})
    for tokenizer in (metaspace, prepend):
        he = tokenizer.encode("he", continues=True)
        assert tokenizer.encode("he") == [*tokenizer.encode("", continues=True), 259, *he]
        assert tokenizer.encode("he</s>", continues=True, allow_special=True) == [*he, 2]
    byte_level = json.loads(llama3_style(bos_in_json=False).to_str())
    byte_level["pre_tokenizer"]["add_prefix_space"] = True
    tokenizer = Tokenizer.from_files({"tokenizer.json": json.dumps(byte_level)})
    assert tokenizer.decode(tokenizer.encode("hi")) == " hi"
    assert tokenizer.decode(tokenizer.encode("hi", continues=True)) == "hi"


# ------------------------------------------------------------------- BOS and EOS (cases 19, 20)


def test_eos_does_not_drive_out_bos(llama3: Tokenizer) -> None:
    bos, eos = llama3.bos_token_id, llama3.eos_token_id
    assert (llama3.bos_token, llama3.eos_token) == (BOS, EOS)
    body = llama3.encode("hi", bos=False)
    assert len(body) == 2
    assert llama3.encode("hi", eos=True) == [bos, *body, eos]
    assert llama3.encode("hi") == llama3.encode("hi", bos=True) == [bos, *body]
    assert llama3.encode("", eos=True) == [bos, eos]


@pytest.mark.parametrize("suffix_too", [False, True])
def test_a_post_processor_that_adds_eos_does_not_double_it(tmp_path: Path, suffix_too: bool) -> None:
    backend = llama3_style()
    single = f"{BOS} $A {EOS}" if suffix_too else f"$A {EOS}"
    ids = {token: backend.token_to_id(token) for token in (BOS, EOS)}
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
    tokenizer = Tokenizer(write_tokenizer(tmp_path, backend))
    front = [ids[BOS]] if suffix_too else []
    assert tokenizer.encode("a", eos=True) == [*front, *tokenizer.encode("a", bos=False), ids[EOS]]
    assert ids[EOS] not in tokenizer.encode("a")


def test_add_bos_token_of_the_config_counts(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t", llama3_style(bos_in_json=False), bos_token=BOS, eos_token={"content": EOS})
    plain = Tokenizer(folder)
    assert plain.encode("hi")[0] != plain.bos_token_id
    assert plain.encode("hi", bos=True)[0] == plain.bos_token_id
    folder = write_tokenizer(folder, llama3_style(bos_in_json=False), bos_token=BOS, eos_token=EOS, add_bos_token=True)
    for tokenizer in (Tokenizer(folder), Tokenizer(folder / "tokenizer.json")):
        ids = tokenizer.encode("hi", eos=True)
        assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
        assert count(tokenizer, ids) == (1, 1)
    both = Tokenizer(write_tokenizer(tmp_path / "both", llama3_style(), bos_token=BOS, add_bos_token=True))
    assert count(both, both.encode("hi")) == (1, 0)
    with pytest.raises(UserError, match="add_bos_token"):
        Tokenizer(write_tokenizer(tmp_path / "none", word_level(9), add_bos_token=True))


def test_control_tokens_in_a_text_are_plain_unless_asked_for(llama3: Tokenizer) -> None:
    text = f"{BOS}a{EOS}"
    plain = llama3.encode(text, eos=True)
    assert count(llama3, plain) == (1, 1)
    assert llama3.decode(plain) == text
    asked = llama3.encode(text, eos=True, allow_special=True)
    assert asked == [llama3.bos_token_id, *llama3.encode("a", bos=False), llama3.eos_token_id]


def test_ids_come_from_the_model_config_where_the_tokenizer_names_none(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t", word_level(9), pad_token="w0")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 5, "bos_token_id": 3}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    tokenizer = Tokenizer(folder)
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (4, 3, 0)
    assert tokenizer.decode([4, 5, 3]) == "w5"  # what a config calls EOS is special
    carried = Tokenizer.from_files(tokenizer.to_files())  # without the model's files
    assert (carried.eos_token_id, carried.bos_token_id, carried.pad_token_id) == (4, 3, 0)


# ------------------------------------------------------------------- chats


def test_a_chat_has_exactly_one_bos(tmp_path: Path) -> None:
    for number, bos_in_json in enumerate((True, False)):
        for config in ({"chat_template": LLAMA3_TEMPLATE}, {"chat_template": LLAMA3_TEMPLATE, "add_bos_token": True}):
            folder = tmp_path / f"{number}{len(config)}"
            write_tokenizer(folder, llama3_style(bos_in_json), bos_token=BOS, eos_token=EOS, **config)
            tokenizer = Tokenizer(folder)
            ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
            assert ids[0] == tokenizer.bos_token_id
            assert count(tokenizer, ids) == count(tokenizer, tokenizer.encode("hi", bos=True)) == (1, 0)


def test_chats_equal_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = (
        "{%- if messages[0].role == 'tool' %}{{ raise_exception('no tools first') }}{% endif %}\n"
        "{{- bos_token }}{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n"
        "[{{ m.role }}] {{ m | tojson }} {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    )
    folder = write_tokenizer(tmp_path, llama3_style(), bos_token=BOS, eos_token=EOS)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    messages = [{"role": r, "content": f"<{r}> 'é' & co"} for r in ("system", "user", "assistant")]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer(folder)
    assert ours.render_chat(messages) == theirs.apply_chat_template(messages, tokenize=False)
    assert ours.encode_chat(messages) == theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
    with pytest.raises(UserError, match="no tools first"):
        ours.encode_chat([{"role": "tool", "content": "x"}])


def test_chatml_without_a_template_and_bad_chats(trained: Tokenizer, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    expected = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert trained.render_chat(messages, add_generation_prompt=False) == expected
    assert (
        trained.decode(trained.encode_chat(messages), skip_special_tokens=False) == expected + "<|im_start|>assistant\n"
    )
    for wrong in ([], "hi", [{"role": "user"}], [{"role": "user", "content": None}], ["hi"]):
        with pytest.raises(UserError, match="message"):
            trained.encode_chat(wrong)  # type: ignore[arg-type]
    folder = write_tokenizer(tmp_path, llama3_style(), chat_template="{% if %}")
    with pytest.raises(UserError, match="does not parse"):
        Tokenizer(folder).encode_chat(messages)


def test_the_template_is_sandboxed(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, llama3_style(), chat_template="{{ messages.__class__.__base__ }}")
    with pytest.raises(UserError, match="unsafe"):
        Tokenizer(folder).encode_chat([{"role": "user", "content": "hi"}])


# ------------------------------------------------------------------- bytes, ids, files


def test_byte_lengths_sum_to_the_text(trained: Tokenizer, tmp_path: Path) -> None:
    rng = random.Random(1)
    byte_level = [trained, Tokenizer(write_tokenizer(tmp_path / "a", llama3_style()))]
    for tokenizer in byte_level:
        lengths = tokenizer.token_byte_lengths()
        assert lengths.shape == (tokenizer.vocab_size,)
        for text in [random_text(rng) for _ in range(50)]:
            assert lengths[tokenizer.encode(text, eos=True)].sum() == len(text.encode())
    pieces = Tokenizer(write_tokenizer(tmp_path / "b", sentencepiece_style()))
    lengths = pieces.token_byte_lengths()
    text = "Hello there é 数\n"
    ids = pieces.encode(text, bos=True, eos=True)
    assert pieces.decode(ids) == text
    assert lengths[ids].sum() == len((" " + text).encode())  # the blank that the decoder drops
    assert lengths[ids[0]] == lengths[ids[-1]] == 0


def test_padding_truncation_and_dropout_of_the_file_are_off(tmp_path: Path) -> None:
    backend = llama3_style()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    folder = write_tokenizer(tmp_path, backend)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] |= {"dropout": 0.5, "vocab": {**content["model"]["vocab"], "ab": 300}, "merges": [["a", "b"]]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"post-processor puts ids \[256\]"):
        Tokenizer(folder)  # the added tokens moved on by one
    (folder / "tokenizer.json").write_text(json.dumps({**content, "post_processor": None}))
    assert Tokenizer(folder).encode("ab" * 50) == [300] * 50


def test_vocab_size_counts_up_to_the_highest_id() -> None:
    content = json.loads(word_level(9).to_str())
    content["model"]["vocab"]["far"] = 700
    tokenizer = Tokenizer.from_files({"tokenizer.json": json.dumps(content)})
    assert tokenizer.vocab_size == 701
    assert len(tokenizer.token_byte_lengths()) == 701
    with pytest.raises(UserError, match="token id 701 .* 701 ids"):
        tokenizer.decode([1, 701])


def test_files_carry_everything(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "a", llama3_style(), bos_token=BOS, eos_token=EOS, pad_token="<|eot_id|>")
    (folder / "chat_template.jinja").write_text(LLAMA3_TEMPLATE, encoding="utf-8")
    first = Tokenizer(folder)
    assert all(type(name) is type(text) is str for name, text in first.to_files().items())
    first.save(tmp_path / "b")
    for other in (Tokenizer.from_files(first.to_files()), pickle.loads(pickle.dumps(first)), Tokenizer(tmp_path / "b")):
        assert other.fingerprint == first.fingerprint
        assert other.to_files() == first.to_files()
        assert other.chat_template == LLAMA3_TEMPLATE
        assert (other.bos_token_id, other.eos_token_id, other.pad_token_id) == (256, 257, 260)


def test_the_fingerprint_tells_what_changes_the_ids(tmp_path: Path) -> None:
    marks = set()
    for number, config in enumerate(({}, {"eos_token": "<|eot_id|>"}, {"eos_token": EOS})):
        marks.add(Tokenizer(write_tokenizer(tmp_path / f"{number}", llama3_style(), **config)).fingerprint)
    marks.add(Tokenizer(write_tokenizer(tmp_path / "x", llama3_style(bos_in_json=False))).fingerprint)
    assert len(marks) == 3  # naming the EOS that is found anyway changes nothing


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no tokenizer at"),
        (b"", r"no valid tokenizer\.json: Expecting value"),
        (b"{}", r"no valid tokenizer\.json"),
        (b"[1]", "no JSON object"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "empty vocabulary"),
    ],
)
def test_a_missing_or_broken_file_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        Tokenizer(path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_what_a_tokenizer_lacks_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json in this folder"):
        Tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"lacks '<nope>'"):
        Tokenizer(write_tokenizer(tmp_path / "a", word_level(9), eos_token="<nope>"))
    bare = Backend.from_str(word_level(9).to_str().replace("</s>", "w8"))
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "b", bare))
    for options, kind in (({"bos": True}, "BOS"), ({"eos": True}, "EOS")):
        with pytest.raises(UserError, match=f"no {kind} token"):
            tokenizer.encode("w1", **options)
    with pytest.raises(UserError, match="surrogate"):
        tokenizer.encode("a\ud800")
