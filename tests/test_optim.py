"""Parameter groups and AdamW."""

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


def trained(fused: bool | None, steps: int = 20) -> tuple[torch.optim.Optimizer, Tiny]:
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
        ({"name": "sgd"}, r"optimizer\.name must be one of adamw, muon or a class path .*, not 'sgd'"),
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
