"""Text out of tokens: pieces that join to the whole decode, whatever the tokenizer, and stop texts."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from lit_llm.errors import UserError
from lit_llm.generation import GenerationConfig, GenerationResult, generate, stream
from lit_llm.generation.text import TextStream
from lit_llm.model import ModelConfig, Transformer

EMOJI_TEXT = "🙂 数学 é"


class PlainTokenizer:
    """What generation asks of a tokenizer, around one of the `tokenizers` library."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


def byte_level() -> PlainTokenizer:
    """As GPT-2's: every byte is a token, frequent words are one."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>", "<pad>"],
        show_progress=False,
    )
    backend.train_from_iterator(["Hello there, my friend"] * 9, trainer)
    return PlainTokenizer(backend)


def _sentencepiece(decoder: Any) -> PlainTokenizer:
    words = ["▁", "▁Hello", "▁there", ",", "▁my", "▁friend", "▁▁", "a", "b", "E", "N", "D", "▁E", "ND", "数"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in (*(f"<0x{byte:02X}>" for byte in range(256)), *words):
        vocab[piece] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.decoder = decoder
    return PlainTokenizer(backend)


def byte_fallback() -> PlainTokenizer:
    """As Llama 2's and Mistral v1's: ▁ for a space, bytes for what the vocabulary lacks."""
    return _sentencepiece(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    )


def metaspace() -> PlainTokenizer:
    return _sentencepiece(decoders.Metaspace(prepend_scheme="always"))


TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


def ids_of(tokenizer: PlainTokenizer, *pieces: str) -> list[int]:
    ids = [tokenizer.backend.token_to_id(piece) for piece in pieces]
    assert None not in ids, pieces
    return [i for i in ids if i is not None]


def pieces_of(tokenizer: PlainTokenizer, ids: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    text = TextStream(tokenizer, stop)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            break
    pieces.append(text.finish())
    assert text.text == "".join(pieces)
    return pieces


class Scripted(Transformer):
    """A Transformer whose best next token comes from a list, whatever it reads."""

    def __init__(self, script: Sequence[int], vocab_size: int, **fields: Any) -> None:
        config = ModelConfig(vocab_size=vocab_size, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, **fields)
        super().__init__(config)
        self.script = list(script)

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        logits: Any = super().forward(input_ids, *args, **kwargs)
        done = kwargs["cache"].lengths[0] + input_ids.shape[1] - 1  # the prompts here are one token
        logits[..., self.script[done % len(self.script)]] += 100.0
        return logits


# --- pieces join to the whole --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
def test_pieces_join_to_the_decode_of_any_tokens(make: Any) -> None:
    tokenizer = make()
    size = tokenizer.vocab_size
    rng = random.Random(0)
    for _ in range(1500):
        # Bytes that form no character, special tokens, leading spaces, and runs of each.
        low = rng.choice([0, size - 60, size - 14])
        length = rng.randrange(1, 14)
        ids = [rng.randrange(size) if rng.random() < 0.3 else rng.randrange(low, size) for _ in range(length)]
        pieces = pieces_of(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids), ids
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
def test_spaces_are_right_from_the_first_word_on(make: Any) -> None:  # case 16
    tokenizer = make()
    text = "Hello there, my friend"
    if make is byte_level:
        ids = tokenizer.encode(text)
    else:
        ids = ids_of(tokenizer, "▁Hello", "▁there", ",", "▁my", "▁friend")
    model = Scripted(ids, tokenizer.vocab_size)
    pieces = list(stream(model, [3], GenerationConfig(max_new_tokens=len(ids)), tokenizer))
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert len(pieces) == len(ids) > 3
    assert " there" in pieces


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_no_replacement_mark_in_the_middle(make: Any) -> None:  # case 17
    tokenizer = make()
    if make is byte_level:
        ids = tokenizer.encode(EMOJI_TEXT)
    else:
        ids = ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in EMOJI_TEXT.encode()))
    assert len(ids) >= 13  # about a byte per token
    model = Scripted(ids, tokenizer.vocab_size)
    pieces = list(stream(model, [3], GenerationConfig(max_new_tokens=len(ids)), tokenizer))
    assert "".join(pieces) == EMOJI_TEXT
    if make is byte_level:
        assert "🙂" in pieces
    for cut in (1, 2, 3, 7):
        pieces = list(stream(model, [3], GenerationConfig(max_new_tokens=cut), tokenizer))
        assert "".join(pieces) == tokenizer.decode(ids[:cut])
        assert "\ufffd" not in "".join(pieces[:-1])
        assert "\ufffd" in pieces[-1]  # the cut character, flushed once, as decode() shows it


def test_a_bad_byte_spoils_the_run_before_it_only_where_decode_says_so() -> None:
    for make in (byte_level, byte_fallback):
        tokenizer = make()
        good = "数".encode()
        if make is byte_level:
            ids = tokenizer.encode("数") + tokenizer.encode("数")[:1]
        else:
            ids = ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in good + good[:1]))
        text = tokenizer.decode(ids)
        assert text == ("数\ufffd" if make is byte_level else "\ufffd" * 4)
        assert "".join(pieces_of(tokenizer, ids)) == text


# --- stop texts ----------------------------------------------------------------------------------------------------


def test_stop_texts_are_found_across_tokens_and_never_shown() -> None:
    tokenizer = byte_fallback()
    ids = ids_of(tokenizer, "a", "E", "N", "a", "▁E", "ND", "b")
    text = "aENa"
    assert tokenizer.decode(ids) == "aENa ENDb"
    assert pieces_of(tokenizer, ids, [" END"]) == ["a", "E", "N", "a", "", "", ""]
    # 'EN' may be the beginning of END: held until 'a' shows that it is not.
    assert pieces_of(tokenizer, ids, ["END"]) == ["a", "", "", "ENa", " ", "", ""]
    assert "".join(pieces_of(tokenizer, ids, ["b", "ND"])) == text + " E"
    assert "".join(pieces_of(tokenizer, ids, ["ENDb", "nothing"])) == text + " "
    assert "".join(pieces_of(tokenizer, ids, ["ENDbb"])) == tokenizer.decode(ids)
    assert pieces_of(tokenizer, ids, ["a"]) == ["", ""]
    # One token may complete two stop texts: the first in the text counts.
    assert pieces_of(tokenizer, ids_of(tokenizer, "a", "ND", "b"), ["D", "N"]) == ["a", "", ""]


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
def test_stop_texts_in_random_tokens(make: Any) -> None:
    tokenizer = make()
    size = tokenizer.vocab_size
    rng = random.Random(1)
    found = 0
    for _ in range(500):
        ids = [rng.randrange(size - 14, size) for _ in range(20)]
        whole = tokenizer.decode(ids)
        start = rng.randrange(max(1, len(whole) - 5))
        stop = whole[start : start + rng.randrange(1, 6)]
        stops = [stop, "zz"] if rng.random() < 0.8 else ["zz"]
        pieces = pieces_of(tokenizer, ids, stops)
        assert "".join(pieces) == (whole[: whole.find(stop)] if stop in stops else whole)
        found += stop in stops
    assert found > 300


def test_a_newline_byte_stops_at_once() -> None:
    """With byte fallback the text of a byte is uncertain, but a stop text in it ends the completion, so it stands."""
    tokenizer = byte_fallback()
    text = TextStream(tokenizer, ["\n"])
    a, newline = ids_of(tokenizer, "a", "<0x0A>")
    assert text.push(a) == "a"
    assert text.push(newline) == ""
    assert text.stopped
    assert text.text == "a"


def test_generate_and_stream_agree_on_stop_eos_and_length() -> None:
    tokenizer = byte_fallback()
    eos = 2
    ids = [*ids_of(tokenizer, "a", "▁Hello", "E", "N", "D", "b"), eos]
    model = Scripted(ids, tokenizer.vocab_size, eos_token_id=eos)
    for options, text, count, reason in (
        ({"stop": ["END"]}, "a Hello", 5, "stop"),
        ({"stop": ["Hello"]}, "a ", 2, "stop"),
        ({"stop": ["none"]}, "a HelloENDb", 7, "eos"),
        ({}, "a HelloENDb", 7, "eos"),
        ({"max_new_tokens": 4, "stop": ["END"]}, "a HelloEN", 4, "length"),
        ({"max_new_tokens": 5, "stop": ["END"]}, "a Hello", 5, "stop"),
        ({"max_new_tokens": 6, "eos_token_id": ids[5]}, "a HelloEND", 6, "eos"),
        ({"max_new_tokens": 9, "eos_token_id": []}, "a HelloENDba Hello", 9, "length"),
    ):
        config = GenerationConfig(**{"max_new_tokens": 20, **options})  # type: ignore[arg-type]
        (result,) = generate(model, [[3]], config, tokenizer=tokenizer)
        assert (result.text, result.tokens, result.finish_reason) == (text, (ids * 2)[:count], reason), options
        pieces: list[str] = []
        assert _drain(stream(model, [3], config, tokenizer), pieces) == result
        assert "".join(pieces) == text
        assert all(pieces)


def _drain(running: Generator[str, None, GenerationResult], pieces: list[str]) -> GenerationResult:
    def through() -> Generator[str, None, None]:
        results.append((yield from running))

    results: list[GenerationResult] = []
    pieces.extend(through())
    return results[0]


# --- how the model is left -----------------------------------------------------------------------------------------


def test_between_pieces_the_model_is_as_it_was() -> None:
    tokenizer = byte_fallback()
    model = Scripted(ids_of(tokenizer, "a", "b"), tokenizer.vocab_size).train()
    model.layers[0].eval()
    running = stream(model, torch.tensor([3]), GenerationConfig(max_new_tokens=9), tokenizer)
    for _ in range(3):
        next(running)
        assert model.training
        assert not model.layers[0].training
        assert model.norm.training
        assert torch.is_grad_enabled()
    running.close()
    assert model.training


def test_inference_mode_may_come_and_go() -> None:
    tokenizer = byte_fallback()
    model = Scripted(ids_of(tokenizer, "a", "b", "E"), tokenizer.vocab_size)
    with torch.inference_mode():
        running = stream(model, [3], GenerationConfig(max_new_tokens=6), tokenizer)
        pieces = [next(running)]
        assert torch.is_inference_mode_enabled()
    assert "".join([*pieces, *running]) == "abEabE"


def test_mistakes_show_at_the_call() -> None:
    model = Scripted([1], 20)
    with pytest.raises(UserError, match="stream needs a tokenizer"):
        stream(model, [3])
    with pytest.raises(UserError, match="the prompt: token id 20 is outside the vocabulary of 20 ids"):
        stream(model, [20], tokenizer=byte_level())
    with pytest.raises(UserError, match=r"generation\.stop needs a tokenizer"):
        generate(model, [[3]], GenerationConfig(stop=["x"]))


def test_a_vocabulary_of_whole_words_without_one_for_the_unknown() -> None:
    words = PlainTokenizer(Backend(models.WordLevel({"a": 0, "b": 1, "c": 2})))
    text = TextStream(words)
    pieces = [text.push(token) for token in (0, 2, 1)] + [text.finish()]
    assert "".join(pieces) == words.decode([0, 2, 1])
