"""Parameter groups of a Transformer, their rates and their table."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lit_llm.errors import UserError
from lit_llm.optim import OptimizerConfig, build_optimizer, describe_groups, parameter_groups
from tests.optim_helpers import steps, transformer


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("width_base", [None, 8])
def test_every_parameter_is_in_one_group(tied: bool, muon: bool, ratio: float, width_base: int | None) -> None:
    model = transformer(tied)
    groups = parameter_groups(model, 0.1, lr=2.0, muon=muon, embedding_lr_ratio=ratio, width_base=width_base)
    members = [id(p) for group in groups for p in group["params"]]
    assert sorted(members) == sorted(id(p) for p in model.parameters())
    named = dict(model.named_parameters())
    of = {name: group for group in groups for name in group["param_names"]}
    assert all(named[n] is p for g in groups for n, p in zip(g["param_names"], g["params"], strict=True))

    embedding, hidden = of["embed_tokens.weight"], of["layers.1.mlp.down_proj.weight"]
    assert embedding["name"] == ("no_decay" if ratio == 1 else "embedding")
    assert (embedding["weight_decay"], embedding.get("lr", 2.0)) == (0.0, 2.0 * ratio)
    assert hidden["name"] == ("muon" if muon else "decay")
    assert hidden["weight_decay"] == 0.1
    if not tied:
        assert of["lm_head.weight"]["name"] == "decay"
        assert of["lm_head.weight"].get("lr", 2.0) == (1.0 if width_base else 2.0)  # 8 / 16
    if width_base and not muon:
        assert hidden["lr"] == 1.0
    for name in ("norm.weight", "layers.0.self_attn.q_proj.bias"):
        assert of[name]["name"] == "no_decay"
        assert "lr" not in of[name]


def test_hidden_matrices_with_the_shape_of_the_embedding_are_muons() -> None:
    """A byte vocabulary may be as large as the MLP is wide."""
    groups = parameter_groups(transformer(intermediate_size=32), 0.1, muon=True)
    muon = next(group for group in groups if group["name"] == "muon")
    assert "layers.0.mlp.up_proj.weight" in muon["param_names"]
    assert "lm_head.weight" not in muon["param_names"]


def test_a_head_of_another_name_is_found_by_its_shape() -> None:
    module = nn.Module()
    module.embed = nn.Embedding(11, 4)
    module.layers = nn.ModuleList([nn.Linear(4, 11), nn.Linear(11, 4)])
    module.out = nn.Linear(4, 11)
    of = {n: g["name"] for g in parameter_groups(module, 0.1, muon=True) for n in g["param_names"]}
    assert of["out.weight"] == "decay"
    assert of["layers.0.weight"] == of["layers.1.weight"] == "muon"
    module.out.weight = module.embed.weight  # tied: now no other matrix is the head
    module.extra = nn.Linear(4, 11)
    of = {n: g["name"] for g in parameter_groups(module, 0.1, muon=True) for n in g["param_names"]}
    assert of["extra.weight"] == "muon"
    assert of["embed.weight"] == "no_decay"


def test_width_without_an_embedding() -> None:
    with pytest.raises(UserError, match=r"optimizer\.width_base 64 needs the model's width"):
        build_optimizer(nn.Linear(3, 3), OptimizerConfig(width_base=64))


def test_table_of_groups() -> None:
    model = transformer(vocab_size=1024)
    text = describe_groups(build_optimizer(model, OptimizerConfig(name="muon", embedding_lr_ratio=0.5, lr=1e-3)))
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["muon", "14", "4,352", "0.001", "0.1", "Muon"],
        ["decay", "1", "16,384", "0.001", "0.1", "AdamW"],
        ["no_decay", "13", "208", "0.001", "0", "AdamW"],
        ["embedding", "1", "16,384", "0.0005", "0", "AdamW"],
    ]
    ends = {
        line.index(cell) + len(cell) for line, cell in zip(text.splitlines()[1:], ("4,352", "16,384"), strict=False)
    }
    assert len(ends) == 1


def test_scaled_rates_reach_the_step() -> None:
    """Adam's first step is lr in size, whatever the gradient."""
    model = transformer()
    before = copy.deepcopy(model)
    config = OptimizerConfig(lr=0.01, weight_decay=0.0, embedding_lr_ratio=0.25, width_base=8, eps=1e-12)
    steps(model, build_optimizer(model, config), count=1)
    moved = {n: (p - q).abs() for (n, p), q in zip(model.named_parameters(), before.parameters(), strict=True)}
    expected = {"embed_tokens.weight": 0.0025, "lm_head.weight": 0.005, "layers.0.mlp.up_proj.weight": 0.005}
    for name, size in {**expected, "norm.weight": 0.01, "layers.1.self_attn.v_proj.bias": 0.01}.items():
        torch.testing.assert_close(moved[name], torch.full_like(moved[name], size), rtol=1e-3, atol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_zero_gradients_decay_only_matrices(tied: bool, name: str) -> None:
    """lr 0.1, decay 0.1, one step: matrices x 0.99, an untied head too; gains, biases and embeddings stay."""
    model = transformer(tied)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=0.1, weight_decay=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, value in model.named_parameters():
        decays = value.ndim == 2 and key != "embed_tokens.weight"
        torch.testing.assert_close(value.detach(), before[key] * (0.99 if decays else 1.0), rtol=1e-6, atol=0)
