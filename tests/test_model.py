"""The Transformer against transformers' own models, its initialisation, and its refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lit_llm.errors import UserError
from lit_llm.model import ModelConfig, Transformer
from lit_llm.model.presets import PRESETS
from lit_llm.ops.rope import apply_rope, rope_inverse_frequencies, rope_tables

TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def perturb(model: torch.nn.Module, seed: int = 1) -> None:
    """Norms and biases away from 1 and 0, so that a forgotten one shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def copy_weights(theirs: torch.nn.Module, ours: Transformer) -> None:
    """Hugging Face's names are ours behind a `model.`; a tied head appears once here."""
    state = {name.removeprefix("model."): value for name, value in theirs.state_dict().items()}
    if ours.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    ours.load_state_dict(state)


def hugging_face(kind: str, **changes: Any) -> torch.nn.Module:
    import transformers

    config_class = getattr(transformers, f"{kind}Config")
    config = config_class(**{**TINY, "attn_implementation": "eager", "pad_token_id": 0, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    perturb(model)
    return model


CASES = {
    "gqa": ("Llama", {}, {}),
    "tied": ("Llama", {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    "bias": ("Llama", {"attention_bias": True, "mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}),
    "head_dim": ("Llama", {"head_dim": 32}, {"head_dim": 32}),
    "rope_llama3": (
        "Llama",
        {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 10000.0}},
        {"rope_scaling": LLAMA3_ROPE},
    ),
    "rope_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 500.0},
    ),
    "window": ("Mistral", {"sliding_window": 8}, {"sliding_window": 8}),
    "qkv_bias": ("Qwen2", {}, {"attention_bias": True, "attention_output_bias": False}),
    "qk_norm": ("Qwen3", {"head_dim": 16}, {"use_qk_norm": True, "head_dim": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    kind, theirs, ours = CASES[case]
    reference = hugging_face(kind, **theirs)
    model = Transformer(ModelConfig(**TINY, rms_norm_eps=reference.config.rms_norm_eps, **_without(ours))).eval()
    copy_weights(reference, model)
    input_ids = torch.randint(0, 131, (2, 48))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids), reference(input_ids).logits, atol=1e-4, rtol=1e-4)


def _without(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in TINY}


def test_the_loss_equals_the_cross_entropy_of_the_logits() -> None:
    model = Transformer(ModelConfig(**TINY))
    input_ids, labels = torch.randint(0, 131, (2, 2, 20)).unbind(0)
    labels[0, :5] = -100
    loss_sum, count = model(input_ids, labels=labels)
    logits = model(input_ids)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert int(count) == 35
    torch.testing.assert_close(loss_sum, expected, rtol=1e-6, atol=1e-4)


def _capped_and_plain(cap: float = 0.3, **fields: Any) -> tuple[Transformer, Transformer]:
    """The same weights with a final soft cap and without; the cap bites."""
    capped, plain = (Transformer(ModelConfig(**TINY, final_logit_softcapping=c, **fields)).eval() for c in (cap, None))
    perturb(plain)
    capped.load_state_dict(plain.state_dict())
    return capped, plain


@pytest.mark.parametrize("tied", [False, True])
def test_the_final_softcap_caps_every_kind_of_logits(tied: bool) -> None:
    capped, plain = _capped_and_plain(tie_word_embeddings=tied)
    input_ids, places = torch.randint(0, 131, (2, 12)), torch.tensor([3, 11])
    with torch.no_grad():
        logits = plain(input_ids)
        expected = 0.3 * torch.tanh(logits / 0.3)
        assert (logits - expected).abs().max() > 1
        torch.testing.assert_close(capped(input_ids), expected, atol=1e-6, rtol=0)
        at = capped(input_ids, logits_at=places)
        torch.testing.assert_close(at, expected[torch.arange(2), places], atol=1e-5, rtol=0)
        cached = capped(input_ids, cache=capped.new_cache(2, 12))
        torch.testing.assert_close(cached, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_of_a_capped_model_is_that_of_its_logits(tied: bool) -> None:
    model, _ = _capped_and_plain(tie_word_embeddings=tied)
    input_ids, labels = torch.randint(0, 131, (2, 2, 20)).unbind(0)
    labels[0, :5] = -100
    loss_sum, count = model(input_ids, labels=labels, z_loss=0.1, label_smoothing=0.2)
    logits = model(input_ids)
    entropy = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.2
    )
    z_loss = 0.1 * (logits.logsumexp(-1)[labels != -100] ** 2).sum()
    assert int(count) == 35
    assert z_loss > 10
    torch.testing.assert_close(loss_sum, entropy + z_loss, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(model(input_ids, labels=labels)[0], _entropy(logits, labels), rtol=1e-6, atol=1e-4)
    ours, theirs = (torch.autograd.grad(x, list(model.parameters())) for x in (loss_sum, entropy + z_loss))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 * b.abs().max().item(), rtol=0)


def _entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def test_loss_options_out_of_range_are_one_line() -> None:
    model = Transformer(ModelConfig(**TINY))
    ids = torch.zeros(1, 4, dtype=torch.int64)
    for options, words in (({"z_loss": -1.0}, "z_loss is -1.0"), ({"label_smoothing": 1.0}, "label_smoothing is 1.0")):
        with pytest.raises(UserError, match=words):
            model(ids, labels=ids, **options)


def test_greedy_generation_of_a_capped_model_is_the_argmax_of_the_whole_forward() -> None:
    from lit_llm.generation import GenerationConfig, generate

    capped, plain = _capped_and_plain(cap=2.0)
    prompt = [5, 17, 99, 3]
    greedy = GenerationConfig(max_new_tokens=12)  # temperature 0
    completion = generate(capped, [prompt], greedy)[0]
    ids = list(prompt)
    logprobs = []
    with torch.no_grad():
        for _ in range(12):
            logits = capped(torch.tensor([ids]))[0, -1]
            ids.append(int(logits.argmax()))
            logprobs.append(logits.log_softmax(-1).max())
        uncapped = plain(torch.tensor([prompt]))[0, -1].log_softmax(-1).max()
    assert list(completion.tokens) == ids[4:]
    # The argmax alone would be the uncapped model's as well: the probabilities are not.
    torch.testing.assert_close(torch.tensor(completion.logprobs), torch.stack(logprobs), atol=1e-4, rtol=0)
    assert abs(uncapped - logprobs[0]) > 0.1


def test_packed_documents_equal_each_alone() -> None:
    for window in (None, 4):
        model = Transformer(ModelConfig(**TINY, sliding_window=window)).eval()
        a, b = torch.randint(0, 131, (1, 5)), torch.randint(0, 131, (1, 6))
        documents = torch.tensor([[7] * 5 + [3] * 6])
        with torch.no_grad():
            packed = model(torch.cat([a, b], dim=1), document_ids=documents)
            torch.testing.assert_close(packed[:, :5], model(a), atol=1e-5, rtol=0)
            torch.testing.assert_close(packed[:, 5:], model(b), atol=1e-5, rtol=0)
            open_row = model(torch.cat([a, b], dim=1))
        assert (open_row[:, 5:] - packed[:, 5:]).abs().max() > 1e-3


def test_document_positions_restart_over_row_borders() -> None:
    model = Transformer(ModelConfig(**TINY)).eval()
    rows = torch.randint(0, 131, (2, 8))
    # The same id on both sides of a row border: still two documents.
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 2, 2, 2, 2, 2, 2]])
    with torch.no_grad():
        packed = model(rows, document_ids=documents)
        pieces = [(0, 0, 3), (0, 3, 8), (1, 0, 2), (1, 2, 8)]
        for row, start, end in pieces:
            alone = model(rows[row : row + 1, start:end])
            torch.testing.assert_close(packed[row, start:end], alone[0], atol=1e-5, rtol=0)


def test_meta_construction_allocates_nothing_and_a_later_init_equals_the_direct_one() -> None:
    config = ModelConfig(**TINY)
    with torch.device("meta"):
        empty = Transformer(config)
    assert all(p.is_meta for p in empty.parameters())
    empty.to_empty(device="cpu")
    empty.init_weights(seed=3)
    direct = Transformer(config, seed=3)
    for (name, one), (_, other) in zip(empty.named_parameters(), direct.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_70b_model_builds_on_meta() -> None:
    with torch.device("meta"):
        model = Transformer(ModelConfig.preset("llama-3-70b"))
    assert model.num_parameters() == 70_553_706_496


def test_initial_weights_are_a_function_of_seed_and_name() -> None:
    torch.manual_seed(1)
    one = Transformer(ModelConfig(**TINY), seed=5)
    torch.manual_seed(2)
    same, other = Transformer(ModelConfig(**TINY), seed=5), Transformer(ModelConfig(**TINY), seed=6)
    assert torch.equal(one.embed_tokens.weight, same.embed_tokens.weight)
    assert not torch.equal(one.embed_tokens.weight, other.embed_tokens.weight)
    deeper = Transformer(dataclasses.replace(one.config, num_hidden_layers=4), seed=5)
    assert torch.equal(one.layers[0].mlp.up_proj.weight, deeper.layers[0].mlp.up_proj.weight)
    stds = [p.std().item() for n, p in one.named_parameters() if n.endswith("q_proj.weight")]
    assert all(0.018 < std < 0.022 for std in stds)


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    model = Transformer(ModelConfig(**TINY))
    input_ids = torch.randint(0, 131, (4, 64))
    loss_sum, count = model(input_ids, labels=torch.randint(0, 131, (4, 64)))
    assert abs(float(loss_sum / count) - torch.tensor(131.0).log().item()) < 0.1


def test_a_tied_head_is_one_parameter() -> None:
    model = Transformer(ModelConfig(**TINY, tie_word_embeddings=True))
    assert model.head_weight is model.embed_tokens.weight
    assert "lm_head.weight" not in model.state_dict()
    copied = Transformer(ModelConfig(**TINY, tie_word_embeddings=True)).to(torch.bfloat16)
    assert copied.head_weight is copied.embed_tokens.weight


@pytest.mark.parametrize("cast", [False, True])
def test_rotary_tables_stay_float32(cast: bool) -> None:
    model = Transformer(ModelConfig(**{**TINY, "max_position_embeddings": 8192}))
    if cast:
        model = model.to(torch.bfloat16)
    assert model._rotary is not None
    positions = torch.tensor([[257, 1857, 8191]])
    (cos, sin), local = model._rotary.tables(positions, None)
    assert (cos.dtype, sin.dtype, local) == (torch.float32, torch.float32, None)
    exact = positions.double()[..., None, None] * rope_inverse_frequencies(16, 10000.0)
    assert (cos.double() - torch.cat([exact.cos(), exact.cos()], dim=-1)).abs().max() < 0.004
    assert (sin.double() - torch.cat([-exact.sin(), exact.sin()], dim=-1)).abs().max() < 0.004


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_rotation_equals_complex_multiplication(dtype: torch.dtype, rotary_dim: int) -> None:
    x = torch.randn(2, 5, 3, 16).to(dtype)
    inv_freq = rope_inverse_frequencies(rotary_dim, 100.0)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 30, 31]])
    got = apply_rope(x, *rope_tables(positions, inv_freq.float()))
    half = rotary_dim // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double())
    turned = pairs * torch.polar(torch.ones(()).double(), positions[..., None, None] * inv_freq)
    expected = torch.cat([turned.real, turned.imag, x[..., rotary_dim:].double()], dim=-1)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


