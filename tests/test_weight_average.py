"""The moving average of the weights: its numbers, validation by it, and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lit_llm import LitLLM, TokenDataModule
from lit_llm.callbacks import RunCheckpoint
from lit_llm.callbacks.weight_average import WeightAverage
from lit_llm.checkpoint import read_checkpoint
from lit_llm.checkpoint.average import averaged_weights
from lit_llm.errors import UserError

MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
Weights = dict[str, Tensor]


def weights_of(module: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def apart(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


class Watch(Callback):
    """The raw weights from the start on after each optimizer step, those of each validation, and its loss."""

    def __init__(self) -> None:
        self.raw: list[Weights] = []
        self.validated: dict[int, Weights] = {}
        self.losses: dict[int, float] = {}

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.raw.append(weights_of(module))

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.raw.append(weights_of(module))

    def on_validation_batch_start(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        self.validated[trainer.global_step] = weights_of(module)

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.losses[trainer.global_step] = float(trainer.callback_metrics["val/loss"])


def fit(
    store: str,
    folder: str | Path,
    average: WeightAverage,
    *more: Callback,
    max_steps: int = 20,
    micro: int = 2,
    ckpt_path: str | Path | None = None,
    **options: Any,
) -> tuple[Watch, LitLLM]:
    """Global batches of 4 rows, in two micro-batches unless said otherwise."""
    watch = Watch()
    trainer = L.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_steps=max_steps,
        callbacks=[average, watch, *more],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(one, RunCheckpoint) for one in more),
        **{"num_sanity_val_steps": 0, "limit_val_batches": 0, **options},
    )
    data = TokenDataModule(store, seq_len=16, global_batch_size=4, micro_batch_size=micro)
    lit = LitLLM(MODEL, optimizer={"lr": 1e-2}, schedule={"warmup_steps": 2, "total_steps": 40})
    trainer.fit(lit, data, ckpt_path=ckpt_path)
    return watch, lit


VALIDATED = {"val_check_interval": 5, "check_val_every_n_epoch": None, "limit_val_batches": 2}


def reference(raw: list[Weights], decay: float, every: int = 1, start: int = 0) -> list[Weights]:
    """The average after each step, by plain arithmetic in the two forms of a linear interpolation."""
    average = {name: w.float() for name, w in raw[start].items()}
    averages, updates = [average] * (start + 1), 0
    for step in range(start + 1, len(raw)):
        if step % every == 0:
            share = 1 - min(decay, (1 + updates) / (10 + updates))
            updates += 1
            average = {name: torch.lerp(a, raw[step][name].float(), share) for name, a in average.items()}
        averages.append(average)
    return averages


@pytest.mark.parametrize(("decay", "every", "start"), [(0.5, 1, 0), (0.999, 1, 0), (0.5, 3, 0), (0.5, 1, 7), (0, 2, 3)])
def test_equals_a_plain_loop_to_the_last_bit(store: str, tmp_path: Path, decay: float, every: int, start: int) -> None:
    average = WeightAverage(decay, every, start)
    watch, _ = fit(store, tmp_path, average)
    assert len(watch.raw) == 21
    expected = reference(watch.raw, decay, every, start)[-1]
    state = average.state_dict()
    assert equal(state["weights"], expected)
    assert state["updates"] == len([s for s in range(start + 1, 21) if s % every == 0])
    assert apart(state["weights"], watch.raw[-1]) > (0 if every == 1 else -1)


def test_the_formula_without_lerp(store: str, tmp_path: Path) -> None:
    """In float64, so that it holds for the formula and not for a way to round it."""
    average = WeightAverage(0.6)
    watch, _ = fit(store, tmp_path, average)
    name = "model.embed_tokens.weight"
    expected = watch.raw[0][name].double()
    for n, raw in enumerate(watch.raw[1:]):
        d = min(0.6, (1 + n) / (10 + n))
        expected = d * expected + (1 - d) * raw[name].double()
    torch.testing.assert_close(average.state_dict()["weights"][name].double(), expected, rtol=0, atol=1e-7)


class HostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read on the host"
        return func(*args, **(kwargs or {}))


def test_an_update_reads_nothing_on_the_host(store: str, tmp_path: Path) -> None:
    average = WeightAverage(0.9)
    fit(store, tmp_path, average, max_steps=2)
    before = copy.deepcopy(average.state_dict())
    with HostReads():
        average._advance(3)
        with pytest.raises(AssertionError, match="on the host"):
            torch.ones(1).item()
    assert average.updates == 3
    assert not equal(average.state_dict()["weights"], before["weights"])


def test_a_second_fit_goes_on_and_another_module_begins_anew(store: str, tmp_path: Path) -> None:
    average, watch = WeightAverage(0.7), Watch()

    def trainer(max_steps: int) -> L.Trainer:
        return L.Trainer(
            accelerator="cpu",
            max_steps=max_steps,
            callbacks=[average, watch],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            limit_val_batches=0,
        )

    data = TokenDataModule(store, seq_len=16, global_batch_size=4, micro_batch_size=2)
    lit = LitLLM(MODEL, optimizer={"lr": 1e-2}, schedule={"warmup_steps": 2, "total_steps": 40})
    trainer(4).fit(lit, data)
    trainer(6).fit(lit, data)
    assert average.updates == 10
    assert equal(watch.raw.pop(5), watch.raw[4])  # the start of the second fit
    assert equal(average.state_dict()["weights"], reference(watch.raw, 0.7)[-1])
    watch.raw.clear()
    trainer(3).fit(LitLLM(MODEL, optimizer={"lr": 1e-2}, schedule={"total_steps": 40}, seed=1), data)
    assert average.updates == 3
    assert equal(average.state_dict()["weights"], reference(watch.raw, 0.7)[-1])


def test_bfloat16_weights_have_a_float32_average(store: str, tmp_path: Path) -> None:
    average = WeightAverage(0.9)
    watch, lit = fit(store, tmp_path, average, RunCheckpoint(), precision="bf16-true", **VALIDATED)
    assert watch.raw[-1]["model.norm.weight"].dtype == torch.bfloat16
    expected = reference(watch.raw, 0.9)
    assert equal(average.state_dict()["weights"], expected[-1])  # validations have not touched it
    for step in (5, 20):
        assert equal(watch.validated[step], {name: w.bfloat16() for name, w in expected[step].items()})
    assert equal(weights_of(lit), watch.raw[20])
    content = read_checkpoint(tmp_path / "checkpoints" / "step-20.ckpt")
    assert equal(content["state_dict"], watch.raw[20])
    assert equal(averaged_weights(content) or {}, watch.validated[20])


def test_validation_by_the_average_and_checkpoints_with_the_raw_weights(store: str, tmp_path: Path) -> None:
    average = WeightAverage(0.9, start_step=6)
    watch, lit = fit(store, tmp_path, average, RunCheckpoint(keep_last=-1), **{**VALIDATED, "num_sanity_val_steps": 1})
    expected = reference(watch.raw, 0.9, start=6)
    assert equal(watch.validated[0], watch.raw[0])  # the sanity check
    assert equal(watch.validated[5], watch.raw[5])
    assert averaged_weights(read_checkpoint(tmp_path / "checkpoints" / "step-5.ckpt")) is None
    for step in (10, 15, 20):
        assert equal(watch.validated[step], expected[step])
        assert apart(watch.validated[step], watch.raw[step]) > 1e-4
        content = read_checkpoint(tmp_path / "checkpoints" / f"step-{step}.ckpt")
        assert equal(content["state_dict"], watch.raw[step])
        weights = averaged_weights(content)
        assert weights is not None
        assert equal(weights, expected[step])
    assert equal(weights_of(lit), watch.raw[20])
    # The loss that fit logged is that of the checkpoint's averaged weights.
    lit.load_state_dict(weights)
    data = TokenDataModule(store, seq_len=16, global_batch_size=4, micro_batch_size=2)
    trainer = L.Trainer(accelerator="cpu", logger=False, limit_val_batches=2, enable_progress_bar=False)
    assert trainer.validate(lit, data, verbose=False)[0]["val/loss"] == watch.losses[20]


def test_training_goes_on_as_without_validation(store: str, tmp_path: Path) -> None:
    plain, _ = fit(store, tmp_path / "a", WeightAverage(0.9))
    validated, _ = fit(store, tmp_path / "b", WeightAverage(0.9), **VALIDATED)
    assert sorted(validated.validated) == [5, 10, 15, 20]
    assert all(equal(one, other) for one, other in zip(plain.raw, validated.raw, strict=True))


def test_without_evaluate_validation_is_of_the_raw_weights(store: str, tmp_path: Path) -> None:
    watch, _ = fit(store, tmp_path, WeightAverage(0.9, evaluate=False), RunCheckpoint(), **VALIDATED)
    assert equal(watch.validated[10], watch.raw[10])
    content = read_checkpoint(tmp_path / "checkpoints" / "step-20.ckpt")
    assert content["callbacks"]["WeightAverage"]["updates"] == 20
    assert averaged_weights(content) is None


class During(Callback):
    """Does something in the middle of the first validation."""

    def __init__(self, action: Callable[[L.Trainer], None]) -> None:
        self.action = action

    def on_validation_batch_start(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == 5:
            self.action(trainer)


def _fail(trainer: L.Trainer) -> None:
    raise RuntimeError("amid a validation")


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_an_error_in_a_validation_leaves_the_raw_weights(store: str, tmp_path: Path, precision: Any) -> None:
    average = WeightAverage(0.9)
    whole, _ = fit(store, tmp_path / "a", WeightAverage(0.9), max_steps=5, precision=precision)
    with pytest.raises(RuntimeError, match="amid a validation"):
        fit(
            store,
            tmp_path / "b",
            average,
            During(_fail),
            RunCheckpoint(save_on_exception=True),
            precision=precision,
            **VALIDATED,
        )
    content = read_checkpoint(tmp_path / "b" / "checkpoints" / "step-5.ckpt")
    assert equal(content["state_dict"], whole.raw[5])
    expected = reference(whole.raw, 0.9)[5]
    assert equal(content["callbacks"]["WeightAverage"]["weights"], expected)
    assert equal(average.state_dict()["weights"], expected)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_checkpoint_amid_a_validation(store: str, tmp_path: Path, precision: Any) -> None:
    path = tmp_path / "amid.ckpt"
    action = During(lambda trainer: trainer.save_checkpoint(path))
    watch, _ = fit(store, tmp_path, WeightAverage(0.9), action, precision=precision, **VALIDATED)
    content = read_checkpoint(path)
    assert equal(content["state_dict"], watch.raw[5])
    assert equal(content["callbacks"]["WeightAverage"]["weights"], reference(watch.raw, 0.9)[5])
    assert equal(watch.validated[5], averaged_weights(content) or {})


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"decay": 1.0}, "decay"),
        ({"decay": -0.1}, "decay"),
        ({"decay": float("nan")}, "decay"),
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"start_step": -1}, "start_step"),
    ],
)
def test_wrong_numbers_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=rf"weight_average\.{name} must be .*got"):
        WeightAverage(**options)
