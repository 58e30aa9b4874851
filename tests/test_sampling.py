"""Sampling: penalty, filters, the draw and its random numbers, and the options' checks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_llm.errors import UserError
from lit_llm.generation.config import GenerationConfig
from lit_llm.generation.sampling import (
    apply_repetition_penalty,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    prompt_key,
    sample,
    uniform,
)

PROBABILITIES = torch.tensor([[0.3, 0.1, 0.1, 0.5]]).log()


def kept(logits: Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


def uniforms(count: int, seed: int = 0) -> Tensor:
    key = prompt_key(seed, [1, 2, 3])
    return torch.tensor([uniform(key, position) for position in range(count)], dtype=torch.float64)


# --- case 11 -------------------------------------------------------------------------------------------------------


def test_repetition_penalty_punishes_each_seen_id_once() -> None:
    logits = torch.tensor([[-2.0, 1.0, 3.0], [-2.0, 1.0, 3.0]])
    seen = torch.zeros(2, 3, dtype=torch.bool)
    for token in (0, 2, 2):
        seen[0, token] = True
    assert apply_repetition_penalty(logits, seen, 1.5).tolist() == [[-3.0, 1.0, 2.0], [-2.0, 1.0, 3.0]]


# --- case 10 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "expected"),
    [(0.8, [0, 3]), (0.79, [0, 3]), (0.81, [0, 1, 3]), (0.5, [3]), (0.0, [3]), (1e-9, [3]), (1.0, [0, 1, 2, 3])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, expected: list[int], dtype: torch.dtype) -> None:
    assert kept(keep_top_p(PROBABILITIES.to(dtype), p)) == [expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_hit_exactly_keeps_no_extra(dtype: torch.dtype) -> None:
    for percent in ([45, 35, 10, 5, 5], [30, 30, 25, 15], [50, 25, 15, 10], [40, 30, 30], [10] * 10):
        logits = torch.tensor([[share / 100 for share in percent]], dtype=dtype).log()
        for count in range(1, len(percent)):
            assert kept(keep_top_p(logits, sum(percent[:count]) / 100)) == [list(range(count))]


@pytest.mark.parametrize(
    ("k", "expected"), [(1, [3]), (2, [0, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3]), (99, [0, 1, 2, 3])]
)
def test_top_k_keeps_exactly_k_also_among_equals(k: int, expected: list[int]) -> None:
    assert kept(keep_top_k(PROBABILITIES, k)) == [expected]


@pytest.mark.parametrize(("p", "expected"), [(0.0, [0, 1, 2, 3]), (0.19, [0, 1, 2, 3]), (0.3, [0, 3]), (1.0, [3])])
def test_min_p_is_a_share_of_the_best(p: float, expected: list[int]) -> None:
    assert kept(keep_min_p(PROBABILITIES, p)) == [expected]


def test_filters_treat_each_row_alone() -> None:
    rows = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 3
    filters: list[Any] = [partial(keep_top_k, k=7), partial(keep_top_p, p=0.6), partial(keep_min_p, p=0.1)]
    for keep in filters:
        for row, alone in zip(keep(rows), rows, strict=True):
            assert torch.equal(row, keep(alone[None])[0])
            assert 0 < row.isfinite().sum() < 40


def test_top_p_matches_a_plain_loop() -> None:
    rows = torch.randn(20, 50, generator=torch.Generator().manual_seed(1)) * 2
    for p in (0.1, 0.5, 0.9, 0.99):
        for row, result in zip(rows, kept(keep_top_p(rows, p)), strict=True):
            probabilities = row.double().softmax(0).tolist()
            best, total = [], 0.0
            for i in sorted(range(50), key=lambda i: -probabilities[i]):
                best.append(i)
                total += probabilities[i]
                if total >= p:
                    break
            assert result == sorted(best)


# --- the draw ------------------------------------------------------------------------------------------------------


def chi_square(counts: Tensor, probabilities: Tensor) -> tuple[float, int]:
    expected = probabilities * counts.sum()
    assert expected.min() >= 5  # the test's own condition
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_softmax(temperature: float) -> None:
    count = 20_000
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, 2.0, -0.5, 1.0, -1.5])
    config = GenerationConfig(temperature=temperature)
    tokens = sample(logits.expand(count, -1), config, uniforms(count))
    statistic, freedom = chi_square(tokens.bincount(minlength=8).double(), (logits.double() / temperature).softmax(0))
    # Mean and spread of chi-square are its degrees of freedom and the root of twice that; 7 + 4.5 spreads is p < 0.001.
    assert statistic < freedom + 4.5 * math.sqrt(2 * freedom)


def test_filtered_draws_follow_the_renormalised_softmax() -> None:
    count = 20_000
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, 2.0, -0.5, 1.0, -1.5])
    tokens = sample(logits.expand(count, -1), GenerationConfig(temperature=1.0, top_k=4), uniforms(count, seed=1))
    assert tokens.unique().tolist() == [0, 2, 4, 6]
    best = [0, 2, 4, 6]
    statistic, freedom = chi_square(tokens.bincount(minlength=8)[best].double(), logits[best].double().softmax(0))
    assert statistic < freedom + 4.5 * math.sqrt(2 * freedom)


def test_draw_inverts_the_cumulative_distribution_in_order() -> None:
    probabilities = torch.tensor([0.25, 0.0, 0.5, 0.25])
    u = torch.tensor([0.0, 0.2499, 0.2501, 0.5, 0.7499, 0.7501, 1 - 2**-52], dtype=torch.float64)
    assert draw(probabilities.log().expand(7, -1), u).tolist() == [0, 0, 2, 2, 2, 3, 3]


CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-52])
def test_draw_never_takes_an_id_of_probability_zero(u: float, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 1000, 50_000):
        logits = torch.randn(3, size, generator=generator) * 20
        allowed = torch.rand(3, size, generator=generator) < 0.1
        allowed[:, size // 2] = True
        logits = logits.masked_fill(~allowed, -torch.inf).to(device)
        tokens = draw(logits, torch.full((3,), u, dtype=torch.float64, device=device))
        assert logits.gather(1, tokens[:, None]).isfinite().all()


@pytest.mark.parametrize("temperature", [1e-30, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)) * 5
    config = GenerationConfig(temperature=temperature, top_p=0.9, min_p=0.1)
    assert torch.equal(sample(logits, config, uniforms(4)), logits.argmax(-1))


def test_a_large_temperature_is_even() -> None:
    logits = torch.randn(1, 4, generator=torch.Generator().manual_seed(0)).expand(8000, -1)
    counts = sample(logits, GenerationConfig(temperature=1e30), uniforms(8000)).bincount(minlength=4).double()
    statistic, freedom = chi_square(counts, torch.full((4,), 0.25, dtype=torch.float64))
    assert statistic < freedom + 4.5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("options", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"top_k": 5, "top_p": 1e-9}])
def test_the_narrowest_filters_are_greedy(options: dict[str, Any]) -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, GenerationConfig(temperature=3.0, **options), uniforms(6)), logits.argmax(-1))


def test_random_numbers_are_pinned_and_depend_on_everything() -> None:
    # Pinned: another value here changes the text that every user's seed gives.
    assert uniform(prompt_key(0, [1, 2, 3], 0), 3) == 0.24098195299969505
    values = {
        uniform(prompt_key(seed, prompt, number), position)
        for seed in (0, 1, -1, 2**70)
        for prompt in ([1, 2, 3], [12, 3], [1, 23], [3, 2, 1])
        for number in (0, 1)
        for position in (3, 4)
    }
    assert len(values) == 64
    assert all(0 <= value < 1 for value in values)
    assert prompt_key(0, torch.tensor([1, 2]).numpy()) == prompt_key(0, [1, 2])  # type: ignore[arg-type]


# --- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", None),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", None),
        ("temperature", "warm"),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("top_p", [0.5]),
        ("min_p", 1.01),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("stop", "\n"),
        ("stop", [""]),
        ("stop", [1]),
        ("eos_token_id", -1),
        ("eos_token_id", [5, "x"]),
        ("eos_token_id", 1.5),
        ("seed", "one"),
        ("seed", 1e400),
    ],
)
def test_bad_options_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^generation\.{field} ") as caught:
        GenerationConfig(**{field: value})
    assert "\n" not in str(caught.value).replace(repr(value), "")


def test_numbers_may_come_as_text() -> None:
    config = GenerationConfig(
        max_new_tokens="7",  # type: ignore[arg-type]
        temperature="3e-4",  # type: ignore[arg-type]
        top_k="1e2",  # type: ignore[arg-type]
        top_p="1",  # type: ignore[arg-type]
        eos_token_id=["5", 9],  # type: ignore[list-item]
        seed=10**400,
    )
    assert (config.max_new_tokens, config.temperature, config.top_k, config.top_p) == (7, 3e-4, 100, 1.0)
    assert isinstance(config.top_p, float)
    assert config.eos_token_id == [5, 9]
    assert GenerationConfig(eos_token_id=[]).eos_token_id == []
    assert GenerationConfig().greedy


def test_the_command_line_can_parse_every_option() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--generation", type=GenerationConfig, default=GenerationConfig())
    given = [
        "--generation.temperature=3e-1",
        "--generation.top_k=5",
        "--generation.eos_token_id=[]",
        "--generation.seed=3",
    ]
    config = parser.instantiate_classes(parser.parse_args([*given, '--generation.stop=["a", "b"]'])).generation
    assert config == GenerationConfig(temperature=0.3, top_k=5, eos_token_id=[], stop=["a", "b"], seed=3)
    config = parser.instantiate_classes(parser.parse_args(["--generation.eos_token_id=5", "--generation.top_k=null"]))
    assert config.generation == GenerationConfig(eos_token_id=5)