def test_compiled_blocks_keep_keys_and_gradients() -> None:
    model = Transformer(ModelConfig(**{**TINY, "num_hidden_layers": 2}))
    plain = Transformer(model.config)
    model.compile_blocks()
    assert list(model.state_dict()) == list(plain.state_dict())
    input_ids, labels = torch.randint(0, 131, (2, 2, 16)).unbind(0)
    for one in (model, plain):
        one(input_ids, labels=labels)[0].backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_every_preset_is_valid_and_near_its_name() -> None:
    sizes = {"1m": 1e6, "3m": 3e6, "15m": 15e6, "125m": 125e6, "350m": 350e6, "llama-3.2-1b": 1.24e9, "llama-3-8b": 8e9}
    for name in PRESETS:
        with torch.device("meta"):
            count = Transformer(ModelConfig.preset(name)).num_parameters()
        assert name == "llama-3-70b" or 0.7 < count / sizes[name] < 1.4, (name, count)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 65}, "hidden_size 65 does not divide by num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 does not divide by num_key_value_heads 3"),
        ({"hiden_size": 64}, "did you mean hidden_size"),
        ({"hidden_size": "big"}, "model.config.hidden_size must be a whole number, got 'big'"),
        ({"hidden_size": 0}, "model.config.hidden_size must be at least 1"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "unknown rope_type 'spiral'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a positive number for 'factor'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["sliding_attention"] * 3}, "give sliding_window"),
        ({"hidden_act": "swish2"}, "hidden_act 'swish2' is unknown"),
        ({"unpadded_vocab_size": 200}, "unpadded_vocab_size 200 is above vocab_size 131"),
        ({"attention_dropout": 1.0}, "attention_dropout must be in"),
        ({"tie_word_embeddings": "yes"}, "must be true or false"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping must be above 0 or null"),
        ({"final_logit_softcapping": "high"}, "final_logit_softcapping must be a number"),
    ],
)
def test_a_bad_configuration_is_one_line(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        ModelConfig.from_dict({**TINY, **fields})
    assert "\n" not in str(caught.value)


def test_numbers_written_as_text_are_numbers() -> None:
    config = ModelConfig.from_dict({**TINY, "rms_norm_eps": "1e-5", "rope_theta": "5e5", "hidden_size": 64.0})
    assert (config.rms_norm_eps, config.rope_theta, config.hidden_size) == (1e-5, 5e5, 64)


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="did you mean llama-3-8b"):
        ModelConfig.preset("llama-3-8")


