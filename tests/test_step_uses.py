"""The step under the ways in which people use a Trainer and extend a LitLLM."""

from __future__ import annotations

import gc
import os
import pickle
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lit_llm import LitLLM
from lit_llm.callbacks import ProgressLines, RunCheckpoint
from lit_llm.errors import RunStopped, UserError
from lit_llm.training.host import HostRead
from tests.distributed import run_ranks
from tests.test_guard import Scaled, Troubled
from tests.test_signals import SendAt
from tests.test_step import SEQ, VOCAB, PlainLightning, Steps, big_batch_run, flat, micro_batches, trainer
from tests.training import MODEL

OPTIONS: dict[str, Any] = {"config": MODEL, "vocab_size": VOCAB, "seq_len": SEQ}


def loader(number: int) -> DataLoader:
    return DataLoader(micro_batches(number), batch_size=None)


# What subclasses do


@pytest.mark.parametrize(
    "change",
    [
        lambda self, loss: loss + 0.1 * self.transformer.head_weight.square().mean(),
        lambda self, loss: loss * 0.5,
        lambda self, loss: (loss - 5).abs() + 5,
        lambda self, loss: loss.clamp(max=0.01),
        lambda self, loss: {"loss": loss.square()},
    ],
)
def test_a_loss_that_is_changed_is_refused(tmp_path: Path, change: Any) -> None:
    class Penalty(LitLLM):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return change(self, super().training_step(batch, batch_idx))

    with pytest.raises(
        UserError, match=r"override loss\(batch\) instead and return \(loss_sum \+ term \* count, count"
    ):
        trainer(str(tmp_path), max_steps=2).fit(Penalty(**OPTIONS), loader(2))


def test_a_term_in_loss_has_its_weight(tmp_path: Path) -> None:
    class Penalty(Steps):
        def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
            loss_sum, count = super().loss(batch)
            return loss_sum + count * self.transformer.head_weight.square().sum(), count

    penalty, plain = Penalty(), Steps()
    for module in (penalty, plain):
        trainer(str(tmp_path), max_steps=1, accumulate_grad_batches=4).fit(module, loader(4))
    start = Steps()
    start.configure_model()
    term = {id(start.transformer.head_weight): 2 * start.transformer.head_weight.detach()}
    expected = flat(term.get(id(p), torch.zeros_like(p)) for p in start.parameters())
    torch.testing.assert_close(penalty.gradients[0] - plain.gradients[0], expected, rtol=1e-4, atol=1e-6)


