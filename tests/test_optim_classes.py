"""Muon, and optimizers given by their class path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lit_llm.errors import UserError
from lit_llm.optim import (
    ChainedOptimizer,
    OptimizerConfig,
    build_optimizer,
    describe_groups,
    parameter_groups,
)
from tests.optim_helpers import steps, transformer

HERE = __name__


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's: no weight decay, no fused kernel."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9, power: int = 1, turn: bool = False) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "power": power, "turn": turn})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 1 - group["beta"])
                    p.sub_(group["lr"] * mean.sign())
        return None


class Anything(torch.optim.SGD):
    """Takes whatever it is given."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, lr=kwargs.pop("lr"))
        self.given = kwargs


class NeedsMore(torch.optim.SGD):
    def __init__(self, params: Any, lr: float, horizon: int) -> None:
        super().__init__(params, lr=lr)


# ---- Muon ----


def test_muon_is_muon_and_adamw_side_by_side() -> None:
    """Bit for bit, rates and all, over three steps."""
    config = OptimizerConfig(name="muon", lr=0.01, weight_decay=0.05, muon_momentum=0.9)
    model, twin = transformer(), transformer()
    optimizer = build_optimizer(model, config)
    assert isinstance(optimizer, ChainedOptimizer)
    named = {n: p for n, p in twin.named_parameters() if n not in ("embed_tokens.weight", "lm_head.weight")}
    hidden = [p for p in named.values() if p.ndim == 2]
    rest = [p for p in named.values() if p.ndim < 2]
    muon = torch.optim.Muon(hidden, lr=0.01, weight_decay=0.05, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [twin.lm_head.weight]}, {"params": [twin.embed_tokens.weight, *rest], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.05, betas=(0.9, 0.95), fused=True)
    found, expected = steps(model, optimizer), steps(twin, muon, adamw)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_muon_stacks_and_options() -> None:
    module = nn.Module()
    module.experts = nn.Parameter(torch.randn(3, 4, 4))
    module.linear = nn.Linear(4, 4)
    optimizer = build_optimizer(module, OptimizerConfig(name="muon", options={"ns_steps": "3", "nesterov": False}))
    of = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    assert (of["experts"]["optimizer"], of["linear.weight"]["optimizer"]) == ("AdamW", "Muon")
    assert of["linear.weight"]["ns_steps"] == 3
    assert of["linear.weight"]["nesterov"] is False
    assert of["linear.weight"]["adjust_lr_fn"] == "match_rms_adamw"
    for options in ({"momentum": 0.9}, {"lr": 1.0}, {"amsgrad": True}, {"ns_steps": 1000, "momentum_": 1}):
        with pytest.raises(UserError, match=r"model\.optimizer\.(options|muon_momentum)"):
            build_optimizer(module, OptimizerConfig(name="muon", options=options))


@pytest.mark.parametrize("only", ["hidden", "rest"])
def test_muon_with_one_part(only: str) -> None:
    model = transformer()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_((parameter.ndim == 2 and "layers" in name) == (only == "hidden"))
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"))
    assert {group["optimizer"] for group in optimizer.param_groups} == {"Muon" if only == "hidden" else "AdamW"}
    assert {group["name"] == "muon" for group in optimizer.param_groups} == {only == "hidden"}


def test_muon_of_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UserError, match=r"needs torch 2\.9 or newer, this is 2"):
        build_optimizer(transformer(), OptimizerConfig(name="muon"))


