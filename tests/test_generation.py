"""Decoding: the cache against the whole forward, ragged batches against each prompt alone, and how completions end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_llm.errors import UserError
from lit_llm.generation import GenerationConfig, decode_one_token, generate, prefill
from lit_llm.generation.decode import decoding_mode
from lit_llm.generation.sampling import prompt_key, sample, uniform
from lit_llm.model import ModelConfig, Transformer

VOCAB = 131
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "headdim": {"head_dim": 24},
    "window": {"sliding_window": 8},
    "mixed_window": {
        "sliding_window": 8,
        "layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
    },
    "rope_llama3": {"rope_scaling": LLAMA3_ROPE},
    "rope_linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "partial_rotary": {"partial_rotary_factor": 0.5},
    "bias_qknorm": {"attention_bias": True, "mlp_bias": True, "use_qk_norm": True},
    "softcap": {"attn_logit_softcapping": 5.0},
    "layer_norm": {"norm_type": "layer_norm"},
}


LLAMA_FIELDS = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
}


def tiny(**fields: Any) -> Transformer:
    """A tiny Llama with weights large enough for logits that differ, norms and biases that are not trivial."""
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.25,
    }
    model = Transformer(ModelConfig(**{"vocab_size": VOCAB, **shape, **fields}))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()


def prompts(*lengths: int, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def uncached(model: Transformer, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor]:
    """The reference: greedy tokens, each from a forward over everything before it, and the logits (count, vocab)."""
    ids, rows = list(prompt), []
    for _ in range(count):
        rows.append(model(torch.tensor([ids]))[0, -1])
        ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)


@torch.no_grad()
def cached(
    model: Transformer, batch: Sequence[list[int]], count: int, chunk_size: int | None = None
) -> tuple[list[list[int]], Tensor]:
    """Greedy by the verbs: tokens per row and logits (rows, count, vocab)."""
    longest = max(map(len, batch))
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in batch])
    cache = model.new_cache(len(batch), longest + count)
    steps = [prefill(model, ids, [len(prompt) for prompt in batch], cache, chunk_size)]
    tokens = [steps[-1].argmax(-1)]
    for _ in range(count - 1):
        steps.append(decode_one_token(model, tokens[-1], cache))
        tokens.append(steps[-1].argmax(-1))
    return torch.stack(tokens, 1).tolist(), torch.stack(steps, 1)


def chain(successors: dict[int, int], vocab: int = 16, **fields: Any) -> Transformer:
    """A real Transformer that maps each token to the next of a chain: attention and MLP add nothing."""
    config = ModelConfig(vocab_size=vocab, hidden_size=vocab, num_hidden_layers=1, num_attention_heads=2, **fields)
    model = Transformer(config)
    assert model.lm_head is not None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.embed_tokens.weight.copy_(torch.eye(vocab))
        model.lm_head.weight.zero_()
        for token, after in successors.items():
            model.lm_head.weight[after, token] = 5.0
    return model.eval()


# --- the cache against the whole forward ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_cached_equals_uncached_at_every_step(kind: str) -> None:
    model = tiny(**KINDS[kind])
    (prompt,) = prompts(24)  # three windows
    expected_tokens, expected = uncached(model, prompt, 20)
    assert len(set(expected_tokens)) > 5
    for chunk_size in (None, 5, 1):
        (tokens,), logits = cached(model, [prompt], 20, chunk_size)
        assert tokens == expected_tokens
        torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=0)
    (result,) = generate(model, [prompt], GenerationConfig(max_new_tokens=20))
    assert result.tokens == expected_tokens
    log_softmax = expected.double().log_softmax(-1)[range(20), expected_tokens]
    torch.testing.assert_close(torch.tensor(result.logprobs).double(), log_softmax, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["gqa", "window"])
def test_a_ragged_batch_equals_each_prompt_alone(kind: str) -> None:  # cases 1 and 2
    model = tiny(**KINDS[kind])
    three = prompts(13, 7, 1)
    alone = [uncached(model, prompt, 20) for prompt in three]
    config = GenerationConfig(max_new_tokens=20)
    for order in itertools.permutations(range(3)):
        batch = [three[i] for i in order]
        tokens, logits = cached(model, batch, 20, None if order[0] else 5)
        for place, i in enumerate(order):
            assert tokens[place] == alone[i][0]
            torch.testing.assert_close(logits[place], alone[i][1], atol=1e-4, rtol=0)
        for batch_size in (1, 2, 3):
            results = generate(model, batch, config, batch_size=batch_size)
            assert [result.tokens for result in results] == [alone[i][0] for i in order]
            assert all(len(result.logprobs) == 20 for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batches_of_every_kind(kind: str) -> None:
    model = tiny(**KINDS[kind])
    batch = prompts(30, 24, 9, 8, 7, 2, 1)
    alone = [uncached(model, prompt, 20) for prompt in batch]
    for chunk_size in (None, 1, 3, 5, 8, 29):
        tokens, logits = cached(model, batch, 20, chunk_size)
        for row, (expected_tokens, expected) in enumerate(alone):
            assert tokens[row] == expected_tokens
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gqa", "window"])
def test_a_row_of_mostly_padding_stays_finite(dtype: torch.dtype, kind: str) -> None:  # case 7
    model = tiny(**KINDS[kind]).to(dtype)
    batch = prompts(40, 1)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    _, together = cached(model, batch, 1)
    assert together.isfinite().all()
    for row, prompt in zip(together, batch, strict=True):
        _, alone = uncached(model, prompt, 1)
        torch.testing.assert_close(row.float(), alone.float(), atol=tolerance * float(alone.std()), rtol=tolerance)
    for result in generate(model, batch, GenerationConfig(max_new_tokens=10)):
        assert len(result.tokens) == 10
        assert all(value <= 0 for value in result.logprobs)


def test_nothing_stays_behind_between_calls() -> None:  # case 8
    long, short, *four = prompts(40, 3, 5, 9, 2, 17)
    config = GenerationConfig(max_new_tokens=12)
    calls: list[list[list[int]]] = [[long], [short], four, [short]]
    fresh = [[r.tokens for r in generate(tiny(), batch, config)] for batch in calls]
    model = tiny()
    keys = set(model.state_dict())
    assert [[r.tokens for r in generate(model, batch, config)] for batch in calls] == fresh
    assert set(model.state_dict()) == keys
    assert not list(model.buffers())

    def train(trained: Transformer) -> None:
        trained.train()
        ids = torch.tensor(prompts(9, 9, seed=3))
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        loss, count = trained(ids[:, :-1], labels=ids[:, 1:])
        (loss / count).backward()
        optimizer.step()

    train(model)
    other = tiny()
    train(other)
    after = [r.tokens for r in generate(model, four, config)]
    assert after == [r.tokens for r in generate(other, four, config)]
    assert after != fresh[2]


def test_padding_ids_and_stale_places_are_never_read() -> None:
    model = tiny()
    batch = prompts(13, 4)
    ids = torch.tensor([batch[0], batch[1] + [0] * 9])
    other = torch.tensor([batch[0], batch[1] + [99] * 9])
    expected = None
    for chunk_size, padded in itertools.product((None, 3), (ids, other)):
        cache = model.new_cache(2, 20)
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(1e4)  # as if an earlier use had left it
        first = prefill(model, padded, [13, 4], cache, chunk_size)
        step = torch.stack([first, decode_one_token(model, first.argmax(-1), cache)])
        expected = step if expected is None else expected
        torch.testing.assert_close(step, expected, atol=1e-4, rtol=0)


def test_a_cache_can_be_continued_with_more_than_one_token() -> None:
    model = tiny(**KINDS["mixed_window"])
    batch = prompts(12, 9)
    cache = model.new_cache(2, 30)
    ids = torch.tensor([batch[0], batch[1] + [0] * 3])
    prefill(model, ids[:, :7], [7, 4], cache)
    rest = torch.tensor([[*batch[0][7:]], batch[1][4:]])
    logits = prefill(model, rest, [5, 5], cache, chunk_size=2)
    for row, prompt in zip(logits, batch, strict=True):
        torch.testing.assert_close(row, uncached(model, prompt, 1)[1][0], atol=1e-4, rtol=0)
    assert cache.lengths == [12, 9]
    with pytest.raises(UserError, match=r"lengths \[0, 3\] do not fit"):
        prefill(model, rest, [0, 3], cache)
    with pytest.raises(UserError, match="the cache holds 30 tokens a row and 12 \\+ 19"):
        prefill(model, torch.zeros(2, 19, dtype=torch.long), [19, 1], cache, chunk_size=4)


def test_the_past_is_not_computed_again() -> None:
    model = tiny()
    widths: list[int] = []
    model.layers[0].register_forward_hook(lambda module, args, out: widths.append(args[0].shape[1]))
    generate(model, prompts(13, 7), GenerationConfig(max_new_tokens=6))
    assert widths == [13, 1, 1, 1, 1, 1]
    widths.clear()
    generate(model, prompts(13), GenerationConfig(max_new_tokens=2), chunk_size=5)
    assert widths == [5, 5, 3, 1]
    widths.clear()
    generate(model, prompts(13, 1, 12, 2), GenerationConfig(max_new_tokens=2), batch_size=2)
    assert widths == [2, 1, 13, 1]  # prompts of about one length share a batch


# --- against transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gqa", "mha", "tied", "headdim", "rope_llama3", "rope_linear"])
def test_equals_transformers_llama(kind: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = tiny(**KINDS[kind])
    config = model.config
    fields: dict[str, Any] = {name: value for name, value in config.to_dict().items() if name in LLAMA_FIELDS}
    fields["rope_parameters"] = {"rope_theta": config.rope_theta, **(config.rope_scaling or {"rope_type": "default"})}
    fields["attn_implementation"] = "eager"
    theirs = LlamaForCausalLM(LlamaConfig(**fields)).eval()
    missing, unexpected = theirs.load_state_dict(
        {name if name.startswith("lm_head") else f"model.{name}": value for name, value in model.state_dict().items()},
        strict=False,
    )
    assert not unexpected
    assert missing == (["lm_head.weight"] if kind == "tied" else [])
    three = prompts(13, 7, 1)
    ours = generate(model, three, GenerationConfig(max_new_tokens=20, eos_token_id=[]))
    for prompt, result in zip(three, ours, strict=True):
        ids = torch.tensor([prompt])
        expected = theirs.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert result.tokens == expected[0, len(prompt) :].tolist()
        with torch.no_grad():
            torch.testing.assert_close(model(expected), theirs(expected).logits, atol=1e-4, rtol=0)


# --- how a completion ends -----------------------------------------------------------------------------------------


def test_any_id_of_an_eos_list_ends_a_completion() -> None:  # case 13
    steps = {1: 2, 2: 9, 9: 3, 3: 4, 4: 5, 5: 6, 6: 7}
    model = chain(steps, eos_token_id=(5, 9))
    (result,) = generate(model, [[1]], GenerationConfig(max_new_tokens=20))
    assert (result.tokens, result.finish_reason) == ([2, 9], "eos")
    for eos, tokens, reason in (
        (5, [2, 9, 3, 4, 5], "eos"),
        ([5], [2, 9, 3, 4, 5], "eos"),
        ([], [2, 9, 3, 4, 5, 6], "length"),
        (None, [2, 9], "eos"),
    ):
        (result,) = generate(model, [[1]], GenerationConfig(max_new_tokens=6, eos_token_id=eos))
        assert (result.tokens, result.finish_reason) == (tokens, reason)
    for own, reason in ((None, "length"), (9, "eos")):
        (result,) = generate(chain(steps, eos_token_id=own), [[1]], GenerationConfig(max_new_tokens=2))
        assert (result.tokens, result.finish_reason) == ([2, 9], reason)


def test_finished_rows_collect_nothing_and_the_loop_ends_with_the_last() -> None:  # case 14
    eos = 15
    model = chain({1: 2, 2: eos, eos: 3, 3: 4, 4: 5, 5: 6, 6: 7, 7: eos}, eos_token_id=eos)
    calls: list[int] = []
    model.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
    for batch in ([[1], [3, 3]], [[8, 8, 1], [3]]):
        calls.clear()
        short, long = generate(model, batch, GenerationConfig(max_new_tokens=20))
        assert short.tokens == [2, eos]
        assert len(short.logprobs) == 2
        assert long.tokens == [4, 5, 6, 7, eos]
        assert len(long.logprobs) == 5
        assert (short.finish_reason, long.finish_reason) == ("eos", "eos")
        assert calls == [2, 2, 1, 1, 1]  # and the finished row has left the batch
    calls.clear()
    results = generate(model, [[1], [3], [4]], GenerationConfig(max_new_tokens=20))
    assert [r.tokens for r in results] == [[2, eos], [4, 5, 6, 7, eos], [5, 6, 7, eos]]
    assert [len(r.logprobs) for r in results] == [2, 5, 4]
    assert calls == [3, 3, 3, 3, 1]  # one in three stays until more have finished


def test_rows_that_leave_do_not_disturb_the_others() -> None:
    model = tiny()
    batch = prompts(20, 3, 11, 6, 15, 1, 8)
    config = GenerationConfig(
        max_new_tokens=25, temperature=1.0, repetition_penalty=1.3, eos_token_id=list(range(0, VOCAB, 8))
    )
    alone = [generate(model, [prompt], config)[0] for prompt in batch]
    assert len({len(result.tokens) for result in alone}) > 3
    for order in (batch, batch[::-1]):
        results = generate(model, order, config)
        for result, prompt in zip(results, order, strict=True):
            expected = alone[batch.index(prompt)]
            assert (result.tokens, result.finish_reason) == (expected.tokens, expected.finish_reason)
            torch.testing.assert_close(
                torch.tensor(result.logprobs), torch.tensor(expected.logprobs), atol=1e-4, rtol=0
            )


def test_new_tokens_are_limited_to_the_room_in_the_context() -> None:
    model = tiny()
    batch = prompts(60, 2, 63)
    results = generate(model, batch, GenerationConfig(max_new_tokens=10))
    assert [len(result.tokens) for result in results] == [4, 10, 1]
    assert {result.finish_reason for result in results} == {"length"}
    for prompt, result in zip(batch, results, strict=True):
        assert result.tokens == uncached(model, prompt, len(result.tokens))[0]


# --- sampling in a batch -------------------------------------------------------------------------------------------


def test_a_prompts_text_does_not_depend_on_batch_or_order() -> None:  # case 49
    model = tiny()
    batch = prompts(5, 9, 1, 30)
    config = GenerationConfig(max_new_tokens=15, temperature=0.9, top_k=50, top_p=0.95, seed=5)
    alone = [generate(model, [prompt], config)[0].tokens for prompt in batch]
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert [r.tokens for r in generate(model, batch, config)] == alone
    assert [r.tokens for r in generate(model, batch[::-1], config, batch_size=3)] == alone[::-1]
    assert torch.equal(torch.get_rng_state(), before)
    other_seed = GenerationConfig(max_new_tokens=15, temperature=0.9, top_k=50, top_p=0.95, seed=6)
    assert [r.tokens for r in generate(model, batch, other_seed)] != alone


def test_sample_numbers_make_different_completions() -> None:
    model = tiny()
    (prompt,) = prompts(5)
    config = GenerationConfig(max_new_tokens=10, temperature=1.0)
    results = generate(model, [prompt] * 4, config, sample_number=[0, 1, 2, 0])
    assert results[0].tokens == results[3].tokens
    assert len({tuple(r.tokens) for r in results}) == 3
    assert generate(model, [prompt], config, sample_number=2)[0].tokens == results[2].tokens


def test_logprobs_are_the_models_own_whatever_the_sampling() -> None:
    model = tiny(unpadded_vocab_size=100)
    (prompt,) = prompts(9, vocab=100)
    config = GenerationConfig(max_new_tokens=12, temperature=2.0, top_k=30, repetition_penalty=1.5, seed=3)
    (result,) = generate(model, [prompt], config)
    ids = torch.tensor([prompt + result.tokens])
    with torch.no_grad():
        logits: Any = model(ids)
    log_softmax = logits[0, 8:-1, :100].double().log_softmax(-1)
    expected = log_softmax[range(12), result.tokens]
    torch.testing.assert_close(torch.tensor(result.logprobs).double(), expected, atol=1e-4, rtol=0)


def test_the_repetition_penalty_counts_prompt_and_completion() -> None:
    model = tiny()
    batch = prompts(10, 3)
    penalty = 1.7
    results = generate(model, batch, GenerationConfig(max_new_tokens=15, repetition_penalty=penalty))
    for prompt, result in zip(batch, results, strict=True):
        ids = list(prompt)
        for token in result.tokens:
            with torch.no_grad():
                logits: Any = model(torch.tensor([ids]))
            row = logits[0, -1].tolist()
            for seen in set(ids):
                row[seen] = row[seen] * penalty if row[seen] < 0 else row[seen] / penalty
            assert token == max(range(VOCAB), key=row.__getitem__)
            ids.append(token)
    plain = generate(model, batch, GenerationConfig(max_new_tokens=15))
    assert [r.tokens for r in plain] != [r.tokens for r in results]


def test_ids_of_the_padded_vocabulary_are_never_generated() -> None:  # case 23
    model = tiny(vocab_size=192, unpadded_vocab_size=VOCAB)
    assert model.lm_head is not None
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] *= 10  # greedy would take one of them at once
    batch = [[i] for i in range(100)]
    config = GenerationConfig(max_new_tokens=20, temperature=2.0)
    drawn = [token for result in generate(model, batch, config) for token in result.tokens]
    assert len(drawn) == 2000
    assert max(drawn) < VOCAB
    assert len(set(drawn)) > 100
    for options in ({}, {"repetition_penalty": 5.0}):
        for result in generate(model, batch[:5], GenerationConfig(max_new_tokens=20, **options)):  # type: ignore[arg-type]
            assert max(result.tokens) < VOCAB
    model(torch.tensor([[150]]))  # a prompt may hold such an id; it is in the vocabulary
    assert max(generate(model, [[150]], GenerationConfig(repetition_penalty=2.0))[0].tokens) < VOCAB


def test_generate_draws_by_the_documented_function() -> None:
    model = tiny()
    (prompt,) = prompts(4)
    config = GenerationConfig(max_new_tokens=5, temperature=0.7, top_p=0.9, seed=11)
    (result,) = generate(model, [prompt], config, sample_number=3)
    key = prompt_key(11, prompt, 3)
    ids = list(prompt)
    for token in result.tokens:
        with torch.no_grad():
            logits: Any = model(torch.tensor([ids]))
        u = torch.tensor([uniform(key, len(ids))], dtype=torch.float64)
        assert sample(logits[0, -1:], config, u).tolist() == [token]
        ids.append(token)


# --- how the model is left, and what it runs in --------------------------------------------------------------------


def test_training_mode_and_gradients_are_left_as_found() -> None:
    model = tiny(attention_dropout=0.5).train()
    model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    results = [generate(model, prompts(5, 3), GenerationConfig(max_new_tokens=8)) for _ in range(2)]
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
    assert results[0] == results[1]  # no dropout
    with pytest.raises(UserError):
        generate(model, [[VOCAB]])
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))  # type: ignore[operator]
    with pytest.raises(UserError, match="logits are NaN after 0 new tokens"):
        generate(model, prompts(5))
    assert [module.training for module in model.modules()] == modes


def test_compiled_blocks_run_eagerly() -> None:
    model = tiny()
    expected = generate(model, prompts(5, 3), GenerationConfig(max_new_tokens=4))

    def never(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise AssertionError("compiled during generation")

    for block in model.layers:
        block.compile(backend=never)
    assert generate(model, prompts(5, 3), GenerationConfig(max_new_tokens=4)) == expected


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(weights: torch.dtype, autocast: bool) -> None:
    model = tiny().to(weights)
    dtypes: list[torch.dtype] = []
    model.layers[0].register_forward_hook(lambda module, args, out: dtypes.append(args[1].cache.keys[0].dtype))
    batch = prompts(13, 7, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        results = generate(model, batch, GenerationConfig(max_new_tokens=6))
        assert set(dtypes) == {torch.bfloat16 if autocast else weights}
        model.layers[0]._forward_hooks.clear()
        for prompt, result in zip(batch, results, strict=True):
            with torch.no_grad():
                logits: Any = model(torch.tensor([prompt + result.tokens]))
            log_softmax = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            logprobs = torch.tensor(result.logprobs)
            expected = log_softmax[range(6), result.tokens]
            wide = weights == torch.float32 and not autocast
            torch.testing.assert_close(logprobs, expected, atol=1e-4 if wide else 0.1 * float(logits.std()), rtol=0)


def test_decoding_mode_is_undone_after_an_error() -> None:
    model = tiny().train()
    inside: list[bool] = []

    def fail() -> None:
        with decoding_mode(model):
            inside.extend(module.training for module in model.modules())
            inside.append(torch.is_grad_enabled())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert len(inside) > 20
    assert not any(inside)
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()


# --- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 1 is empty and the model has no BOS id"),
        ([5, VOCAB], "prompt 1: token id 131 is outside the vocabulary of 131 ids"),
        ([-1], "prompt 1: token id -1 is outside"),
        ([1] * 64, "prompt 1 has 64 tokens, which leaves no room for a new one in the model's context of 64"),
        ("text", "prompt 1 must be a list of token ids, got 'text'"),
        ([1.5], r"prompt 1 must be a list of token ids, got \[1.5\]"),
        ([[1, 2]], "prompt 1 must be a list of token ids"),
        (3, "prompt 1 must be a list of token ids, got 3"),
        (torch.tensor([[1, 2]]), "prompt 1 must be a list of token ids"),
        (torch.tensor([1.0]), "prompt 1 must be a list of token ids"),
        (None, "prompt 1 must be a list of token ids, got None"),
    ],
)
def test_bad_prompts_are_named(prompt: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(tiny(), [[1], prompt])


def test_prompts_of_every_usual_type() -> None:
    model = tiny()
    (prompt,) = prompts(6)
    expected = generate(model, [prompt])[0].tokens
    assert len(expected) == 58
    tensor = torch.tensor(prompt)
    for given in (tuple(prompt), tensor, tensor.int(), tensor.numpy(), [torch.tensor(i) for i in prompt]):
        assert generate(model, [given])[0].tokens == expected  # type: ignore[list-item]
    assert [r.tokens for r in generate(model, torch.stack([tensor, tensor]))] == [expected] * 2
    assert generate(model, []) == []


def test_an_empty_prompt_starts_from_bos() -> None:
    model = tiny(bos_token_id=7)
    config = GenerationConfig(max_new_tokens=5, temperature=1.0)
    assert generate(model, [[]], config) == generate(model, [[7]], config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"sample_number": [1, 2]}, "2 sample numbers for 1 prompts"),
        ({"generation_config": GenerationConfig(eos_token_id=[3, VOCAB])}, r"generation\.eos_token_id 131 is outside"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(tiny(), [[1]], **arguments)