def test_a_micro_batch_without_a_step_is_not_counted(tmp_path: Path) -> None:
    class Choosy(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 2 else loss

    module = Choosy()
    trainer(str(tmp_path), max_steps=1, accumulate_grad_batches=4).fit(module, loader(4))
    batches = [batch for index, batch in enumerate(micro_batches(4)) if index != 2]
    module.configure_model()
    fresh = Steps()
    fresh.configure_model()
    ids, labels = (torch.cat([b[name] for b in batches]) for name in ("input_ids", "labels"))
    torch.nn.functional.cross_entropy(fresh.transformer(ids).flatten(0, 1), labels.flatten()).backward()
    assert float((module.gradients[0] - flat(p.grad for p in fresh.parameters())).abs().max()) <= 1e-6


def test_setup_without_super_is_named(tmp_path: Path) -> None:
    class Deaf(LitLLM):
        def setup(self, stage: str) -> None:
            pass

    with pytest.raises(UserError, match=r"must call super\(\).setup\(stage\)"):
        trainer(str(tmp_path), max_steps=2).fit(Deaf(**OPTIONS), loader(2))


def test_hooks_without_super_cost_nothing(tmp_path: Path) -> None:
    class Own(Troubled):
        def on_train_batch_start(self, *args: Any) -> None:
            pass

        def configure_callbacks(self) -> list[Callback]:
            return []

        def on_fit_start(self) -> None:
            pass

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")

    module = Own({2: float("nan")})
    with pytest.warns(UserWarning, match="step 3 skipped"):
        trainer(str(tmp_path), max_steps=4).fit(module, loader(4))
    assert torch.equal(module.after[2], module.after[1])
    assert torch.isfinite(module.after[-1]).all()


def test_an_epoch_that_ends_within_a_window_leaves_nothing(tmp_path: Path) -> None:
    class Ends(Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            module.stop = trainer.current_epoch == 0 and batch_idx == 4

    class Stops(Steps):
        stop = False

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.stop else None

    module = Stops()
    trainer(str(tmp_path), max_epochs=2, accumulate_grad_batches=3, callbacks=[Ends()]).fit(module, loader(6))
    model = Steps()
    model.configure_model()
    optimizer, batches = model.configure_optimizers(), micro_batches(6)
    for start, gradient in zip((0, 0, 3), module.gradients, strict=True):
        ids, labels = (torch.cat([b[name] for b in batches[start : start + 3]]) for name in ("input_ids", "labels"))
        torch.nn.functional.cross_entropy(model.transformer(ids).flatten(0, 1), labels.flatten()).backward()
        assert float((gradient - flat(p.grad for p in model.parameters())).abs().max()) <= 1e-6
        optimizer.step()
        optimizer.zero_grad()


class Manual(LitLLM):
    """Two micro-batches a step, by hand; keeps a number that each has drawn."""

    def __init__(self) -> None:
        super().__init__(**OPTIONS)
        self.automatic_optimization = False
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss_sum, count = self.loss(batch)
        self.drawn.append(float(torch.rand(())))
        self.manual_backward(loss_sum / count)
        if batch_idx % 2:
            optimizer = self.optimizers()
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]


def test_manual_optimization_draws_anew_and_hears_signals(tmp_path: Path) -> None:
    module = Manual()
    run = trainer(str(tmp_path), max_steps=8, callbacks=[SendAt(3, signal.SIGTERM)])
    with pytest.raises(SystemExit):
        run.fit(module, loader(16))
    assert run.global_step == 4
    assert len(set(module.drawn)) == 8
    again = Manual()
    trainer(str(tmp_path), max_steps=2).fit(again, loader(4))
    trainer(str(tmp_path), max_steps=4).fit(again, loader(4))
    assert again.drawn == [*module.drawn[:4], *module.drawn], "a function of the step, whatever was before"
    assert sum(map(len, module._boundary._batches)) == 0


def test_manual_optimization_gets_the_mean(tmp_path: Path) -> None:
    class ByHand(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            loss = LitLLM.training_step(self, batch, batch_idx)
            ids, labels = batch["input_ids"], batch["labels"]
            expected = torch.nn.functional.cross_entropy(self.transformer(ids).flatten(0, 1), labels.flatten())
            torch.testing.assert_close(loss, expected)
            self.drawn.append(0.0)

    module = ByHand()
    trainer(str(tmp_path), max_epochs=1).fit(module, loader(3))
    assert len(module.drawn) == 3


def test_a_learning_rate_finder_sees_the_mean(tmp_path: Path) -> None:
    from lightning.pytorch.tuner import Tuner

    run = trainer(str(tmp_path), max_epochs=1)
    module = FewLabels()
    Tuner(run).lr_find(module, loader(4), num_training=4, min_lr=1e-9, max_lr=1e-8, update_attr=False)
    assert module.losses == pytest.approx([4.1] * len(module.losses), abs=0.5), "the mean loss of a new model, ln 61"
    assert len(module.losses) == 4


class FewLabels(LitLLM):
    """One label in four."""

    def __init__(self) -> None:
        super().__init__(**OPTIONS)
        self.lr = 0.1
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        return loss

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        labels = batch["labels"].clone()
        labels[:, SEQ // 4 :] = -100
        loss_sum, count = super().loss({**batch, "labels": labels})
        return loss_sum, count

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("count", ["int", "one", "float"])
def test_counts_of_any_kind(tmp_path: Path, count: str) -> None:
    class Counts(Steps):
        def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
            loss_sum, number = super().loss(batch)
            return loss_sum, {"int": int(number), "one": number.reshape(1), "float": number.float()}[count]  # type: ignore[return-value]

    module, plain = Counts(), Steps()
    for one in (module, plain):
        trainer(str(tmp_path), max_steps=1, accumulate_grad_batches=2).fit(one, loader(2))
    torch.testing.assert_close(module.gradients[0], plain.gradients[0])


def test_weights_alone_are_no_saved_run(tmp_path: Path) -> None:
    weights = ModelCheckpoint(tmp_path / "weights", every_n_train_steps=1, save_weights_only=True, save_top_k=-1)
    run = trainer(str(tmp_path), max_steps=8, callbacks=[SendAt(3, signal.SIGTERM), weights], enable_checkpointing=True)
    with pytest.raises(SystemExit):
        run.fit(LitLLM(**OPTIONS), loader(8))
    saved = torch.load(tmp_path / "checkpoints" / "step-4.ckpt", weights_only=True)
    assert saved["optimizer_states"]


def test_a_fused_optimizer_of_ones_own_under_float16_is_named(tmp_path: Path) -> None:
    module = Troubled({}, build=lambda parameters: torch.optim.AdamW(parameters, fused=True))
    with pytest.raises(UserError, match="build it with fused=False for trainer.precision 16-mixed"):
        trainer(str(tmp_path), max_steps=2, plugins=[Scaled()]).fit(module, loader(2))


# What Trainers do


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_the_gradient_in_other_precisions(tmp_path: Path, precision: Any) -> None:
    tolerance = {"64-true": 1e-9, "bf16-mixed": 3e-2, "bf16-true": 5e-2}[precision]
    module = Steps()
    trainer(str(tmp_path), max_steps=1, accumulate_grad_batches=4, precision=precision).fit(module, loader(4))
    fresh = Steps()
    fresh.configure_model()
    model, batches = fresh.transformer.double(), micro_batches(4)
    ids, labels = (torch.cat([b[name] for b in batches]) for name in ("input_ids", "labels"))
    torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
    expected = flat(p.grad for p in model.parameters())
    assert float((module.gradients[0] - expected).norm() / expected.norm()) < tolerance


def test_one_trainer_serves_several_modules(tmp_path: Path) -> None:
    run = trainer(str(tmp_path), max_steps=2)
    run.fit(LitLLM(**OPTIONS), loader(2))
    pickle.dumps(run)
    assert [type(one).__name__ for one in run.callbacks if "Step" in type(one).__name__] == []
    run.fit_loop.epoch_loop.max_steps = 8
    run.callbacks.append(SendAt(3, signal.SIGTERM))
    with pytest.raises(SystemExit):
        run.fit(LitLLM(**OPTIONS), loader(8))
    assert run.global_step == 4
    run = trainer(str(tmp_path), max_steps=2)
    run.fit(LitLLM(**OPTIONS), loader(2))
    assert not {"_broadcast_sigterm_tensor", "register_signal_handlers"} & {
        *vars(run.fit_loop.epoch_loop),
        *vars(run._signal_connector),
    }
    run.fit_loop.epoch_loop.max_steps = 4
    plain = PlainLightning()
    torch.manual_seed(3)
    run.fit(plain, DataLoader([torch.ones(2, 4)] * 4, batch_size=None))
    assert plain.head.weight.grad is not None, "Lightning's own ways are back"


def test_ctrl_c_outside_of_fit_is_lightnings(tmp_path: Path) -> None:
    class Interrupt(Callback):
        def on_validation_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
            if trainer.state.fn == "validate":
                os.kill(os.getpid(), signal.SIGINT)

    run = trainer(str(tmp_path), max_steps=2, callbacks=[Interrupt()])
    module = LitLLM(**OPTIONS)
    run.fit(module, loader(2))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit):
            run.validate(module, loader(2))
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_in_the_last_validation_is_not_lost(tmp_path: Path) -> None:
    class Late(Callback):
        def on_validation_start(self, trainer: L.Trainer, module: Any) -> None:
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    run = trainer(str(tmp_path), max_steps=4, callbacks=[Late(), RunCheckpoint()], enable_checkpointing=True)
    with pytest.raises(SystemExit) as end:
        run.fit(LitLLM(**OPTIONS), loader(4), loader(2))
    assert end.value.code == 0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-4.ckpt"]


def test_the_step_of_a_signal_is_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="log")
    run = L.Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        max_steps=8,
        log_every_n_steps=1,
        logger=logger,
        callbacks=[SendAt(3, signal.SIGTERM)],
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    with pytest.raises(SystemExit):
        run.fit(LitLLM(**OPTIONS), loader(8))
    rows = (tmp_path / "log" / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("step")
    assert [row.split(",")[column] for row in rows[1:]] == ["0", "1", "2", "3"]


def test_a_terminal_that_is_gone_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def fileno(self) -> int:
            return -1

        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr("sys.__stderr__", Gone())
    monkeypatch.setattr("lit_llm.callbacks.progress.sys.stderr", Gone())
    callbacks = [SendAt(2, signal.SIGTERM), ProgressLines(every_seconds=0.0), RunCheckpoint()]
    run = trainer(str(tmp_path), max_steps=8, callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(SystemExit):
        run.fit(LitLLM(**OPTIONS), loader(8))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3.ckpt"]


# The guard


class Late(HostRead):
    """What a GPU does: a step is read at the next one's end."""

    def take(self, wait: bool = False) -> tuple[list[float], Any] | None:
        return super().take(wait) if wait or len(self._queue) > 1 else None


@pytest.mark.parametrize("bad", [2, 3])
def test_a_step_that_is_read_late_is_found_also_at_the_end(tmp_path: Path, bad: int) -> None:
    module = Troubled({bad: float("nan")}, guard={"nonfinite": "stop"})
    module._boundary._read = Late()
    run = trainer(str(tmp_path), max_steps=4, callbacks=[RunCheckpoint()], enable_checkpointing=True)
    with pytest.raises(RunStopped, match=rf"step {bad + 1}: the loss is not finite on rank 0; .*saved .*step-4.ckpt"):
        run.fit(module, loader(4))
    batches = torch.load(tmp_path / "replays" / f"step-{bad + 1}-rank-0.pt", weights_only=True)["batches"]
    assert torch.equal(batches[0]["input_ids"], micro_batches(4)[bad]["input_ids"])


def test_nothing_stays_on_the_optimizer(tmp_path: Path) -> None:
    module = Troubled({1: float("nan")})
    with pytest.warns(UserWarning, match="step 2 skipped"):
        trainer(str(tmp_path), max_steps=2).fit(module, loader(2))
    optimizer = module.optimizers(use_pl_optimizer=False)
    assert isinstance(optimizer, torch.optim.Optimizer)
    before = flat(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not torch.equal(flat(module.parameters()), before)
    assert next(module.parameters()).grad is not None


@pytest.mark.parametrize("kind", ["list", "sparse"])
def test_batches_of_any_kind_are_survived(tmp_path: Path, kind: str) -> None:
    class Odd(LitLLM):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            weight = self.transformer.head_weight
            return weight.square().mean() * (float("nan") if batch_idx == 1 else 1.0)

    one = torch.ones(2, 2)
    batch: Any = [one, "text"] if kind == "list" else {"input_ids": one.to_sparse(), "labels": torch.zeros(1)}
    with pytest.warns(UserWarning, match="step 2 skipped: the loss is not finite on rank 0"):
        trainer(str(tmp_path), max_steps=3).fit(Odd(**OPTIONS), DataLoader([batch] * 3, batch_size=None))


# Ranks


def replicas(folder: str) -> dict[str, Any]:
    """Two tensor ranks: the same data, the same module."""
    module = Steps()
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    drawn: list[list[float]] = [[], []]

    class Draws(Callback):
        def on_before_zero_grad(self, *args: Any) -> None:
            drawn[0].append(float(torch.rand(())))  # within a micro-batch

        def on_train_epoch_end(self, *args: Any) -> None:
            drawn[1].append(float(torch.rand(())))  # between two

    run = trainer(folder, devices=2, strategy=strategy, accumulate_grad_batches=4, max_epochs=1, callbacks=[Draws()])
    run.fit(module, loader(8))
    expected = big_batch_run(8, "sgd", None, None)["gradients"]
    worst = max(float((a - b).abs().max()) for a, b in zip(module.gradients, expected, strict=True))
    return {"worst": worst, "drawn": drawn, "tokens": float(run.callback_metrics["train/tokens"])}


def test_ranks_that_share_their_data_count_once(two_ranks: Any) -> None:
    one, other = two_ranks[0][0], two_ranks[1][0]
    assert one["worst"] <= 1e-6
    assert one["tokens"] == sum(int((batch["labels"] >= 0).sum()) for batch in micro_batches(8))
    assert one["drawn"] == other["drawn"], "tensor ranks draw alike"


def both(folder: str) -> list[dict[str, Any]]:
    """Tensor ranks, then data ranks."""
    return [replicas(folder), data_ranks(folder)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank found in both."""
    return run_ranks("tests.test_step_uses:both", 2, folder=str(tmp_path_factory.mktemp("ranks")))


def data_ranks(folder: str) -> dict[str, Any]:
    drawn: list[list[float]] = [[], []]

    class Draws(Callback):
        def on_before_zero_grad(self, *args: Any) -> None:
            drawn[0].append(float(torch.rand(())))

        def on_train_epoch_end(self, *args: Any) -> None:
            drawn[1].append(float(torch.rand(())))

    run = trainer(folder, devices=2, strategy="ddp", max_epochs=3, callbacks=[Draws()])
    run.fit(LitLLM(**OPTIONS), loader(2))
    return {"drawn": drawn}


def test_data_ranks_differ_within_and_agree_between_micro_batches(two_ranks: Any) -> None:
    one, other = two_ranks[0][1], two_ranks[1][1]
    assert not set(one["drawn"][0]) & set(other["drawn"][0])
    assert one["drawn"][1] == other["drawn"][1], "what shuffles by torch's generator shuffles alike"
    assert len(set(one["drawn"][1])) == 3


# What a fit does to its process


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_garbage_collector_is_kept_from_what_was_there_before(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_llm.training.boundary.restore", lambda _: None)
    gc.unfreeze()
    model = LitLLM(**OPTIONS)
    run: Any = SimpleNamespace(world_size=ranks, global_step=0, optimizers=[], callbacks=[], lightning_module=model)
    model._boundary.on_train_start(run, model)
    assert (gc.get_freeze_count() > 10_000) == (ranks > 1)
    model._boundary._detach(run)
    assert gc.get_freeze_count() == 0
    gc.freeze()  # somebody's own is left alone
    mine = gc.get_freeze_count()
    model._boundary.on_train_start(run, model)
    model._boundary._detach(run)
    assert gc.get_freeze_count() == pytest.approx(mine, rel=0.1)
    gc.unfreeze()
