"""Parameter groups, AdamW and learning-rate schedules."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import nn

from lit_llm.errors import UserError
from lit_llm.optim import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    build_scheduler,
    lr_factor,
    parameter_groups,
)

HEAD = "head.weight"


class Tiny(nn.Module):
    """Every kind of parameter; the head is listed before the embedding it may be tied to."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(4, 11, bias=False)
        self.embed = nn.Embedding(11, 4)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.experts = nn.Parameter(torch.randn(2, 4, 4))
        self.experts_bias = nn.Parameter(torch.randn(2, 4))
        if tied:
            self.head.weight = self.embed.weight


def names(module: nn.Module) -> dict[str, list[str]]:
    return {group["name"]: group["param_names"] for group in parameter_groups(module, 0.1)}


# ---- groups ----


def test_groups() -> None:
    assert names(Tiny()) == {
        "decay": ["experts", HEAD, "linear.weight"],
        "no_decay": ["experts_bias", "embed.weight", "norm.weight", "norm.bias", "linear.bias"],
    }
    decay, no_decay = parameter_groups(Tiny(), 0.3)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.3, 0.0)


def test_a_tied_head_is_an_embedding_and_appears_once() -> None:
    module = Tiny(tied=True)
    found = names(module)
    assert found["decay"] == ["experts", "linear.weight"]
    assert found["no_decay"].count(HEAD) == 1
    assert "embed.weight" not in found["no_decay"]
    parameters = [id(p) for group in parameter_groups(module, 0.1) for p in group["params"]]
    assert sorted(parameters) == sorted(id(p) for p in module.parameters())


def test_frozen_parameters_are_in_no_group() -> None:
    module = Tiny()
    module.linear.requires_grad_(False)
    module.embed.requires_grad_(False)
    assert names(module) == {"decay": ["experts", HEAD], "no_decay": ["experts_bias", "norm.weight", "norm.bias"]}
    module.requires_grad_(False)
    module.linear.weight.requires_grad_(True)
    assert names(module) == {"decay": ["linear.weight"]}


@pytest.mark.parametrize("fused", [None, False])
def test_zero_gradients_decay_only_matrices(fused: bool | None) -> None:
    """Case 41: lr 0.1, decay 0.1, one step."""
    module = Tiny(tied=True)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = build_optimizer(module, OptimizerConfig(lr=0.1, weight_decay=0.1, fused=fused))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = {"experts", "linear.weight"}
    for name, parameter in module.named_parameters():
        expected = before[name] * (0.99 if name in decayed else 1.0)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=0)


# ---- optimizer ----


def trained(fused: bool | None, steps: int = 20) -> tuple[torch.optim.AdamW, Tiny]:
    torch.manual_seed(0)
    module = Tiny()
    optimizer = build_optimizer(module, OptimizerConfig(lr=1e-2, fused=fused))
    for _ in range(steps):
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer, module


def test_fused_equals_plain() -> None:
    """Fused by default on the CPU, and the same update as torch's plain loop but for rounding."""
    fused, fused_module = trained(None)
    plain, plain_module = trained(False)
    assert fused.defaults["fused"] is True
    assert not plain.defaults["fused"]
    for a, b in zip(fused_module.parameters(), plain_module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_config_reaches_the_optimizer() -> None:
    config = OptimizerConfig(lr=1e-3, weight_decay=0.05, betas=(0.8, 0.99), eps=1e-6)
    optimizer = build_optimizer(Tiny(), config)
    for group, decay in zip(optimizer.param_groups, (0.05, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.8, 0.99), 1e-6)
        assert group["weight_decay"] == decay


def test_state_loads_with_weights_only() -> None:
    optimizer, _ = trained(None, steps=2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    fresh, _ = trained(None, steps=0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert [group["param_names"] for group in fresh.param_groups] == list(names(Tiny()).values())


@pytest.mark.parametrize("kind", [{"dtype": torch.complex64}, {"device": "meta"}])
def test_fused_where_there_is_none(kind: dict[str, Any]) -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.zeros(3, **kind))
    with pytest.raises(UserError, match=r"optimizer\.fused cannot be true for torch"):
        build_optimizer(module, OptimizerConfig(fused=True))
    assert not build_optimizer(module, OptimizerConfig()).defaults["fused"]


def test_nothing_to_train() -> None:
    with pytest.raises(UserError, match="no parameter to train"):
        build_optimizer(Tiny().requires_grad_(False), OptimizerConfig())


@pytest.mark.parametrize("text", ["3e-4", "3E-4", "3.0e-4", "0.0003", 3e-4])
def test_numbers_as_text(text: Any) -> None:
    assert OptimizerConfig(lr=text).lr == 0.0003
    assert OptimizerConfig(betas=["0.9", 0.95]).betas == (0.9, 0.95)  # type: ignore[arg-type]
    assert ScheduleConfig(warmup_steps="1e3").warmup_steps == 1000  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "sgd"}, r"optimizer\.name must be one of adamw, not 'sgd'"),
        ({"lr": "fast"}, r"optimizer\.lr must be a number, at least 0, not 'fast'"),
        ({"lr": -1.0}, r"optimizer\.lr"),
        ({"lr": None}, r"optimizer\.lr"),
        ({"lr": True}, r"optimizer\.lr"),
        ({"lr": "nan"}, r"optimizer\.lr"),
        ({"eps": math.inf}, r"optimizer\.eps"),
        ({"weight_decay": [0.1]}, r"optimizer\.weight_decay"),
        ({"betas": (0.9,)}, r"optimizer\.betas must be two numbers"),
        ({"betas": "0.9"}, r"optimizer\.betas must be two numbers"),
        ({"betas": (0.9, 1.0)}, r"optimizer\.betas\[1\] must be a number, at least 0 and below 1, not 1\.0"),
        ({"fused": "yes"}, r"optimizer\.fused"),
    ],
)
def test_optimizer_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**change)


