"""LitLLM with TokenDataModule under a plain Trainer: exact loss, accumulation, order and resume, on 1 and 2 ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor

from lit_llm import LitLLM, TokenDataModule, TokenStore
from lit_llm.data.order import TrainOrder
from lit_llm.data.prepare import prepare
from lit_llm.data.resume import fit_progress
from lit_llm.data.rows import TokenRows
from lit_llm.errors import UserError
from lit_llm.optim import OptimizerConfig, ScheduleConfig, build_optimizer, build_scheduler
from tests.conftest import write_texts
from tests.distributed import run_ranks
from tests.training import MODEL, fit


def reference_run(store: str, steps: int, clip: float | None = None, lr: float = 1e-2) -> dict[str, Any]:
    """The same training written down plainly: whole global batches, all logits, one process."""
    lit = LitLLM(config=MODEL, vocab_size=TokenStore(store).vocab_size, seq_len=16)
    lit.configure_model()
    model = lit.transformer
    optimizer = build_optimizer(model, OptimizerConfig(lr=lr))
    scheduler = build_scheduler(optimizer, ScheduleConfig(warmup_steps=2, total_steps=40), 40)
    rows = TokenRows(TokenStore(store), 16)
    order = TrainOrder(len(rows), 8, 8)
    losses, norms = [], []
    for step in range(steps):
        arrays = rows[order.global_batch(step)]
        batch = {name: torch.from_numpy(arrays[name]) for name in ("input_ids", "labels", "document_ids")}
        logits = model(batch["input_ids"], document_ids=batch["document_ids"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        losses.append(loss.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "model": model}


def close(one: list[float], other: list[float], tolerance: float = 1e-5) -> None:
    assert len(one) == len(other)
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("micro", [1, 4, 8])
def test_losses_equal_a_plain_loop_whatever_the_micro_batch(store: str, tmp_path: Path, micro: int) -> None:
    expected = reference_run(store, 6, clip=0.5)
    got = fit(store, str(tmp_path), max_steps=6, micro_batch_size=micro, gradient_clip_val=0.5)
    assert got["accumulation"] == 8 // micro
    close(got["losses"], expected["losses"])
    close(got["norms"], expected["norms"], 1e-4)


def test_the_last_partial_window_is_exact(store: str, tmp_path: Path) -> None:
    order = TrainOrder(len(TokenRows(TokenStore(store), 16)), 8, 2)
    assert order.num_samples % 8, "the store should leave a partial global batch"
    steps = order.steps_per_epoch
    expected = reference_run(store, steps)
    got = fit(store, str(tmp_path), max_steps=steps, micro_batch_size=2)
    close(got["losses"], expected["losses"], 5e-5)


def _two_ranks(store: str, folder: str, **options: Any) -> dict[str, Any]:
    return fit(store, folder, devices=2, strategy="ddp", **options)


def test_two_ddp_ranks_equal_one_process_and_resume(store: str, tmp_path: Path) -> None:
    options = {"store": store, "max_steps": 8, "micro_batch_size": 2, "save_at": 4, "gradient_clip_val": 0.5}
    options.update(val_check_interval=8, check_val_every_n_epoch=None)
    one = fit(folder=str(tmp_path / "one"), **options)
    two = run_ranks("tests.test_training:_two_ranks", 2, folder=str(tmp_path / "two"), **options)
    assert two[0]["accumulation"] == 2
    assert two[0]["weights"] == two[1]["weights"]
    for rank in two:
        close(rank["losses"], one["losses"])
        close(rank["norms"], one["norms"], 1e-4)
        assert rank["val_loss"] == pytest.approx(one["val_loss"], rel=1e-5)
    # Both ranks together saw the global batches of the single process.
    for step in range(8):
        together = sum((sum(rank["rows"][2 * step : 2 * step + 2], []) for rank in two), [])
        assert sorted(together) == sorted(sum(one["rows"][4 * step : 4 * step + 4], []))
    # From two ranks to one, with another micro-batch size: the same global batches and losses.
    checkpoint = next((tmp_path / "two" / "checkpoints").glob("step=4*.ckpt"))
    resumed = fit(
        folder=str(tmp_path / "back"), ckpt_path=str(checkpoint), **{**options, "micro_batch_size": 8, "save_at": None}
    )
    close(resumed["losses"], one["losses"][4:])
    assert [len(rows) for rows in resumed["rows"]] == [8] * 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_is_bit_equal(store: str, tmp_path: Path, num_workers: int) -> None:
    # 30 steps pass two epoch borders; saves lie inside an epoch and at its end.
    spe = TrainOrder(len(TokenRows(TokenStore(store), 16)), 8, 2).steps_per_epoch
    end = 2 * spe + 3
    whole = fit(store, str(tmp_path / "a"), max_steps=end, save_at=1, num_workers=num_workers)
    for step in (spe // 2, spe, spe + 2):
        checkpoint = tmp_path / "a" / "checkpoints" / f"step={step}.ckpt"
        resumed = fit(
            store, str(tmp_path / f"b{step}"), max_steps=end, num_workers=num_workers, ckpt_path=str(checkpoint)
        )
        assert resumed["losses"] == whole["losses"][step:]
        assert resumed["rates"] == whole["rates"][step:]
        assert resumed["weights"] == whole["weights"]
        if num_workers:
            break


def test_progress_is_rewritten_for_another_layout() -> None:
    def progress(ready: int, total: int, behind: int) -> dict[str, Any]:
        names = ("ready", "started", "processed", "completed")
        return {
            key: {n: v - (behind if n == "completed" else 0) for n in names}
            for key, v in {"current": ready, "total": total}.items()
        }

    inside = progress(12, 12 + 20, 1)  # step 3 of the second epoch: 4 micro-batches a step, 20 an epoch
    fit_progress(inside, saved=(4, 20), present=(2, 10))
    assert inside == progress(6, 6 + 10, 1)
    finished = progress(20, 20, 1)
    fit_progress(finished, saved=(4, 20), present=(2, 10))
    assert finished == progress(10, 10, 1)
    in_window = progress(14, 14 + 20, 1)  # two micro-batches into step 3: they are done again
    fit_progress(in_window, saved=(4, 20), present=(4, 20))
    assert in_window == progress(12, 12 + 20, 0)


def test_validation_is_the_mean_over_tokens(store: str, tmp_path: Path) -> None:
    data = TokenDataModule(store, seq_len=16, global_batch_size=6)
    lit = LitLLM(config=MODEL)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    [values] = trainer.validate(lit, data, verbose=False)
    tokens = TokenStore(store, "val")
    rows = TokenRows(tokens, 16, pad_last=True, byte_lengths=tokens.tokenizer.token_byte_lengths())
    batch = rows[np.arange(len(rows))]
    logits = lit(torch.from_numpy(batch["input_ids"]), document_ids=torch.from_numpy(batch["document_ids"]))
    labels = torch.from_numpy(batch["labels"])
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="sum")
    loss = float(total / (labels >= 0).sum())
    assert values["val/loss"] == pytest.approx(loss, rel=1e-5)
    assert values["val/perplexity"] == pytest.approx(float(np.exp(loss)), rel=1e-5)
    bits = float(total) / np.log(2) / batch["num_bytes"].sum()
    assert values["val/bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_an_integer_val_check_interval_counts_steps(store: str, tmp_path: Path) -> None:
    at: list[int] = []

    class Counting(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            at.append(trainer.global_step)

    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=6,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Counting()],
        default_root_dir=tmp_path,
    )
    trainer.fit(LitLLM(config=MODEL), TokenDataModule(store, seq_len=16, global_batch_size=8, micro_batch_size=2))
    assert at == [2, 4, 6]


def test_an_interval_longer_than_an_epoch_counts_on_over_its_end(store: str, tmp_path: Path) -> None:
    steps = TrainOrder(len(TokenRows(TokenStore(store), 16)), 8, 8).steps_per_epoch + 2
    got = fit(store, str(tmp_path), max_steps=steps, micro_batch_size=8, val_check_interval=steps)
    assert got["val_loss"] is not None


def _trainer(folder: Path, **options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", default_root_dir=folder, **{**quiet, "enable_model_summary": False, **options})


def test_evaluation_before_training_leaves_nothing_behind(store: str, tmp_path: Path) -> None:
    lit, data = LitLLM(config=MODEL), TokenDataModule(store, seq_len=16, global_batch_size=8)
    trainer = _trainer(tmp_path, max_steps=3, val_check_interval=2)
    before = trainer.validate(lit, data, verbose=False)
    trainer.fit(lit, data)
    assert trainer.validate(lit, data, verbose=False)[0]["val/loss"] < before[0]["val/loss"]
    trainer.test(lit, data, verbose=False)


def test_one_trainer_fits_again_with_another_layout(store: str, tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, max_steps=2, val_check_interval=1)
    for micro in (2, 4):
        data = TokenDataModule(store, seq_len=16, global_batch_size=8, micro_batch_size=micro)
        trainer.fit_loop.epoch_loop.max_steps += 2
        trainer.fit(LitLLM(config=MODEL), data)
        assert trainer.accumulate_grad_batches == 8 // micro
        assert trainer.val_check_interval == 8 // micro


def test_one_data_module_serves_trainers_with_other_intervals(store: str, tmp_path: Path) -> None:
    data = TokenDataModule(store, seq_len=16, global_batch_size=8, micro_batch_size=2)
    for interval in (1, 3):
        trainer = _trainer(tmp_path, max_steps=3, val_check_interval=interval)
        trainer.fit(LitLLM(config=MODEL), data)
        assert trainer.val_check_interval == 4 * interval


def test_an_unfinished_window_does_not_reach_the_next_fit(store: str, tmp_path: Path) -> None:
    class Stop(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise KeyError("stop in the middle of a step")

    lit, data = LitLLM(config=MODEL), TokenDataModule(store, seq_len=16, global_batch_size=8, micro_batch_size=2)
    with pytest.raises(KeyError):
        _trainer(tmp_path, max_steps=2, callbacks=[Stop()]).fit(lit, data)
    again = _trainer(tmp_path, max_steps=1, log_every_n_steps=1)
    again.fit(lit, data)
    expected = reference_run(store, 1)
    assert float(again.callback_metrics["train/loss"]) == pytest.approx(expected["losses"][0], rel=1e-5)


@pytest.mark.parametrize("limit", [3, 8, 0.5])
def test_limits_keep_steps_whole(store: str, tmp_path: Path, limit: int | float) -> None:
    whole = fit(store, str(tmp_path / "a"), max_steps=16)
    cut = fit(store, str(tmp_path / "b"), max_steps=16, limit_train_batches=limit, max_epochs=99)
    assert cut["rows"] == whole["rows"]
    close(cut["losses"], whole["losses"], 1e-6)


def test_float_limits_count_the_steps_of_the_schedule(store: str, tmp_path: Path) -> None:
    data = TokenDataModule(store, seq_len=16, global_batch_size=8, micro_batch_size=2)
    lit, trainer = LitLLM(config=MODEL), _trainer(tmp_path, max_epochs=2, limit_train_batches=0.3)
    trainer.fit(lit, data)
    assert lit.total_steps() == trainer.global_step


def test_overfitting_repeats_whole_global_batches(store: str, tmp_path: Path) -> None:
    got = fit(store, str(tmp_path), max_steps=4, max_epochs=9, overfit_batches=8)
    assert [len(rows) for rows in got["rows"]] == [2] * 16
    assert got["rows"][:8] == got["rows"][8:]


class ManualStep(LitLLM):
    """Manual optimization: a step of its own on every micro-batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.seen: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        loss_sum, count = self.loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_sum / count.clamp(min=1))
        optimizer.step()
        self.seen.append(int((batch["labels"] != -100).any(dim=1).sum()))


