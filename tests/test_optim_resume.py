"""Resuming an optimizer: the configuration wins, the state is found by name, misfits are named."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from lit_llm.errors import UserError
from lit_llm.optim import ChainedOptimizer, OptimizerConfig, ScheduleConfig, build_optimizer, build_scheduler
from tests.optim_helpers import everything, steps, transformer, with_gradients

ADAMW: dict[str, Any] = {}
MUON = {"name": "muon"}
SGD = {"name": "torch.optim.SGD", "options": {"momentum": 0.9}}
RMSPROP = {"name": "torch.optim.RMSprop"}


def run(config: dict[str, Any], count: int = 2, **shape: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = transformer(**shape)
    optimizer = build_optimizer(model, OptimizerConfig(**{"lr": 0.01, **config}))
    build_scheduler(optimizer, ScheduleConfig(name="constant", warmup_steps=0))
    steps(model, optimizer, count=count)
    return model, optimizer


def by_name(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    named = ((n, p) for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True))
    return {name: dict(optimizer.state[parameter]) for name, parameter in named}


def same(one: Any, other: Any) -> bool:
    a, b = by_name(one), by_name(other)
    return a.keys() == b.keys() and all(
        a[name].keys() == b[name].keys() and all(torch.equal(a[name][key], b[name][key]) for key in a[name])
        for name in a
    )


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("config", [ADAMW, MUON, SGD, RMSPROP])
def test_a_resumed_run_goes_on_bit_for_bit(config: dict[str, Any]) -> None:
    model, optimizer = run(config)
    again = copy.deepcopy(model)
    resumed = build_optimizer(again, OptimizerConfig(**{"lr": 0.01, **config}))
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert same(optimizer, resumed)
    found, expected = steps(again, resumed), steps(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert same(optimizer, resumed)


def test_the_configuration_wins() -> None:
    _, optimizer = run({"weight_decay": 0.1, "fused": False})
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["initial_lr"] = 7.0  # as a scheduler leaves it
    untouched = copy.deepcopy(state)
    changed = {"lr": 0.5, "weight_decay": 0.2, "betas": (0.8, 0.9), "eps": 1e-6, "fused": True}
    _, resumed = run(changed, count=0)
    settings = [{k: v for k, v in group.items() if k != "params"} for group in resumed.param_groups]
    resumed.load_state_dict(state)
    assert [{k: v for k, v in group.items() if k != "params"} for group in resumed.param_groups] == settings
    assert settings[0]["betas"] == (0.8, 0.9)
    assert settings[0]["initial_lr"] == 0.5
    assert same(optimizer, resumed)
    assert state["param_groups"] == untouched["param_groups"]  # what is loaded is left as it was


@pytest.mark.parametrize("before", [ADAMW, {"embedding_lr_ratio": 0.5}])
@pytest.mark.parametrize("after", [ADAMW, {"embedding_lr_ratio": 0.25, "width_base": 8}])
@pytest.mark.parametrize("tied", [False, True])
def test_other_groups(before: dict[str, Any], after: dict[str, Any], tied: bool) -> None:
    _, optimizer = run(before, tied=tied)
    _, resumed = run(after, count=0, tied=tied)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert same(optimizer, resumed)


def test_checkpoints_from_before_there_was_a_choice() -> None:
    """Two groups, decay and no_decay, of AdamW; the class not noted."""
    _, optimizer = run(ADAMW)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["optimizer"]
        group["param_names"] = [name.replace("layers.", "layers._orig_mod.") for name in group["param_names"]]
    _, resumed = run({"embedding_lr_ratio": 0.5}, count=0)
    resumed.load_state_dict(state)
    assert same(optimizer, resumed)
    for config, message in ((MUON, r"another optimizer for .* \(Adam, not Muon\)"), (SGD, r"\(Adam, not SGD\)")):
        with pytest.raises(UserError, match=message):
            run(config, count=0)[1].load_state_dict(state)


@pytest.mark.parametrize("config", [ADAMW, MUON])
def test_under_a_schedule_of_torch_the_checkpoint_wins(config: dict[str, Any]) -> None:
    """CosineAnnealingLR computes each rate from the one before, which it must find again."""

    def built(model: nn.Module, lr: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = build_optimizer(model, OptimizerConfig(**{"lr": lr, **config}))
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)

    def rates(model: nn.Module, optimizer: Any, scheduler: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            found.append(optimizer.param_groups[-1]["lr"])
            steps(model, optimizer, count=1)
            scheduler.step()
        return found

    model = transformer()
    optimizer, scheduler = built(model, 0.01)
    rates(model, optimizer, scheduler, 3)
    again = copy.deepcopy(model)
    resumed, resumed_scheduler = built(again, 0.01)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    resumed_scheduler.load_state_dict(scheduler.state_dict())
    assert rates(again, resumed, resumed_scheduler, 3) == rates(model, optimizer, scheduler, 3)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert [group["name"] for group in resumed.param_groups] == [group["name"] for group in optimizer.param_groups]


def test_without_names_the_order_counts() -> None:
    _, optimizer = run(ADAMW)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["param_names"], group["optimizer"]
    _, resumed = run({"lr": 0.1}, count=0)
    resumed.load_state_dict(state)
    assert same(optimizer, resumed)
    assert resumed.param_groups[0]["lr"] == 0.1
    with pytest.raises(UserError, match="parameters in 2 groups, this one .* in 3, and no names"):
        run({"embedding_lr_ratio": 0.5}, count=0)[1].load_state_dict(state)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            ADAMW,
            MUON,
            r"the state of another optimizer for layers\.0\..* \(Adam, not Muon\); resume with its model\.opt",
        ),
        (MUON, ADAMW, r"\(Muon, not Adam\)"),
        (SGD, ADAMW, r"\(SGD, not Adam\)"),
        (SGD, MUON, r"\(SGD, not Muon\)"),
        (ADAMW, RMSPROP, r"\(Adam, not RMSprop\)"),
        (ADAMW, {"options": {"amsgrad": True}}, r"optimizer\.options\.amsgrad is True, .* ran without it"),
        (RMSPROP, {**RMSPROP, "options": {"momentum": 0.5}}, r"optimizer\.options\.momentum is 0\.5"),
    ],
)
def test_another_optimizer(before: dict[str, Any], after: dict[str, Any], message: str) -> None:
    _, optimizer = run(before)
    model, resumed = run(after, count=0)
    with pytest.raises(UserError, match=message) as error:
        resumed.load_state_dict(optimizer.state_dict())
    assert "\n" not in str(error.value)
    assert not resumed.state
    steps(model, resumed, count=1)  # and is none the worse for it


def test_adam_and_adamw_remember_the_same() -> None:
    _, optimizer = run({"name": "torch.optim.Adam"})
    _, resumed = run(ADAMW, count=0)
    resumed.load_state_dict(optimizer.state_dict())
    assert same(optimizer, resumed)
    assert {group["optimizer"] for group in resumed.param_groups} == {"AdamW"}


def test_other_parameters() -> None:
    _, small = run(ADAMW, num_hidden_layers=1)
    _, large = run(ADAMW, num_hidden_layers=2)
    tied = run(ADAMW, tied=True)[1]
    with pytest.raises(UserError, match=r"trained other parameters: layers\.1\..* and 12 more not in it; resume with"):
        large.load_state_dict(small.state_dict())
    with pytest.raises(UserError, match=r"layers\.1\..* and 12 more not here"):
        small.load_state_dict(large.state_dict())
    with pytest.raises(UserError, match=r"trained other parameters: lm_head\.weight not here"):
        tied.load_state_dict(large.state_dict())


# ---- a chain's own state ----


def test_the_chain_has_the_groups_and_the_state_of_its_parts() -> None:
    model, optimizer = run(MUON)
    assert isinstance(optimizer, ChainedOptimizer)
    for _ in range(2):
        owned = [group for part in optimizer.parts for group in part.param_groups]
        assert all(a is b for a, b in zip(optimizer.param_groups, owned, strict=True))
        assert all(part.state is optimizer.state for part in optimizer.parts)
        assert sorted(map(id, optimizer.state)) == sorted(map(id, model.parameters()))
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = optimizer.param_groups[2]["lr"] = 0.0
    before = everything(model, optimizer)[: len(list(model.parameters()))]
    with_gradients(model)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_chain_is_an_ordinary_optimizer() -> None:
    model, optimizer = run(MUON)
    state = optimizer.state_dict()
    ids = [one for group in state["param_groups"] for one in group["params"]]
    assert ids == list(range(len(list(model.parameters()))))
    assert sorted(state["state"]) == ids

    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    calls: list[bool] = []

    def closure() -> str:
        calls.append(torch.is_grad_enabled())
        return "loss"

    with torch.no_grad():
        assert optimizer.step(closure) == "loss"  # type: ignore[comparison-overlap, arg-type]
    assert (calls, seen) == ([True], ["before", "after"])
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(TypeError, match="no further groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    linear = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="more than one parameter group"):
        ChainedOptimizer(torch.optim.SGD(linear.parameters()), torch.optim.SGD([linear.weight]))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_model_and_chain_goes_on_alike(how: str) -> None:
    model, optimizer = run(MUON)
    both = (model, optimizer)
    again, copied = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert all(part.state is copied.state for part in copied.parts)
    found, expected = steps(again, copied), steps(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ---- tensors that must not be touched ----


@pytest.mark.parametrize("config", [ADAMW, MUON])
def test_state_mapped_from_a_file(config: dict[str, Any], tmp_path: Path) -> None:
    _, optimizer = run(config)
    torch.save(optimizer.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", mmap=True, weights_only=True)
    _, resumed = run({**config, "embedding_lr_ratio": 0.5}, count=0)
    resumed.load_state_dict(state)
    assert same(optimizer, resumed)


@pytest.mark.parametrize("config", [ADAMW, MUON])
@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoint(config: dict[str, Any], flat: bool, tmp_path: Path) -> None:
    """Saved and loaded by torch.distributed.checkpoint, also into other groups."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = run(config)
    dcp.save(
        {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=tmp_path, no_dist=True
    )
    again, resumed = run({**config, "lr": 0.5}, count=0)
    state = {"optimizer": get_optimizer_state_dict(again, resumed, options=options)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(again, resumed, state["optimizer"], options=options)
    assert same(optimizer, resumed)
    assert {group["lr"] for group in resumed.param_groups} == {0.5}

    other, regrouped = run({**config, "embedding_lr_ratio": 0.5}, count=0)
    set_optimizer_state_dict(other, regrouped, state["optimizer"], options=options)
    assert same(optimizer, regrouped)


def test_distributed_checkpoint_of_another_optimizer() -> None:
    model, optimizer = run(ADAMW)
    state = get_optimizer_state_dict(model, optimizer)
    other, muon = run(MUON, count=0)
    with pytest.raises(UserError, match="not Muon"):
        set_optimizer_state_dict(other, muon, state)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("config", [ADAMW, MUON])
def test_sharded_state(config: dict[str, Any]) -> None:
    """Parameters and state as DTensors stay such."""
    mesh = init_device_mesh("cpu", (1,))

    def sharded() -> nn.Module:
        model = transformer()
        for owner in model.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                setattr(owner, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
        return model

    def trained(settings: dict[str, Any], count: int) -> torch.optim.Optimizer:
        model = sharded()
        optimizer = build_optimizer(model, OptimizerConfig(**settings))
        for _ in range(count):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return optimizer

    optimizer = trained(config, 1)
    resumed = trained({**config, "embedding_lr_ratio": 0.5}, 0)
    resumed.load_state_dict(optimizer.state_dict())
    for name, values in by_name(resumed).items():
        for key, value in values.items():
            if key != "step":
                assert isinstance(value, DTensor)
                assert torch.equal(value.to_local(), by_name(optimizer)[name][key].to_local())  # type: ignore[attr-defined]