# ---- schedules ----


def factors(total: int, **config: Any) -> list[float]:
    return [lr_factor(step, ScheduleConfig(**config), total) for step in range(total)]


def test_warmup_is_the_same_for_every_shape() -> None:
    for name in ("cosine", "linear", "wsd", "inverse_sqrt", "constant"):
        assert factors(100, name=name, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]
        assert factors(100, name=name, warmup_fraction=0.04)[:4] == [0.25, 0.5, 0.75, 1.0]
        assert factors(400, name=name)[:4] == [0.25, 0.5, 0.75, 1.0]  # by default 1%


def test_linear() -> None:
    expected = [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert factors(7, name="linear", warmup_steps=2, min_lr_ratio=0.2) == pytest.approx(expected, abs=1e-12)


def test_cosine() -> None:
    # from 1 at step 2 to 0.2 at step 6: 0.2 + 0.8 (1 + cos(pi x)) / 2 at x = 0, 1/4, 1/2, 3/4, 1
    quarter = 0.2 + 0.4 * (1 + math.sqrt(0.5))
    expected = [0.5, 1.0, 1.0, quarter, 0.6, 1.2 - quarter, 0.2]
    assert factors(7, name="cosine", warmup_steps=2, min_lr_ratio=0.2) == pytest.approx(expected, abs=1e-12)


def test_wsd() -> None:
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    found = factors(10, name="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.2)
    assert found == pytest.approx(expected, abs=1e-12)
    assert found == factors(10, name="wsd", warmup_steps=2, decay_fraction=0.4, min_lr_ratio=0.2)
    assert factors(100, name="wsd").index(min(factors(100, name="wsd"))) == 99
    assert factors(100, name="wsd")[79:81] == pytest.approx([1.0, 1 - 0.9 / 20])  # by default the last 20%
    assert factors(10, name="wsd", warmup_steps=0, decay_steps=0) == [1.0] * 10
    # more decay than the warm-up leaves: the decay starts after it
    squeezed = factors(5, name="wsd", warmup_steps=3, decay_steps=4, min_lr_ratio=0.0)
    assert squeezed == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5, 0.0])


def test_inverse_sqrt() -> None:
    config = ScheduleConfig(name="inverse_sqrt", warmup_steps=4)
    assert [lr_factor(step, config) for step in (3, 15, 63, 399)] == pytest.approx([1.0, 0.5, 0.25, 0.1])
    without = ScheduleConfig(name="inverse_sqrt", warmup_steps=0)
    assert [lr_factor(step, without) for step in (0, 3, 99)] == pytest.approx([1.0, 0.5, 0.1])


