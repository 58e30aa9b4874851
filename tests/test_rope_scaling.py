"""Rotary embeddings of stretched contexts: the frequencies, and longrope's two sets by the length of the sequence."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_llm.errors import UserError
from lit_llm.generation import GenerationConfig, decode_one_token, generate, prefill, stream
from lit_llm.model import KVCache, ModelConfig, Transformer
from lit_llm.model.positions import token_lengths
from lit_llm.ops.documents import document_lengths
from lit_llm.ops.rope import ROPE_TYPES, normalised_scaling, rope_frequencies, rope_switch_length, rope_tables

VOCAB, ORIGINAL = 97, 16
SHORT = [1.0, 1.1, 1.3, 1.7]
LONG = [1.5, 2.5, 4.0, 7.0]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


# --- frequencies against transformers' functions -------------------------------------------------------------------


def drawn_scaling(kind: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A random rope_scaling of a kind, and a random shape: rotary_dim, theta, max_position_embeddings."""
    draw = random.Random(f"{kind} {seed}")
    pairs = draw.choice([2, 4, 16, 32, 64])
    original = draw.choice([24, 512, 4096, 8192, 32768])
    shape = {
        "rotary_dim": 2 * pairs,
        "theta": draw.choice([50.0, 10000.0, 5e5]),
        "max_position_embeddings": int(original * draw.choice([1, 1.5, 4, 32])),
    }
    scaling: dict[str, Any] = {"rope_type": kind, "original_max_position_embeddings": original}
    factor = {"factor": draw.uniform(1.0, 16.0)}
    attention: dict[str, Any] = draw.choice(
        [{}, {"attention_factor": draw.uniform(0.5, 1.5)}, {"attention_factor": None}]
    )
    if kind == "linear":
        return {"rope_type": kind, **factor}, shape
    if kind == "llama3":
        low = draw.uniform(0.5, 2.0)
        return {**scaling, **factor, "low_freq_factor": low, "high_freq_factor": low + draw.uniform(0.5, 8.0)}, shape
    if kind == "yarn":
        scaling |= {**draw.choice([factor, {"factor": None}]), **attention}
        scaling |= draw.choice([{}, {"mscale": 0.7}, {"mscale": 0.7, "mscale_all_dim": draw.uniform(0.1, 1.2)}])
        scaling |= draw.choice([{}, {"beta_fast": draw.uniform(8.0, 60.0)}, {"beta_fast": None, "beta_slow": None}])
        scaling |= draw.choice([{}, {"beta_slow": draw.uniform(0.3, 4.0)}])
        scaling |= draw.choice([{}, {"truncate": True}, {"truncate": False}])
        return scaling, shape
    lists = {name: [draw.uniform(1.0, 40.0) for _ in range(pairs)] for name in ("short_factor", "long_factor")}
    return {**scaling, **lists, **attention, **draw.choice([{}, factor])}, shape