def test_configuration_round_trips_as_plain_types() -> None:
    config = ModelConfig(**TINY, layer_types=("full_attention",) * 3, eos_token_id=(1, 2), rope_scaling=LLAMA3_ROPE)
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_refusals_at_run_time() -> None:
    model = Transformer(ModelConfig(**TINY))
    with pytest.raises(UserError, match="token id 131 is outside the vocabulary of 131"):
        model(torch.tensor([[1, 131]]))
    with pytest.raises(UserError, match="65 tokens are more than the model's context of 64"):
        model(torch.zeros(1, 65, dtype=torch.int64))
    with pytest.raises(UserError, match="65 tokens are more than the model's context of 64"):
        model.new_cache(1, 65)


def test_flops_follow_the_convention() -> None:
    """6 x (parameters - embeddings) + 12 x layers x heads x head_dim x seq; of experts the ones that a token meets."""
    with torch.device("meta"):
        llama = Transformer(ModelConfig.preset("llama-3-8b"))
        tied = Transformer(ModelConfig(**TINY, tie_word_embeddings=True))
        untied = Transformer(ModelConfig(**TINY))
        learned = Transformer(ModelConfig(**TINY, position_embedding="learned"))
        windowed = Transformer(ModelConfig(**TINY, sliding_window=8))
        sparse = Transformer(ModelConfig(**TINY, num_experts=8, num_experts_per_tok=2))
    assert llama.flops_per_token(8192) == 6 * (8030261248 - 128256 * 4096) + 12 * 32 * 32 * 128 * 8192
    assert tied.flops_per_token(24) == untied.flops_per_token(24)
    assert learned.flops_per_token(24) == untied.flops_per_token(24)
    attention = 12 * 3 * 64
    assert untied.flops_per_token(24) - windowed.flops_per_token(24) == attention * (24 - 8)
    assert untied.flops_per_token(24) - untied.flops_per_token(24, causal=True) == attention * (24 - 12.5)
    seen = sum(min(query + 1, 8) for query in range(24)) / 24
    assert untied.flops_per_token(24) - windowed.flops_per_token(24, causal=True) == round(attention * (24 - seen))
    expert = 3 * 64 * 128
    assert sparse.num_parameters() == untied.num_parameters() + 3 * (7 * expert + 8 * 64)
    assert sparse.num_parameters(active=True) == untied.num_parameters() + 3 * (expert + 8 * 64)
    assert sparse.flops_per_token(24) == untied.flops_per_token(24) + 6 * 3 * (expert + 8 * 64)