def test_manual_optimization_sees_every_row(store: str, tmp_path: Path) -> None:
    lit = ManualStep(config=MODEL, schedule={"name": "constant", "warmup_steps": 0})
    data = TokenDataModule(store, seq_len=16, global_batch_size=8, micro_batch_size=2)
    _trainer(tmp_path, max_epochs=2).fit(lit, data)
    half = len(lit.seen) // 2
    assert sum(lit.seen[:half]) == sum(lit.seen[half:]) == len(TokenRows(TokenStore(store), 16))


def test_a_negative_clip_is_refused(store: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gradient_clip_val must be above 0"):
        fit(store, str(tmp_path), max_steps=1, gradient_clip_val=-1.0)


def test_a_store_of_another_tokenizer_is_refused(store: str, tmp_path: Path) -> None:
    fit(store, str(tmp_path), max_steps=1, save_at=1)
    write_texts(tmp_path / "texts", documents=30, seed=9)
    prepare([str(tmp_path / "texts")], tmp_path / "other", vocab_size=290, val_fraction=0.2, workers=1, progress=False)
    same = tmp_path / "same"
    prepare([str(tmp_path / "texts")], same, tokenizer=store, val_fraction=0.2, workers=1, progress=False)
    path = str(tmp_path / "checkpoints" / "step=1.ckpt")
    with pytest.raises(UserError, match="another tokenizer"):
        fit(str(tmp_path / "other"), str(tmp_path), max_steps=2, ckpt_path=path)
    fit(str(same), str(tmp_path), max_steps=2, ckpt_path=path, data={"resume_with_other_data": True})


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lower_precisions_train(store: str, tmp_path: Path, precision: str) -> None:
    exact = fit(store, str(tmp_path / "a"), max_steps=5)
    lower = fit(store, str(tmp_path / "b"), max_steps=5, precision=precision)
    close(lower["losses"], exact["losses"], 0.05)


def test_16_true_is_refused(store: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="16-true keeps float16 weights"):
        fit(store, str(tmp_path), max_steps=1, precision="16-true")


@pytest.mark.parametrize(("precision", "handles_unscaling"), [("16-mixed", False), ("bf16-mixed", True)])
def test_gradients_are_unscaled_before_they_are_clipped(precision: str, handles_unscaling: bool) -> None:
    lit = LitLLM(config=MODEL, vocab_size=50, seq_len=8, schedule={"total_steps": 4})
    lit.configure_model()
    lit._trainer = SimpleNamespace(precision=precision, max_steps=4, max_epochs=None)
    optimizer = lit.configure_optimizers()["optimizer"]
    # What Lightning asks an optimizer, to know whether it must unscale itself before it calls the clipping hook.
    assert bool(getattr(optimizer, "_step_supports_amp_scaling", False)) is handles_unscaling


class WeightedLoss(LitLLM):
    """Overrides the loss alone: long words count twice, in the sum and in the number."""

    def loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        loss_sum, count = super().loss(batch)
        return 2 * loss_sum, 2 * count


class PlainStep(LitLLM):
    """Overrides the training step alone, with Lightning's own semantics."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss_sum, count = self.loss(batch)
        loss = loss_sum / count
        self.log("train/loss", loss)
        self.log("train/grad_norm", 0.0)
        self.log("train/learning_rate", 0.0)
        return loss


class OwnOptimizer(LitLLM):
    """Overrides the optimizer alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnModel(LitLLM):
    """Overrides the model alone: a bigram table with the Transformer's calling convention."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Bigram(self.vocab_size or 0)


class Bigram(torch.nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocab_size, vocab_size)

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        logits = self.table(input_ids)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()


def test_each_method_can_be_overridden_alone(store: str, tmp_path: Path) -> None:
    base = fit(store, str(tmp_path / "base"), max_steps=3)
    weighted = fit(store, str(tmp_path / "w"), max_steps=3, module=WeightedLoss)
    close(weighted["losses"], base["losses"])
    plain = fit(store, str(tmp_path / "p"), max_steps=3, module=PlainStep, micro_batch_size=8)
    assert len(plain["losses"]) == 3
    # In one process without accumulation, the mean over the micro-batch is the mean over the global batch.
    assert plain["weight_sum"] == pytest.approx(base["weight_sum"], rel=1e-4)
    sgd = fit(store, str(tmp_path / "o"), max_steps=3, module=OwnOptimizer)
    assert sgd["rates"] == [0.1] * 3
    assert sgd["losses"][0] == base["losses"][0]
    own = fit(store, str(tmp_path / "m"), max_steps=3, module=OwnModel)
    assert list(own["weight_sum"]) == ["model.table.weight"]


def test_unshifted_labels_are_refused(tmp_path: Path) -> None:
    ids = torch.randint(0, 50, (4, 2, 8))
    loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=None)
    trainer = L.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(UserError, match=r"labels\[t\] is the token after"):
        trainer.fit(LitLLM(config=MODEL, vocab_size=50, seq_len=8), loader)


def test_a_plain_dataloader_trains(tmp_path: Path) -> None:
    rows = [{"input_ids": r[:-1], "labels": r[1:]} for r in torch.randint(0, 50, (12, 9))]
    trainer = L.Trainer(
        accelerator="cpu", max_steps=4, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    lit = LitLLM(config=MODEL, vocab_size=50, seq_len=8, schedule={"warmup_fraction": 0.5})
    trainer.fit(lit, torch.utils.data.DataLoader(rows, batch_size=3))
    assert trainer.global_step == 4


def test_the_checkpoint_is_plain_and_loads_anywhere(store: str, tmp_path: Path) -> None:
    fit(store, str(tmp_path), max_steps=2, save_at=2, model={**MODEL, "tie_word_embeddings": True})
    path = tmp_path / "checkpoints" / "step=2.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["lit_llm"]["config"]["tie_word_embeddings"] is True
    assert checkpoint["lit_llm"]["trained_tokens"] > 0
    assert not any("_orig_mod" in name for name in checkpoint["state_dict"])
    lit = LitLLM.load_from_checkpoint(path)
    assert torch.equal(lit.transformer.embed_tokens.weight, checkpoint["state_dict"]["model.embed_tokens.weight"])
    assert lit.tokenizer is not None
    assert lit.transformer.config.eos_token_id == lit.tokenizer.eos_token_id


def test_a_checkpoint_of_another_shape_is_named(store: str, tmp_path: Path) -> None:
    fit(store, str(tmp_path), max_steps=1, save_at=1)
    path = str(tmp_path / "checkpoints" / "step=1.ckpt")
    with pytest.raises(UserError, match="mlp_bias False there, True here"):
        fit(store, str(tmp_path), max_steps=2, ckpt_path=path, model={**MODEL, "mlp_bias": True})
    with pytest.warns(UserWarning, match=r"rope_theta 10000.0 there, 500.0 here"):
        fit(store, str(tmp_path), max_steps=2, ckpt_path=path, model={**MODEL, "rope_theta": 500.0})
    with pytest.raises(UserError, match="hidden_size 32 there, 64 here"):
        fit(store, str(tmp_path), max_steps=2, ckpt_path=path, model={**MODEL, "hidden_size": 64})


def test_sizes_that_do_not_divide_are_named(store: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="global_batch_size 8 does not divide by micro_batch_size 3"):
        fit(store, str(tmp_path), max_steps=1, micro_batch_size=3)


def test_predict_under_a_plain_trainer(store: str, tmp_path: Path) -> None:
    lit = LitLLM(config=MODEL, generation={"max_new_tokens": 4})
    data = TokenDataModule(store, seq_len=16, micro_batch_size=2, prompts=["alpha beta", "one", "gamma"])
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    records = sum(trainer.predict(lit, data), [])
    assert [r["index"] for r in records] == [0, 1, 2]
    assert all(set(r) == {"index", "prompt", "completion", "tokens", "finish_reason", "logprobs"} for r in records)


def test_a_padded_vocabulary_is_never_generated(store: str) -> None:
    lit = LitLLM(config={**MODEL, "vocab_size": 512}, vocab_size=300)
    assert lit.resolve_config().generated_vocab_size == 300
    with pytest.raises(UserError, match="vocab_size 128 is smaller than the data's 300"):
        LitLLM(config={**MODEL, "vocab_size": 128}, vocab_size=300).resolve_config()
    assert LitLLM(config="1m", vocab_size=300).resolve_config().vocab_size == 300


def test_limit_train_batches_goes_on_into_new_data(store: str, tmp_path: Path) -> None:
    whole = fit(store, str(tmp_path / "a"), max_steps=6, micro_batch_size=8)
    cut = fit(store, str(tmp_path / "b"), max_steps=6, micro_batch_size=8, limit_train_batches=2, max_epochs=9)
    assert cut["rows"] == whole["rows"]
