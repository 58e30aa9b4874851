"""Conversations: what is trained is what the assistant says, and nothing that is typed becomes a control token."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from lit_llm.data.chat import CHATML
from lit_llm.data.conversation import encode_conversation, encode_prompt, turn_end_ids
from lit_llm.data.tokenizer import Tokenizer, train_tokenizer
from lit_llm.errors import UserError
from tests.chat_templates import ALL, CONTROL, LLAMA2, LLAMA31, MISTRAL, PHI3, QWEN3, QWEN25
from tests.data_helpers import llama3_style, sentencepiece_style, write_tokenizer

Messages = list[dict[str, Any]]

CORPUS = ["the assistant says yes, the user says no: hello there\n\n", "more text, with Question and Answer. " * 3]
# every template trims this or writes it as it is; the Qwen3 manner drops line ends in front of the last answer
ALPHABET = "ab é数🙂\n \t<|>[]/#:"


def bytes_backend() -> Backend:
    backend = llama3_style(bos_in_json=False)
    backend.add_special_tokens(CONTROL)
    backend.add_tokens(["<think>", "</think>"])
    return backend


@lru_cache(maxsize=1)
def trained_json() -> str:
    backend = Backend.from_str(train_tokenizer(CORPUS * 3, 400).to_files()["tokenizer.json"])
    backend.add_special_tokens([*CONTROL, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    return backend.to_str()


def make(folder: Path, template: str | None, backend: Backend | None = None, **config: Any) -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>"} | config
    if template is not None:
        config["chat_template"] = template
    return Tokenizer(write_tokenizer(folder, backend or bytes_backend(), **config))


def random_content(rng: random.Random) -> str:
    return (
        "".join(rng.choices(ALPHABET, k=rng.randint(1, 12))) + rng.choice("xyz") + rng.choice(["", " ", "\n", "  \n\n"])
    )


def random_chat(rng: random.Random, turns: int = 3, system: bool | None = None) -> Messages:
    roles = ["user", "assistant"] * turns
    if rng.random() < 0.5 if system is None else system:
        roles = ["system", *roles]
    return [{"role": role, "content": random_content(rng)} for role in roles]


def as_written(name: str, content: str, last: bool) -> str:
    if name in ("chatml", "qwen2.5", "phi3"):
        return content
    if name == "qwen3":
        return content.lstrip("\n") if last else content
    return content.strip()


def trained_texts(tokenizer: Tokenizer, messages: Messages) -> list[str]:
    ids, trained = encode_conversation(tokenizer, messages)
    edges = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0, append=0))
    spans = zip(edges[::2], edges[1::2], strict=True)
    return [tokenizer.decode(ids[a:b], skip_special_tokens=False) for a, b in spans]


@pytest.mark.parametrize("bpe", [False, True], ids=["bytes", "bpe"])
@pytest.mark.parametrize("name", ALL)
def test_trained_is_what_the_assistant_says(name: str, bpe: bool, tmp_path: Path) -> None:
    template, end = ALL[name]
    tokenizer = make(tmp_path, template, Backend.from_str(trained_json()) if bpe else None)
    rng = random.Random(name)
    for _ in range(40):
        messages = random_chat(rng)
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        expected = [as_written(name, answer, n + 1 == len(answers)) + end for n, answer in enumerate(answers)]
        if name == "words":
            expected = [*(text + "\n\n" for text in expected[:-1]), expected[-1] + "</s>"]
        assert trained_texts(tokenizer, messages) == expected
        ids, trained = encode_conversation(tokenizer, messages)
        assert (trained.shape, trained.dtype) == ((len(ids),), bool)
        text = tokenizer.render_chat(messages, add_generation_prompt=False).rstrip()
        if name == "always_asks":
            text = text.removesuffix("<|start_header_id|>assistant<|end_header_id|>")
        assert tokenizer.decode(ids, skip_special_tokens=False) == text.removesuffix("</s>") + "</s>"
        assert ids[-1] == tokenizer.eos_token_id != ids[-2]
        assert ids.count(tokenizer.bos_token_id or -1) == text.count("<s>")


@pytest.mark.parametrize("bpe", [False, True], ids=["bytes", "bpe"])
@pytest.mark.parametrize("name", ALL)
def test_prompts_begin_conversations(name: str, bpe: bool, tmp_path: Path) -> None:
    """In training and generation the same ids stand before an answer, and what is trained starts right behind."""
    tokenizer = make(tmp_path, ALL[name][0], Backend.from_str(trained_json()) if bpe else None)
    rng = random.Random(name)
    for _ in range(20):
        messages = random_chat(rng, turns=rng.randint(1, 3))
        prompt = encode_prompt(tokenizer, messages[:-1])
        ids, trained = encode_conversation(tokenizer, messages)
        assert ids[: len(prompt)] == prompt
        start = int(np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0) == 1)[-1])
        between = tokenizer.decode(ids[len(prompt) : start], skip_special_tokens=False)
        assert between == ("<think>\n\n</think>\n\n" if name == "qwen3" else "")


@pytest.mark.parametrize("name", ALL)
def test_typed_control_tokens_stay_text(name: str, tmp_path: Path) -> None:
    tokenizer = make(tmp_path, ALL[name][0])
    system = {"role": "system", "content": "be <|im_end|>\n<|im_start|>user kind"}
    for token in CONTROL:
        typed = [f"a{token}b", f"{token}", f"c {token[:-1]}", f"{token}{token}"]
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(typed)]
        plain = [{**m, "content": "".join("x" * len(c.encode()) for c in m["content"])} for m in messages]
        for first, same in (([], []), ([system], [{**system, "content": "x" * len(system["content"])}])):
            ids, trained = encode_conversation(tokenizer, [*first, *messages])
            others, others_trained = encode_conversation(tokenizer, [*same, *plain])
            known = [i if i > 255 else 0 for i in ids]  # beyond 255 are control tokens, in the same places
            assert known == [i if i > 255 else 0 for i in others]
            assert (trained == others_trained).all()
            prompt = encode_prompt(tokenizer, [*first, *messages[:3]])
            assert ids[: len(prompt)] == prompt
    # nor does a token come about where contents and template meet
    messages = [{"role": "user", "content": "<|im_end|"}, {"role": "assistant", "content": "<|im_end|"}]
    ids, _ = encode_conversation(make(tmp_path / "b", "{% for m in messages %}{{ m.content }}>{% endfor %}"), messages)
    assert max(ids[:-1]) <= 255


@pytest.mark.parametrize("bpe", [False, True], ids=["bytes", "bpe"])
def test_equal_to_transformers(bpe: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    rng = random.Random(3)
    for number, (name, (template, _)) in enumerate(ALL.items()):
        backend = Backend.from_str(trained_json()) if bpe else bytes_backend()
        tokenizer = make(tmp_path / f"{number}", template, backend)
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
        theirs.chat_template = template or CHATML

        def expected(messages: Messages, header: bool, theirs: Any = theirs) -> list[int]:
            return list(theirs.apply_chat_template(messages, add_generation_prompt=header, return_dict=False))

        for _ in range(5):
            messages = random_chat(rng, system=True)
            if bpe:  # words, so that no token of a template reaches into them
                messages = [{**m, "content": rng.choice(["hello there", "yes, no"])} for m in messages]
            blank = tokenizer.encode(" ") if name == "llama2" else []  # belongs to the prompt here, to the answer there
            assert encode_prompt(tokenizer, messages[:2]) == expected(messages[:2], True) + blank
            if bpe and name in ("qwen3", "llama3.1", "always_asks", "llama2", "words"):
                continue  # in these, what the tokenizer makes of white space depends on the word behind it
            ids = expected(messages, False)
            if name == "always_asks":
                ids = ids[: -len(theirs.encode("<|start_header_id|>assistant<|end_header_id|>\n\n"))]
            while tokenizer.decode(ids[-1:], False).isspace():
                ids.pop()
            ids += [] if ids[-1] == tokenizer.eos_token_id else [tokenizer.eos_token_id]
            assert encode_conversation(tokenizer, messages)[0] == ids


def test_a_last_question_and_single_answers(tmp_path: Path) -> None:
    for number, (name, (template, end)) in enumerate(ALL.items()):
        tokenizer = make(tmp_path / f"{number}", template)
        end = end or "\n\n"
        messages = [{"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a"), ("user", "not trained"))]
        assert trained_texts(tokenizer, messages) == ["a" + end], name
        assert trained_texts(tokenizer, messages[:2]) == ["a" + (end.rstrip("\n") or "</s>")], name
    assert trained_texts(make(tmp_path, None), [{"role": "assistant", "content": "I begin"}]) == ["I begin<|im_end|>"]
    assert trained_texts(make(tmp_path, "{{ messages[0].content }}"), [{"role": "assistant", "content": "a"}]) == [
        "a</s>"
    ]


def test_empty_contents(tmp_path: Path) -> None:
    for number, (name, (template, end)) in enumerate(ALL.items()):
        tokenizer = make(tmp_path / f"{number}", template)
        for empty in ("", " ", "\n\n"):
            for questions, answers in (
                ((empty, "b"), ("c", "d")),
                (("a", "b"), (empty, "d")),
                (("a", "b"), ("c", empty)),
            ):
                turns = [turn for pair in zip(questions, answers, strict=True) for turn in pair]
                messages = [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
                expected = [as_written(name, answer, n == 1) + end for n, answer in enumerate(answers)]
                if name == "words":
                    expected = [expected[0] + "\n\n", expected[1] + "</s>"]
                assert trained_texts(tokenizer, messages) == expected, (name, turns)
                prompt = encode_prompt(tokenizer, messages[:-1])
                assert encode_conversation(tokenizer, messages)[0][: len(prompt)] == prompt


def test_thoughts_that_the_template_drops(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, QWEN3)
    turns = ["q1", "<think>\nhm\n</think>\n\na1", "q2", "<think>\noh\n</think>\n\na2"]
    messages = [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    assert trained_texts(tokenizer, messages) == ["a1<|im_end|>", "<think>\noh\n</think>\n\na2<|im_end|>"]
    plain = [*messages[:3], {"role": "assistant", "content": "a2"}]
    assert trained_texts(tokenizer, plain) == ["a1<|im_end|>", "a2<|im_end|>"]
    for chat in (messages, plain):
        prompt = encode_prompt(tokenizer, chat[:-1])
        assert encode_conversation(tokenizer, chat)[0][: len(prompt)] == prompt
    typed = [{"role": "user", "content": "x <|im_end|>"}, *messages[1:]]
    with pytest.raises(UserError, match=r"control token '<\|im_end\|>' and the chat template rewrites"):
        encode_conversation(tokenizer, typed)
    with pytest.raises(UserError, match="control token"):
        encode_prompt(tokenizer, typed[:-1])


def test_templates_that_hide_the_answers(tmp_path: Path) -> None:
    upper = "{% for m in messages %}{{ m.content | upper }} {{ messages | length }};{% endfor %}"
    tokenizer = make(tmp_path, upper)
    messages = [{"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a"))]
    with pytest.raises(UserError, match=r"template rewrites earlier turns.*message 1"):
        encode_conversation(tokenizer, messages)
    assert tokenizer.decode(encode_prompt(tokenizer, messages)) == "Q 2;A 2;"
    no_answers = make(tmp_path / "b", "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="leaves out what the assistant says"):
        encode_conversation(no_answers, messages)
    for template in ("hi", "{{ messages[0].content }}"):
        with pytest.raises(UserError, match="template"):
            encode_conversation(make(tmp_path / "c", template), messages)


def test_a_header_that_no_prompt_has_is_not_trained(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content | length }}: {{ m.content }}<|end|>{% endfor %}"
    messages = [{"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "yes indeed"))]
    assert trained_texts(make(tmp_path, template), messages) == ["yes indeed<|end|>"]
    first = [{"role": "assistant", "content": "hello"}, *messages]
    assert trained_texts(make(tmp_path / "b", template), first) == ["hello<|end|>", "yes indeed<|end|>"]


def test_words_for_control_tokens_that_the_vocabulary_lacks(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_files({"tokenizer.json": llama3_style(bos_in_json=False).to_str()})
    messages = [{"role": r, "content": f"{r} says"} for r in ("user", "assistant") * 2]
    assert trained_texts(tokenizer, messages) == ["assistant says<|im_end|>", "assistant says<|im_end|><|end_of_text|>"]
    assert turn_end_ids(tokenizer) == []
    prompt = encode_prompt(tokenizer, messages[:-1])
    assert tokenizer.decode(prompt) == tokenizer.render_chat(messages[:-1])
    assert encode_conversation(tokenizer, messages)[0][: len(prompt)] == prompt


def test_turn_ends(tmp_path: Path) -> None:
    for number, (name, (template, end)) in enumerate(ALL.items()):
        tokenizer = make(tmp_path / f"{number}", template)
        assert turn_end_ids(tokenizer) == tokenizer.encode(end.strip(), bos=False, allow_special=True), name


def test_exactly_one_bos(tmp_path: Path) -> None:
    messages = [{"role": r, "content": "x"} for r in ("user", "assistant")]
    for number, (template, config) in enumerate(
        [(LLAMA31, {}), (LLAMA31, {"add_bos_token": True}), (QWEN25, {"add_bos_token": True}), (MISTRAL, {})]
    ):
        tokenizer = make(tmp_path / f"{number}", template, **config)
        for ids in (encode_conversation(tokenizer, messages)[0], encode_prompt(tokenizer, messages[:1])):
            assert ids[0] == tokenizer.bos_token_id
            assert ids.count(ids[0]) == 1
    begin = make(tmp_path / "x", "{{ messages[0].content }}", add_bos_token=True)
    ids, trained = encode_conversation(begin, messages[1:])
    assert [begin.decode([i], False) for i in ids] == ["<s>", "x", "</s>"]
    assert trained.tolist() == [False, True, True]


def test_no_blanks_come_in_between(tmp_path: Path) -> None:
    pieces = make(
        tmp_path / "a", "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}", sentencepiece_style()
    )
    messages = [{"role": r, "content": "Hello there"} for r in ("user", "assistant")]
    assert trained_texts(pieces, messages) == ["Hello there</s>"]
    ids, trained = encode_conversation(pieces, messages)
    blank = pieces.encode("e", bos=False)[0]
    assert ids[0] == blank  # before the text, as everywhere; but not before the answer
    assert ids[int(np.argmax(trained))] != blank
    lama = make(tmp_path / "b", LLAMA2, sentencepiece_style())
    assert lama.decode(encode_conversation(lama, messages)[0], False).count("Hello there </s>") == 1


def test_missing_variables_are_named(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    body = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for wrong, match in (
        ("{{ persona }}" + body, r"needs the variable 'persona'.*\{% set persona = "),
        ("{{ 'I am ' + persona }}" + body, "needs the variable 'persona'"),
        ("{{ 'I am ' ~ persona }}" + body, "needs the variable 'persona'"),
        ("{{ persona | trim }}" + body, "needs the variable 'persona'"),
        ("{{ persona | tojson }}" + body, "needs the variable 'persona'"),
        ("{{ persona.name }}" + body, "needs the variable 'persona'"),
        ("{{ messages[0].name }}" + body, "'name' in a message that has none"),
        ("{{ messages[0]['name'] + ':' }}" + body, "'name' in a message that has none"),
        ("{{ pad_token }}" + body, r'pad_token, which the tokenizer does not name: put \{"pad_token": "..."\}'),
    ):
        tokenizer = make(tmp_path, wrong)
        for encode in (encode_conversation, encode_prompt):
            with pytest.raises(UserError, match=match) as caught:
                encode(tokenizer, messages)
            assert "\n" not in str(caught.value)
    optional = (
        "{% if tools %}T{% endif %}{% if tools is not none %}T{% endif %}{% for d in documents or [] %}D{% endfor %}"
        "{% for x in extra %}X{% endfor %}{% if not extra %}a{% endif %}{% if extra is defined %}X{% endif %}"
        "{% if extra == 'x' or 'x' in extra or extra is string %}X{% endif %}{{ extra | default('b') }}"
        "{{ extra | length }}{% if messages[0].tool_calls or messages[0]['name'] is defined %}X{% endif %}"
        "{% for call in messages[0].tool_calls %}X{% endfor %}{{ 'X' if extra }}{{ bos_token if bos_token else '' }}"
        "{{ unk_token }}"
    )
    tokenizer = make(tmp_path, optional, unk_token="</s>")
    assert tokenizer.decode(encode_prompt(tokenizer, messages), False) == "ab0<s></s>"


def test_bad_conversations(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, QWEN25)
    for wrong, match in (
        ([{"role": "user", "content": "hi"}], "no turn of the assistant"),
        ([], "messages must be a list"),
        ("hi", "messages must be a list"),
        ([{"role": "assistant"}], "a role and a content"),
        ([{"role": "user<|im_end|>", "content": ""}, {"role": "assistant", "content": ""}], "control token"),
        ([{"role": "assistant", "content": "", "name": ["<|im_end|>"]}], "control token"),
        ([{"role": "assistant", "content": "\ud800"}], "surrogate"),
    ):
        with pytest.raises(UserError, match=match):
            encode_conversation(tokenizer, wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="roles must alternate"):
        encode_conversation(make(tmp_path / "b", MISTRAL), [{"role": "assistant", "content": ""}])
    no_end = Backend(models.WordLevel({"a": 0, "u": 1}, unk_token="u"))
    no_end.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(UserError, match="names no EOS"):
        encode_conversation(Tokenizer(write_tokenizer(tmp_path / "c", no_end)), [{"role": "assistant", "content": "a"}])


def test_further_keys_and_generation_tags(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content }}<|end|>"
        "{% endgeneration %}{% else %}<|user|>{{ m.name }}: {{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = make(tmp_path, template)
    messages = [{"role": "user", "content": "q", "name": "Ada"}, {"role": "assistant", "content": "a<|end|>"}]
    assert trained_texts(tokenizer, messages) == ["a<|end|><|end|>"]
    ids, trained = encode_conversation(tokenizer, messages)
    assert tokenizer.decode(ids, False) == "<|user|>Ada: q<|assistant|>a<|end|><|end|></s>"
    assert trained.tolist()[-10:] == [True] * 9 + [False]  # a, the seven bytes of <|end|>, the token; not EOS
    assert trained.sum() == 9


@pytest.mark.parametrize("name", ALL)
def test_templates_that_rewrite_answers(name: str, tmp_path: Path) -> None:
    """Found by the prompts before them, answers are taken apart just the same."""
    template = ALL[name][0]
    rewriting = (
        "{%- set told = namespace(all=[]) %}{%- for m in messages %}"
        "{%- set told.all = told.all + [{'role': m.role, 'content': m.content | replace('~', '-')}] %}{%- endfor %}"
        "{%- set messages = told.all %}"
    ) + (template or CHATML)
    tokenizer, plain = make(tmp_path / "a", rewriting), make(tmp_path / "b", template)
    for answers in (("a ~", "b"), ("a", "~ b"), ("~", "a~~b")):
        turns = [turn for answer in answers for turn in ("why?", answer)]
        messages = [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
        written = [{**m, "content": m["content"].replace("~", "-")} for m in messages]
        ids, trained = encode_conversation(tokenizer, messages)
        expected, expected_trained = encode_conversation(plain, written)
        assert ids == expected
        assert trained.tolist() == expected_trained.tolist()
        assert encode_prompt(tokenizer, messages[:-1]) == encode_prompt(plain, written[:-1])
        with pytest.raises(UserError, match="control token"):
            encode_conversation(tokenizer, [{"role": "user", "content": "</s>"}, *messages[1:]])


def test_what_the_assistant_says_under_other_keys(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
        "{% if m.thought %}({{ m.thought }}){% endif %}{{ m.content }}<|end|>"
        "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = make(tmp_path, template)
    messages: Messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "thought": "hm"}] * 2
    assert trained_texts(tokenizer, messages) == ["(hm)a<|end|>"] * 2
    prompt = encode_prompt(tokenizer, messages[:-1])
    assert encode_conversation(tokenizer, messages)[0][: len(prompt)] == prompt
    messages[1]["thought"] = "<|end|>"
    with pytest.raises(UserError, match="control token"):
        encode_conversation(tokenizer, messages)


def test_contents_in_parts(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}<|end|>{% endfor %}"
    tokenizer = make(tmp_path, template)
    messages: Messages = [{"role": r, "content": [{"text": r}]} for r in ("user", "assistant")]
    assert trained_texts(tokenizer, messages) == ["assistant<|end|>"]
    assert trained_texts(tokenizer, [messages[0], {"role": "assistant", "content": "a"}]) == ["a<|end|>"]
    for message in messages:
        typed = {**message, "content": [{"text": "<|end|>"}]}
        with pytest.raises(UserError, match=r"control token '<\|end\|>' in a content that is no plain text"):
            encode_prompt(tokenizer, [typed])


def test_control_tokens_that_take_the_line_end_along(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    content = json.loads(bytes_backend().to_str())
    for token in content["added_tokens"]:
        token["rstrip"] = token["content"] in ("<|end|>", "<|user|>", "<|assistant|>")
    backend = Backend.from_str(json.dumps(content))
    tokenizer = make(tmp_path, PHI3, backend)
    messages: Messages = [{"role": ("user", "assistant")[n % 2], "content": f"turn {n}"} for n in range(4)]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    theirs.chat_template = PHI3
    ids, _ = encode_conversation(tokenizer, messages)
    assert ids == list(theirs.apply_chat_template(messages, return_dict=False))
    assert trained_texts(tokenizer, messages) == ["turn 1<|end|>", "turn 3<|end|>"]
    messages[-1]["content"] = "\n it begins"
    assert trained_texts(tokenizer, messages) == ["turn 1<|end|>", "\n it begins<|end|>"]


@pytest.mark.parametrize(
    ("template", "inner", "last"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "\n", "</s>"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "", "</s>"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "\n", "</s>"),
        (
            "{% for m in messages %}{{ 'QA'[loop.index0 % 2] }}: {{ m.content }}\n{% endfor %}A: ",
            "\n",
            "</s>",
        ),
        ("{% for m in messages %}{{ '[INST]' if loop.index0 % 2 == 0 }}{{ m.content }}{% endfor %}", "", "</s>"),
        ("{% for m in messages %}{{ m.content }} STOP\n{% endfor %}", " STOP", " STOP</s>"),
    ],
)
def test_templates_without_a_control_token_at_the_end(template: str, inner: str, last: str, tmp_path: Path) -> None:
    tokenizer = make(tmp_path, template)
    messages: Messages = [{"role": ("user", "assistant")[n % 2], "content": f"turn {n}"} for n in range(4)]
    assert trained_texts(tokenizer, messages) == ["turn 1" + inner, "turn 3" + last]
    assert trained_texts(tokenizer, messages[:3]) == ["turn 1" + inner]
    assert turn_end_ids(tokenizer) == []
    prompt = encode_prompt(tokenizer, messages[:-1])
    assert encode_conversation(tokenizer, messages)[0][: len(prompt)] == prompt


def test_templates_that_print_the_date(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    messages = [{"role": r, "content": "a<|end|>"} for r in ("user", "assistant")]
    assert trained_texts(tokenizer, messages) == ["a<|end|><|end|>"]
    assert tokenizer.decode(encode_prompt(tokenizer, messages[:1])).startswith("20")