def test_dropout_falls_on_what_is_added_and_on_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a factor in place of the mask, so that there is something to compare."""
    factors: list[float] = []

    def scaled(x: torch.Tensor, p: float) -> torch.Tensor:
        factors.append(p)
        return x * (1 - p)

    monkeypatch.setattr(torch.nn.functional, "dropout", scaled)
    plain = Transformer(ModelConfig(**TINY))
    perturb(plain)
    for parallel in (False, True):
        fields = {**TINY, "use_parallel_residual": parallel}
        dropped = Transformer(ModelConfig(**fields, hidden_dropout=0.25, embedding_dropout=0.5))
        by_hand = Transformer(ModelConfig(**fields, residual_multiplier=0.75, embedding_multiplier=0.5))
        for model in (dropped, by_hand):
            model.load_state_dict(plain.state_dict())
        ids = torch.arange(12)[None]
        factors.clear()
        torch.testing.assert_close(dropped.train()(ids), by_hand(ids))
        assert factors == [0.5, *[0.25] * 6]
        factors.clear()
        dropped.eval()(ids)
        assert factors == []


def test_the_embeddings_multiplier_is_rounded_as_the_embedding_is() -> None:
    """Gemma's sqrt(3072) is 55.5 in bfloat16, as it was trained; in float32 it is not rounded."""
    model = Transformer(ModelConfig(**TINY, embedding_multiplier=55.425625))
    ids = torch.arange(5)[None]
    assert torch.equal(model._embed(ids, ids), model.embed_tokens(ids) * 55.425625)
    model = model.bfloat16()
    assert torch.equal(model._embed(ids, ids), model.embed_tokens(ids) * 55.5)
    assert not torch.equal(model._embed(ids, ids), model.embed_tokens(ids) * 55.425625)


def test_shapes_are_worked_out_without_values() -> None:
    for fields in (
        {"sliding_window": 8},
        {"num_experts": 4, "num_experts_per_tok": 2},
        {"attn_logit_softcapping": 5.0},
    ):
        with torch.device("meta"):
            model, ids = Transformer(ModelConfig(**TINY, **fields)), torch.zeros(2, 24, dtype=torch.int64)
            assert model(ids).shape == (2, 24, 131)