def theirs(scaling: dict[str, Any], shape: dict[str, Any], length: int) -> tuple[Tensor, float]:
    """What transformers' function gives for a sequence of this length."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=4 * shape["rotary_dim"],
        num_attention_heads=4,
        max_position_embeddings=shape["max_position_embeddings"],
        rope_parameters={"rope_theta": shape["theta"], "factor": None, **scaling},
    )
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"), seq_len=length)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "longrope"])
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    for seed in range(60):
        scaling, shape = drawn_scaling(kind, seed)
        ours = rope_frequencies(scaling=scaling, **shape)
        again = rope_frequencies(scaling=normalised_scaling(scaling, shape["max_position_embeddings"]), **shape)
        original = scaling.get("original_max_position_embeddings", 0)
        # Theirs are float32 all the way; yarn's also take one weight as 1 minus the other, which costs them digits.
        tolerance = 2e-6 if kind == "yarn" else 1e-6
        for length, got in ((original, ours.inv_freq), (original + 1, ours.long_inv_freq)):
            if got is None:
                got = ours.inv_freq
            expected, attention_factor = theirs(scaling, shape, length)
            assert got.dtype == torch.float64
            torch.testing.assert_close(got, expected.double(), rtol=tolerance, atol=0)
            assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-12)
        assert ours.original_length == (original if kind == "longrope" else None)
        assert (ours.long_inv_freq is None) == (kind != "longrope")
        assert torch.equal(again.inv_freq, ours.inv_freq)
        assert again.attention_factor == ours.attention_factor


def test_tables_take_frequencies_of_each_token_and_a_factor() -> None:
    positions = torch.tensor([[0, 1, 5], [2, 3, 4]])
    sets = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(positions, sets, 1.25)
    assert cos.shape == sin.shape == (2, 3, 1, 8)
    for row in range(2):
        for place in range(3):
            one_cos, one_sin = rope_tables(positions[row : row + 1, place : place + 1], sets[row, place])
            torch.testing.assert_close(cos[row, place], 1.25 * one_cos[0, 0], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(sin[row, place], 1.25 * one_sin[0, 0], rtol=1e-6, atol=1e-7)


# --- the mapping ---------------------------------------------------------------------------------------------------


def test_one_form_for_all_that_compute_the_same() -> None:
    usual = 0.1 * math.log(4.0) + 1
    assert (
        normalised_scaling(None)
        == normalised_scaling({"rope_type": "default", "factor": 3})
        == {"rope_type": "default"}
    )
    assert normalised_scaling({"type": "linear", "factor": 2, "more": 1}) == {"rope_type": "linear", "factor": 2.0}
    for same in (
        {"mscale": 1.0},
        {"mscale": 1.0, "mscale_all_dim": 0},
        {
            "attention_factor": usual,
            "beta_fast": 32,
            "beta_slow": 1,
            "truncate": True,
            "mscale": 3,
            "mscale_all_dim": 1,
        },
        {"beta_fast": None, "attention_factor": None},
    ):
        assert normalised_scaling({**YARN, **same}) == YARN
    assert normalised_scaling({**YARN, "factor": None}, 128) == YARN
    assert normalised_scaling({"rope_type": "yarn", "factor": 4}, 32) == YARN
    equal = normalised_scaling({**YARN, "mscale": 0.5, "mscale_all_dim": 0.5, "truncate": False, "beta_slow": 2})
    assert equal == {**YARN, "attention_factor": 1.0, "truncate": False, "beta_slow": 2.0}
    assert normalised_scaling(LONGROPE, 64) == normalised_scaling({**LONGROPE, "factor": 4}, 64) == LONGROPE
    other = normalised_scaling({**LONGROPE, "factor": 16}, 64)
    assert other == {**LONGROPE, "attention_factor": math.sqrt(2)}
    assert normalised_scaling(other, 64) == other
    assert normalised_scaling({**LONGROPE, "attention_factor": 1}, 8)["rope_type"] == "longrope"
    assert "attention_factor" not in normalised_scaling({**LONGROPE, "attention_factor": 1}, 8)
    assert type(normalised_scaling(LONGROPE, 64)["original_max_position_embeddings"]) is int
    assert rope_switch_length(LONGROPE, 64) == ORIGINAL
    assert rope_switch_length(YARN, 64) is None
    assert rope_switch_length(None) is None


@pytest.mark.parametrize(
    ("scaling", "line"),
    [
        ({"rope_type": "dynamic", "factor": 2}, "unknown rope_type 'dynamic'; known are " + ", ".join(ROPE_TYPES)),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 8},
            "needs a positive number for 'factor', got None",
        ),
        ({**YARN, "original_max_position_embeddings": None}, "'original_max_position_embeddings', got None"),
        ({**YARN, "original_max_position_embeddings": 8.5}, "'original_max_position_embeddings', got 8.5"),
        ({**YARN, "factor": float("nan")}, "needs a positive number for 'factor', got nan"),
        ({**YARN, "beta_fast": -1}, "needs a positive number for 'beta_fast', got -1"),
        ({**YARN, "attention_factor": "big"}, "needs a positive number for 'attention_factor', got 'big'"),
        ({**LONGROPE, "long_factor": None}, "needs a list of positive numbers for 'long_factor', got None"),
        ({**LONGROPE, "short_factor": [1, 0, 1, 1]}, r"'short_factor', got \[1, 0, 1, 1\]"),
        ({**LONGROPE, "factor": 4, "long_factor": [1.0]}, "'long_factor' has 1 numbers and a head has 4 rotated pairs"),
        (LONGROPE, "needs a positive number for 'factor', got None"),
        ({**LONGROPE, "factor": 4, "original_max_position_embeddings": 1}, "above 1, got 1"),
    ],
)
def test_wrong_fields_are_refused_by_name(scaling: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line) as error:
        rope_frequencies(8, 10000.0, scaling)
    assert "\n" not in str(error.value)


def test_yarn_needs_a_base_above_1() -> None:
    with pytest.raises(UserError, match="needs a rope_theta above 1, got 1.0"):
        rope_frequencies(8, 1.0, YARN)


# --- the length of a token's sequence ------------------------------------------------------------------------------


def lengths_of(ids: Tensor, *args: Any) -> list[list[int]]:
    return token_lengths(ids, *args).expand(ids.shape).tolist()


def test_lengths_are_those_of_rows_documents_and_caches() -> None:
    ids = torch.zeros(2, 5, dtype=torch.long)
    cu_seqlens, _ = document_lengths(torch.tensor([[0, 0, 0, 1, 1], [1, 2, 2, 2, 2]]))
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    assert lengths_of(ids, None, None, None) == [[5] * 5] * 2
    assert lengths_of(ids, positions, None, None) == [[5] * 5, [12] * 5]
    assert lengths_of(ids, positions[1:], None, None) == [[12] * 5] * 2
    assert lengths_of(ids, None, cu_seqlens, None) == [[3, 3, 3, 2, 2], [1, 4, 4, 4, 4]]
    assert lengths_of(ids, positions, cu_seqlens, None) == [[3, 3, 3, 5, 5], [8, 12, 12, 12, 12]]
    empty = torch.tensor([0, 3, 3, 5, 6, 10, 10], dtype=torch.int32)  # documents of no tokens, as fixed shapes need
    assert lengths_of(ids, None, empty, None) == [[3, 3, 3, 2, 2], [1, 4, 4, 4, 4]]
    cache = KVCache(config(), 2, 40)
    assert lengths_of(ids, None, None, cache) == [[5] * 5] * 2
    with cache.expecting([9, 30]):
        assert lengths_of(ids, None, None, cache) == [[9] * 5, [30] * 5]
        cache.advance([5, 5])
        assert lengths_of(ids, None, None, cache) == [[9] * 5, [30] * 5]
        cache.advance([4, 25])
    assert lengths_of(ids[:, :1], None, None, cache) == [[10], [31]]


# --- a tiny Phi-3 --------------------------------------------------------------------------------------------------


SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def config() -> ModelConfig:
    return ModelConfig(**SHAPE, rope_scaling=LONGROPE)


@pytest.fixture(scope="module")
def phi3() -> tuple[Transformer, Any]:
    """One random model, ours and transformers'."""
    from transformers import Phi3Config, Phi3ForCausalLM

    fields: dict[str, Any] = {
        **SHAPE,
        "original_max_position_embeddings": ORIGINAL,
        "rope_scaling": dict(LONGROPE),
        "initializer_range": 0.25,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    torch.manual_seed(3)
    reference = Phi3ForCausalLM(Phi3Config(**fields)).eval()
    model = Transformer(config()).eval()
    state = {name.removeprefix("model."): value for name, value in reference.state_dict().items()}
    for name in [name for name in state if "qkv_proj" in name or "gate_up_proj" in name]:
        fused = state.pop(name)
        parts = {"q_proj": 32, "k_proj": 16, "v_proj": 16} if "qkv" in name else {"gate_proj": 48, "up_proj": 48}
        for part, piece in zip(parts, fused.split(list(parts.values())), strict=True):
            state[name.replace("qkv_proj", part).replace("gate_up_proj", part)] = piece
    model.load_state_dict(state)
    return model, reference


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random ids; none is 0, which transformers would take for padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def alone(model: Transformer, ids: Sequence[int]) -> Tensor:
    return model(torch.tensor([list(ids)]))[0]


@torch.no_grad()
def test_logits_equal_those_of_transformers_on_both_sides_of_the_border(phi3: tuple[Transformer, Any]) -> None:
    model, reference = phi3
    (ids,) = prompts(40)
    for length in [1, 2, *range(ORIGINAL - 3, ORIGINAL + 5), 40]:
        row = torch.tensor([ids[:length]])
        torch.testing.assert_close(model(row), reference(row).logits, atol=1e-4, rtol=0)
    # The two sets differ, or nothing here would show which is taken.
    assert (alone(model, ids[: ORIGINAL + 1])[5] - alone(model, ids[:ORIGINAL])[5]).abs().max() > 0.05
    # Positions decide, as in transformers: a short row that stands far out is a long one.
    far = torch.arange(ORIGINAL, ORIGINAL + 6)[None]
    row = torch.tensor([ids[:6]])
    torch.testing.assert_close(model(row, far), reference(row, position_ids=far).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_each_document_of_packed_rows_is_as_if_alone(phi3: tuple[Transformer, Any]) -> None:
    model, _ = phi3
    rows = [(ORIGINAL + 1, 3, ORIGINAL), (ORIGINAL, ORIGINAL + 2, 2)]
    documents = [prompts(*lengths, seed=seed) for seed, lengths in enumerate(rows)]
    ids = torch.tensor([sum(row, []) for row in documents])
    numbers = torch.tensor([[i for i, length in enumerate(lengths) for _ in range(length)] for lengths in rows])
    positions = torch.tensor([[place for length in lengths for place in range(length)] for lengths in rows])
    expected = torch.stack([torch.cat([alone(model, document) for document in row]) for row in documents])
    torch.testing.assert_close(model(ids, document_ids=numbers), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(model(ids, positions, numbers), expected, atol=2e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("chunk_size", [None, 1, 5, ORIGINAL])
def test_a_prompt_in_chunks_counts_whole_and_its_padding_not(
    phi3: tuple[Transformer, Any], chunk_size: int | None
) -> None:
    model, _ = phi3
    batch = prompts(ORIGINAL + 4, ORIGINAL, 3, ORIGINAL + 1)
    lengths = [len(row) for row in batch]
    ids = torch.tensor([row + [0] * (max(lengths) - len(row)) for row in batch])
    cache = model.new_cache(len(batch), 40)
    logits = prefill(model, ids, lengths, cache, chunk_size)
    expected = torch.stack([alone(model, row)[-1] for row in batch])
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)
    # A row that was long to begin with, and one that stays short, go on; one that passes the border can't.
    cache.select([0, 2])
    logits = decode_one_token(model, torch.tensor([7, 8]), cache)
    expected = torch.stack([alone(model, [*batch[0], 7])[-1], alone(model, [*batch[2], 8])[-1]])
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)
    with pytest.raises(UserError, match="row 1 grows beyond 16 tokens"):
        prefill(model, ids[:2, :13], [1, 13], cache)
    short = model.new_cache(1, 40)
    prefill(model, ids[1:2, :ORIGINAL], [ORIGINAL], short)
    with pytest.raises(UserError, match="row 0 grows beyond 16 tokens.*prefill a new cache with the whole row"):
        decode_one_token(model, torch.tensor([7]), short)


LENGTHS = (3, ORIGINAL - 6, ORIGINAL - 1, ORIGINAL, ORIGINAL - 6, ORIGINAL + 1, ORIGINAL + 4)


@pytest.mark.filterwarnings("ignore")
def test_generation_across_the_border_equals_transformers_greedy(phi3: tuple[Transformer, Any]) -> None:
    model, reference = phi3
    batch = prompts(*LENGTHS)
    greedy = GenerationConfig(max_new_tokens=20)
    together = generate(model, batch, greedy)
    for prompt, result in zip(batch, together, strict=True):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
        assert result.tokens == expected[0, len(prompt) :].tolist()
        (own,) = generate(model, [prompt], greedy, chunk_size=5)
        assert own.tokens == result.tokens
        assert own.logprobs == pytest.approx(result.logprobs, abs=1e-4)
        for place in range(20):  # and each token is that of a forward over all before it
            logits = alone(model, prompt + result.tokens[:place])[-1]
            assert int(logits.argmax()) == result.tokens[place]


def test_sampling_and_streaming_across_the_border(phi3: tuple[Transformer, Any]) -> None:
    model, _ = phi3
    batch = prompts(*LENGTHS, seed=1)
    sampled = GenerationConfig(max_new_tokens=12, temperature=1.0, seed=5, repetition_penalty=1.2)
    together = generate(model, batch, sampled, tokenizer=Letters())
    for prompt, result in zip(batch, together, strict=True):
        assert generate(model, [prompt], sampled)[0].tokens == result.tokens
        assert "".join(stream(model, prompt, sampled, Letters())) == result.text
    ended = generate(model, batch, GenerationConfig(max_new_tokens=20, eos_token_id=list(range(0, VOCAB, 9))))
    assert len({len(result.tokens) for result in ended}) > 2  # rows leave the batch on both sides
    for prompt, result in zip(batch, ended, strict=True):
        for place, token in enumerate(result.tokens):
            assert int(alone(model, prompt + result.tokens[:place])[-1].argmax()) == token


def test_only_rows_that_pass_the_border_are_computed_anew_and_once(phi3: tuple[Transformer, Any]) -> None:
    model, _ = phi3
    shapes: list[tuple[int, ...]] = []
    handle = model.layers[0].register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape[:2])))
    try:
        generate(model, prompts(3, ORIGINAL - 1, 20), GenerationConfig(max_new_tokens=4))
        assert shapes == [(3, 20), (3, 1), (1, ORIGINAL + 1), (3, 1), (3, 1)]
        shapes.clear()
        generate(model, prompts(ORIGINAL, ORIGINAL), GenerationConfig(max_new_tokens=3))
        assert shapes == [(2, ORIGINAL), (2, ORIGINAL + 1), (2, 1)]
        shapes.clear()
        generate(model, prompts(ORIGINAL), GenerationConfig(max_new_tokens=1))
        assert shapes == [(1, ORIGINAL)]
    finally:
        handle.remove()


class Letters:
    """A tokenizer of one letter an id."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 200 for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(200 + i) for i in ids)