# ---- by class path ----


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("torch.optim.SGD", {"momentum": 0.9, "nesterov": True}),
        ("torch.optim.RMSprop", {"alpha": 0.95}),
        ("torch.optim.Adam", {"betas": [0.8, 0.9], "eps": "1e-6"}),
        ("torch.optim.Adagrad", {}),
    ],
)
def test_torch_classes(path: str, options: dict[str, Any]) -> None:
    """As the class itself over the same two groups; the fused kernel but for rounding."""
    model, twin = transformer(), transformer()
    config = OptimizerConfig(name=path, lr=0.02, weight_decay=0.3, options=options)
    optimizer = build_optimizer(model, config)
    cls = getattr(torch.optim, path.rpartition(".")[2])
    assert type(optimizer) is cls
    assert {group["optimizer"] for group in optimizer.param_groups} == {cls.__name__}
    groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in parameter_groups(twin, 0.3)]
    given = {key: float(value) if isinstance(value, str) else value for key, value in options.items()}
    expected = steps(twin, cls(groups, lr=0.02, **given))
    for a, b in zip(steps(model, optimizer), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_class_of_the_users() -> None:
    config = OptimizerConfig(name=f"{HERE}.Lion", lr=0.01, options={"beta": "5e-1", "power": "2", "turn": True})
    model = transformer()
    optimizer = build_optimizer(model, config)
    assert type(optimizer) is Lion
    for group in optimizer.param_groups:
        assert (group["lr"], group["beta"], group["power"], group["turn"]) == (0.01, 0.5, 2, True)
        assert "weight_decay" not in group
    before = model.norm.weight.detach().clone()
    steps(model, optimizer, count=1)
    torch.testing.assert_close((model.norm.weight - before).abs(), torch.full_like(before, 0.01), rtol=1e-4, atol=0)
    assert describe_groups(optimizer).splitlines()[1].split()[-2:] == ["-", "Lion"]

    anything = build_optimizer(model, OptimizerConfig(name=f"{HERE}.Anything", options={"foo": 3}))
    assert anything.given == {"foo": 3}  # type: ignore[attr-defined]
    assert [group["weight_decay"] for group in anything.param_groups] == [0.1, 0.0]


def test_options_of_adamw() -> None:
    optimizer = build_optimizer(transformer(), OptimizerConfig(options={"amsgrad": True}))
    assert all(group["amsgrad"] and group["fused"] for group in optimizer.param_groups)
    # foreach and fused exclude each other; what the user asked for is taken
    optimizer = build_optimizer(transformer(), OptimizerConfig(options={"foreach": True}))
    assert all(group["foreach"] and not group["fused"] for group in optimizer.param_groups)
    config = OptimizerConfig(options={"amsgrad": True})
    assert hash(config) == hash(OptimizerConfig())
    assert config != OptimizerConfig()


@pytest.mark.parametrize(("name", "fused"), [("torch.optim.SGD", None), ("adamw", True)])
def test_what_is_fused_of_parameters_that_are_split(name: str, fused: bool | None, tmp_path: Any) -> None:
    """torch has no fused SGD for them, and says so only at the step."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    module = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    optimizer = build_optimizer(module, OptimizerConfig(name=name, weight_decay=0.0))
    assert optimizer.param_groups[0]["fused"] is fused
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert build_optimizer(nn.Linear(4, 4), OptimizerConfig(name=name)).param_groups[0]["fused"] is True


def test_fused_is_taken_by_classes_that_have_it() -> None:
    fused = {}
    for name in ("torch.optim.SGD", "torch.optim.Adagrad", "torch.optim.RMSprop"):
        for value in (None, False) if name.endswith("RMSprop") else (None, False, True):
            optimizer = build_optimizer(transformer(), OptimizerConfig(name=name, fused=value))
            fused[name, value] = optimizer.param_groups[0].get("fused")
    assert {key for key, value in fused.items() if value} == {
        ("torch.optim.SGD", None),
        ("torch.optim.SGD", True),
        ("torch.optim.Adagrad", True),
    }
    with pytest.raises(UserError, match=r"optimizer\.fused cannot be true for RMSprop"):
        build_optimizer(transformer(), OptimizerConfig(name="torch.optim.RMSprop", fused=True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "torch.optim.Nothing"}, r"torch\.optim\.Nothing cannot be imported \(module 'torch.optim' has no"),
        ({"name": "no_such_module.Lion"}, r"cannot be imported \(No module named 'no_such_module'\)"),
        ({"name": "torch.nn.Linear"}, r"torch\.nn\.Linear is no torch\.optim\.Optimizer"),
        ({"name": "torch.optim.Optimizer"}, "is no torch"),
        ({"name": "torch.optim.lr_scheduler"}, "is no torch"),
        (
            {"name": "torch.optim.SGD", "options": {"momentun": 0.9}},
            r"momentun is unknown to SGD; it accepts momentum, ",
        ),
        ({"options": {"momentum": 0.9}}, r"momentum is unknown to AdamW; it accepts amsgrad, maximize, "),
        ({"options": {"betas": (0.9, 0.99)}}, r"betas \(0\.9, 0\.99\) has a place of its own.*model\.optimizer\.betas"),
        ({"name": "torch.optim.SGD", "options": {"lr": 1}}, r"options\.lr 1 has a place of its own"),
        ({"name": "torch.optim.SGD", "options": {"params": 1}}, r"options\.params is unknown"),
        ({"name": "torch.optim.SGD", "options": {"momentum": -1}}, "does not work: Invalid momentum value: -1"),
        ({"name": "torch.optim.SGD", "options": {"momentum": "high"}}, r"options\.momentum must be a number"),
        ({"name": "torch.optim.LBFGS", "weight_decay": 0}, "does not work: LBFGS doesn't support per-parameter"),
        ({"name": f"{HERE}.NeedsMore"}, "does not work: .*missing 1 required positional argument: 'horizon'"),
        ({"name": f"{HERE}.Lion", "weight_decay": 0.2}, r"optimizer\.weight_decay is 0\.2, and Lion takes none"),
    ],
)
def test_mistakes_found_when_building(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        build_optimizer(transformer(), OptimizerConfig(**config))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "SGD"}, r"optimizer\.name must be one of adamw, muon or a class path"),
        ({"name": "torch..SGD"}, r"optimizer\.name"),
        ({"name": None}, r"optimizer\.name"),
        (
            {"name": "torch.optim.SGD", "betas": (0.9, 0.9)},
            r"give it to torch\.optim\.SGD as model\.optimizer\.options",
        ),
        ({"name": "torch.optim.SGD", "eps": 1e-6}, r"optimizer\.eps 1e-06 belongs to adamw and muon"),
        ({"muon_momentum": 0.9}, r"muon_momentum 0\.9 belongs to muon, not to adamw"),
        ({"name": "muon", "muon_momentum": 1.0}, r"muon_momentum must be a number, at least 0 and below 1"),
        ({"name": "muon", "width_base": 64}, r"width_base 64 scales Adam's rates; muon"),
        ({"width_base": 0}, r"width_base must be a whole number, at least 1"),
        ({"embedding_lr_ratio": -1}, r"embedding_lr_ratio must be a number, at least 0"),
        ({"options": ["momentum"]}, r"optimizer\.options must be a mapping"),
        ({"options": {1: 2}}, r"optimizer\.options must be a mapping"),
    ],
)
def test_mistakes_found_at_once(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**config)
