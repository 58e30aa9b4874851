"""Steps that are skipped on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lit_llm.optim import ChainedOptimizer, OptimizerConfig, build_optimizer, supports_found_inf
from tests.optim_helpers import everything, steps, transformer, with_gradients

FOUND_INF = [
    {},
    {"options": {"amsgrad": True}},
    {"name": "torch.optim.Adam"},
    {"name": "torch.optim.SGD"},
    {"name": "torch.optim.Adagrad", "fused": True},
]


@pytest.mark.parametrize("config", FOUND_INF)
@pytest.mark.parametrize("warm", [0, 2])
def test_found_inf_skips_the_step(config: dict[str, Any], warm: int) -> None:
    model, twin = transformer(), transformer()
    optimizer, plain = (build_optimizer(one, OptimizerConfig(lr=0.01, **config)) for one in (model, twin))
    assert supports_found_inf(optimizer)
    steps(model, optimizer, count=warm)
    steps(twin, plain, count=warm)

    before = everything(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    after = everything(model, optimizer)
    if warm == 0:  # what it remembers has come to be, with nothing in it
        assert not any(value.any() for value in after[len(before) :])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=warm > 0))

    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    steps(model, optimizer)
    steps(twin, plain)
    found, expected = everything(model, optimizer), everything(twin, plain)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_who_supports_found_inf() -> None:
    def supports(**config: Any) -> bool:
        return supports_found_inf(build_optimizer(transformer(), OptimizerConfig(**config)))

    assert not supports(fused=False)
    assert not supports(name="muon")
    assert not supports(name="torch.optim.RMSprop")
    assert not supports(name="tests.test_optim_classes.Lion")
    assert not supports(name="torch.optim.SGD", options={"momentum": 0.9})  # see its docstring


def test_a_chain_skips_where_all_its_parts_do() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    parts = [torch.optim.AdamW(model[0].parameters(), fused=True), torch.optim.SGD(model[1].parameters(), fused=True)]
    chain = ChainedOptimizer(*parts)
    assert supports_found_inf(chain)
    steps(model, chain, count=1)
    before = everything(model, chain)
    chain.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    with_gradients(model)
    chain.step()
    assert all(torch.equal(a, b) for a, b in zip(before, everything(model, chain), strict=True))
    del chain.found_inf  # type: ignore[attr-defined]
    chain.step()
    assert not any(torch.equal(a, b) for a, b in zip(before[:4], everything(model, chain)[:4], strict=True))
    mixed = ChainedOptimizer(parts[0], torch.optim.SGD(model[1].parameters()))
    assert not supports_found_inf(mixed)
