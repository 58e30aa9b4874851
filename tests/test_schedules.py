"""Learning-rate schedules, and the scheduler that follows them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lit_llm.errors import UserError
from lit_llm.optim import (
    Lengths,
    OptimizerConfig,
    ScheduleConfig,
    StepSchedule,
    build_optimizer,
    build_scheduler,
    lr_factor,
    resolved,
)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.linear = nn.Linear(2, 5)


@pytest.mark.parametrize("text", ["1e3", "1000", 1000, 1000.0])
def test_numbers_as_text(text: Any) -> None:
    assert ScheduleConfig(warmup_steps=text).warmup_steps == 1000
    assert ScheduleConfig(warmup_tokens=text, total_tokens="2e12").total_tokens == 2 * 10**12  # type: ignore[arg-type]


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
        ({"decay_tokens": 3}, r"schedule\.decay_tokens: .* belong to wsd, not to cosine"),
        (
            {"warmup_tokens": 3, "warmup_steps": 1},
            r"warmup_steps \(1\) and model\.schedule\.warmup_tokens \(3\) exclude",
        ),
        ({"warmup_tokens": 3, "warmup_fraction": 0.1}, r"warmup_fraction \(0\.1\) and .*warmup_tokens"),
        ({"total_tokens": 3, "total_steps": 1}, r"total_steps \(1\) and .*total_tokens"),
        ({"name": "wsd", "decay_tokens": 3, "decay_steps": 0}, r"decay_steps \(0\) and .*decay_tokens"),
        ({"total_tokens": 0}, r"schedule\.total_tokens must be a whole number, at least 1"),
        ({"warmup_tokens": 0.5}, r"schedule\.warmup_tokens"),
        ({"min_lr_ratio": None}, r"schedule\.min_lr_ratio"),
        ({"min_lr_ratio": "low"}, r"schedule\.min_lr_ratio"),
        ({"total_steps": 0}, r"schedule\.total_steps"),
        ({"total_steps": True}, r"schedule\.total_steps"),
    ],
)
def test_schedule_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ScheduleConfig(**change)


# ---- every shape against its formula, written down once more ----

W, D, T, M = 5, 12, 40, 0.05
FORMULAS: dict[str, Callable[[int], float]] = {
    "cosine": lambda s: M + (1 - M) * 0.5 * (1 + math.cos(math.pi * (s - 5) / 34)),
    "linear": lambda s: 1 - 0.95 * (s - 5) / 34,
    "wsd": lambda s: 1.0 if s < 28 else 1 - 0.95 * (s - 27) / 12,
    "inverse_sqrt": lambda s: math.sqrt(5) / math.sqrt(s + 1),
    "constant": lambda s: 1.0,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_forty_steps(name: Any) -> None:
    config = ScheduleConfig(name=name, warmup_steps=W, decay_steps=D if name == "wsd" else None, min_lr_ratio=M)
    expected = [(s + 1) / 5 if s < 5 else FORMULAS[name](s) for s in range(T)]
    found = [lr_factor(s, config, T) for s in range(T)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert found[W - 1] == 1.0
    if name in ("cosine", "linear", "wsd"):
        assert found[-1] == M


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("short", [0, 1, 6])
def test_tokens_are_steps(name: Any, short: int) -> None:
    """7 tokens a step, the last step of each length full or not."""
    steps = {"warmup_steps": W, "total_steps": T} | ({"decay_steps": D} if name == "wsd" else {})
    tokens = {key.replace("steps", "tokens"): 7 * value - short for key, value in steps.items()}
    by_steps, by_tokens = ScheduleConfig(name=name, **steps), ScheduleConfig(name=name, **tokens)
    assert resolved(by_tokens, 1000, 7) == resolved(by_steps, 1000)
    assert [lr_factor(s, by_tokens, 1000, 7) for s in range(T)] == [lr_factor(s, by_steps, 1000) for s in range(T)]


@pytest.mark.parametrize("unknown", [None, 0, -1])
def test_tokens_of_a_step_unknown(unknown: int | None) -> None:
    for part, name in (("warmup", "cosine"), ("total", "linear"), ("decay", "wsd")):
        config = ScheduleConfig(name=name, **{f"{part}_tokens": 100})  # type: ignore[arg-type]
        with pytest.raises(UserError, match=rf"{part}_tokens is 100, .* not known; give model\.schedule\.{part}_steps"):
            lr_factor(0, config, 10, unknown)
        with pytest.raises(UserError, match=f"{part}_tokens"):
            build_scheduler(build_optimizer(Tiny(), OptimizerConfig()), config, 10, unknown)


def test_lengths() -> None:
    assert resolved(ScheduleConfig(), 1000) == Lengths(warmup=10, decay=990, total=1000)
    assert resolved(ScheduleConfig(warmup_steps=50), 20) == Lengths(50, 0, 20)  # longer than the run: as asked for
    assert resolved(ScheduleConfig(name="wsd", warmup_steps=5), 100) == Lengths(5, 20, 100)
    assert resolved(ScheduleConfig(name="wsd", warmup_steps=95, decay_tokens=1000), 100, 100) == Lengths(95, 5, 100)
    assert resolved(ScheduleConfig(name="constant", warmup_steps=5)) == Lengths(5, 0, None)
    assert resolved(ScheduleConfig(name="inverse_sqrt", warmup_tokens=5), -1, 2) == Lengths(3, 0, None)


# ---- scheduler ----


def started(schedule: ScheduleConfig, total: int) -> tuple[torch.optim.Optimizer, StepSchedule]:
    optimizer = build_optimizer(Tiny(), OptimizerConfig(lr=2.0))
    return optimizer, build_scheduler(optimizer, schedule, total)


def rates(optimizer: torch.optim.Optimizer, scheduler: LambdaLR, steps: int) -> list[list[float]]:
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


def test_state_is_the_step_alone() -> None:
    optimizer, scheduler = started(ScheduleConfig(name="linear", warmup_steps=0), 10)
    rates(optimizer, scheduler, 3)
    assert scheduler.state_dict() == {"last_epoch": 3}
    assert scheduler.factor == lr_factor(3, ScheduleConfig(name="linear", warmup_steps=0), 10)


def test_a_resumed_run_has_the_peak_it_is_given() -> None:
    """Bit for bit what a run with that peak would use all along, group for group."""
    schedule = ScheduleConfig(warmup_steps=3)

    def fresh(lr: float) -> tuple[torch.optim.Optimizer, StepSchedule]:
        optimizer = build_optimizer(Tiny(), OptimizerConfig(lr=lr, embedding_lr_ratio=0.3))
        return optimizer, build_scheduler(optimizer, schedule, 10)

    old, old_scheduler = fresh(1.0)
    rates(old, old_scheduler, 6)
    whole = rates(*fresh(0.7), 10)
    for optimizer_first in (True, False):
        optimizer, scheduler = fresh(0.7)
        loads: list[Callable[[], None]] = [
            lambda o=optimizer: o.load_state_dict(old.state_dict()),  # type: ignore[misc]
            lambda s=scheduler: s.load_state_dict(old_scheduler.state_dict()),  # type: ignore[misc]
        ]
        for load in loads if optimizer_first else reversed(loads):
            load()
        assert scheduler.get_last_lr() == whole[6]
        assert rates(optimizer, scheduler, 4) == whole[6:]


def test_the_state_of_torchs_own_scheduler_loads() -> None:
    """As checkpoints of the first version hold it: rates and peaks of its own, which no longer count."""
    optimizer = build_optimizer(Tiny(), OptimizerConfig(lr=5.0))
    plain = LambdaLR(optimizer, lambda step: 0.5)
    rates(optimizer, plain, 4)
    schedule = ScheduleConfig(name="linear", warmup_steps=0)
    resumed, scheduler = started(schedule, 10)
    scheduler.load_state_dict(plain.state_dict())
    assert {group["lr"] for group in resumed.param_groups} == {2.0 * lr_factor(4, schedule, 10)}


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(2.0, dtype=torch.float64))
    scheduler = StepSchedule(optimizer, lambda step: 1 / (step + 1))
    rate = optimizer.param_groups[0]["lr"]
    scheduler.load_state_dict({"last_epoch": 3})
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