def test_constant() -> None:
    assert factors(5, name="constant", warmup_steps=0) == [1.0] * 5


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("total", [2, 3, 10, 1000])
@pytest.mark.parametrize("warmup_fraction", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_ends_and_monotone(name: str, total: int, warmup_fraction: float, ratio: float) -> None:
    config = ScheduleConfig(name=name, warmup_fraction=warmup_fraction, min_lr_ratio=ratio)  # type: ignore[arg-type]
    found = [lr_factor(step, config, total) for step in range(total)]
    warmup = round(warmup_fraction * total)
    if warmup < total - 1 and not (name == "wsd" and round(0.2 * total) == 0):
        assert found[-1] == ratio
        assert lr_factor(total + 50, config, total) == ratio
    if warmup < total - 1:
        assert found[warmup] == 1.0
    assert all(0.0 < a < b for a, b in zip(found[:warmup], found[1:warmup], strict=False))
    assert all(a >= b for a, b in zip(found[warmup:], found[warmup + 1 :], strict=False))
    if total == 1000:  # no jump: a linear step is the largest but for cosine's, which is pi / 2 of it
        shortest = 200 if name == "wsd" else total - warmup - 1
        largest = max(1 / max(warmup, 1) if warmup > 1 else 0, math.pi / 2 * (1 - ratio) / shortest)
        assert max(abs(a - b) for a, b in zip(found, found[1:], strict=False)) <= largest * (1 + 1e-9)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_runs_of_a_single_step_and_shorter_than_the_warmup(name: str) -> None:
    assert factors(5, name=name, warmup_steps=10) == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert factors(1, name="cosine", warmup_steps=0) == [1.0]
    assert factors(1, name="linear", warmup_steps=0) == [1.0]


def test_total_steps_of_the_config_wins() -> None:
    config = ScheduleConfig(name="linear", warmup_steps=0, min_lr_ratio=0.0, total_steps=5)
    assert [lr_factor(step, config, 100) for step in range(6)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


@pytest.mark.parametrize("unknown", [None, -1, math.inf])
def test_unknown_length(unknown: Any) -> None:
    for config in (ScheduleConfig(), ScheduleConfig(warmup_steps=5), ScheduleConfig(name="constant")):
        with pytest.raises(UserError, match="max_steps, or model.schedule.total_steps"):
            lr_factor(0, config, unknown)
    assert lr_factor(7, ScheduleConfig(name="constant", warmup_steps=5), unknown) == 1.0
    assert lr_factor(7, ScheduleConfig(name="inverse_sqrt", warmup_fraction=0.0), unknown) == pytest.approx(8**-0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "exponential"}, r"schedule\.name must be one of cosine, linear, wsd, inverse_sqrt, constant"),
        ({"warmup_steps": -1}, r"schedule\.warmup_steps must be a whole number, at least 0, not -1"),
        ({"warmup_steps": 1.5}, r"schedule\.warmup_steps"),
        ({"warmup_fraction": 1.1}, r"schedule\.warmup_fraction must be a number, at least 0 and at most 1, not 1\.1"),
        (
            {"warmup_steps": 3, "warmup_fraction": 0.1},
            r"schedule\.warmup_steps \(3\) and model\.schedule\.warmup_fraction",
        ),
        ({"name": "wsd", "decay_steps": 3, "decay_fraction": 0.1}, "exclude each other"),
        ({"decay_steps": 3}, "belong to wsd, not to cosine"),
        ({"min_lr_ratio": None}, r"schedule\.min_lr_ratio"),
        ({"min_lr_ratio": "low"}, r"schedule\.min_lr_ratio"),
        ({"total_steps": 0}, r"schedule\.total_steps"),
        ({"total_steps": True}, r"schedule\.total_steps"),
    ],
)
def test_schedule_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ScheduleConfig(**change)


# ---- scheduler ----


def started(schedule: ScheduleConfig, total: int) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = build_optimizer(Tiny(), OptimizerConfig(lr=2.0))
    return optimizer, build_scheduler(optimizer, schedule, total)


def rates(optimizer: torch.optim.AdamW, scheduler: torch.optim.lr_scheduler.LambdaLR, steps: int) -> list[list[float]]:
    """The rates that ``steps`` optimizer steps use."""
    used = []
    for _ in range(steps):
        used.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
def test_rates_are_identical_after_a_resume(name: Any) -> None:
    """Case 40: 10 steps, against 6, a save that loads with weights_only, and 4 more."""
    schedule = ScheduleConfig(name=name, warmup_steps=3)
    whole = rates(*started(schedule, 10), 10)
    assert whole == [[2.0 * lr_factor(step, schedule, 10)] * 2 for step in range(10)]

    optimizer, scheduler = started(schedule, 10)
    first = rates(optimizer, scheduler, 6)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    optimizer, scheduler = started(schedule, 10)
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    assert first + rates(optimizer, scheduler, 4) == whole


def test_a_resumed_run_follows_the_schedule_it_is_given() -> None:
    short, long = (ScheduleConfig(name="linear", warmup_steps=0, total_steps=total) for total in (10, 100))
    optimizer, scheduler = started(short, 10)
    rates(optimizer, scheduler, 6)
    resumed, resumed_scheduler = started(long, 100)
    resumed.load_state_dict(optimizer.state_dict())
    resumed_scheduler.load_state_dict(scheduler.state_dict())
    rates(resumed, resumed_scheduler, 1)
    assert resumed.param_groups[0]["lr"] == 2.0 * lr_factor(7, long)


def test_unknown_length_is_found_at_set_up() -> None:
    with pytest.raises(UserError, match="max_steps"):
        build_scheduler(build_optimizer(Tiny(), OptimizerConfig()), ScheduleConfig())
