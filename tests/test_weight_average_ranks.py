"""The moving average of the weights over ranks, over shards, and under the names of wrapped and tied parameters."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_llm.callbacks import RunCheckpoint
from lit_llm.callbacks.weight_average import WeightAverage
from lit_llm.checkpoint import read_checkpoint
from lit_llm.checkpoint.average import averaged_weights
from tests.distributed import run_ranks
from tests.test_weight_average import VALIDATED, Weights, apart, fit


class Toy(L.LightningModule):
    """A net with frozen parameters and buffers."""

    def __init__(self, loader: DataLoader[Any], shard: bool = False) -> None:
        super().__init__()
        self.batches, self.shard = list(loader), shard
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(1)
        # 5 features: the shards of two ranks differ in size.
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
        self.net[3].requires_grad_(False).eval()
        if self.shard:
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        assert self.net is not None
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        # By the step, as Lightning begins a plain loader anew when a run is resumed.
        batch = self.batches[self.global_step % len(self.batches)]
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-2)


def rows(rank: int = 0, ranks: int = 1) -> DataLoader[Any]:
    """This rank's part of global batches of 4 rows."""
    g, size = torch.Generator().manual_seed(2), 4 // ranks
    inputs, targets = torch.randn(8, 4, 3, generator=g), torch.randn(8, 4, 5, generator=g)
    mine = slice(rank * size, (rank + 1) * size)
    return DataLoader(TensorDataset(inputs[:, mine].reshape(-1, 3), targets[:, mine].reshape(-1, 5)), size)


class Losses(Callback):
    def __init__(self) -> None:
        self.train: list[float] = []
        self.val: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.train.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.val.append(float(trainer.callback_metrics["val/loss"]))


def fit_toy(
    folder: str | Path, *, ranks: int = 1, shard: bool = False, ckpt_path: str | None = None, steps: int = 12
) -> dict[str, Any]:
    """Validated every 3 steps, saved at steps 6 and 12."""
    average, losses = WeightAverage(0.8), Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(ranks, 1, save_distributed_checkpoint=False) if shard else "auto",
        default_root_dir=folder,
        max_steps=steps,
        callbacks=[average, losses, RunCheckpoint(every_n_train_steps=6)],
        val_check_interval=3,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        inference_mode=False,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    mine = rows(int(os.environ.get("RANK", 0)), ranks)
    trainer.fit(Toy(mine, shard), mine, mine, ckpt_path=ckpt_path)
    kinds = sorted({type(entry.shadow).__name__ for entry in average._entries})
    state = average.state_dict()
    return {
        "train": losses.train,
        "val": losses.val,
        "updates": state["updates"],
        "kinds": kinds,
        "sizes": [entry.shadow.to_local().numel() if shard else entry.shadow.numel() for entry in average._entries],
        "weights": {name: t.tolist() for name, t in state["weights"].items()},
    }


def as_tensors(result: dict[str, Any]) -> Weights:
    return {name: torch.tensor(values) for name, values in result["weights"].items()}


@pytest.mark.slow
def test_two_ddp_ranks_equal_one_process(store: str, tmp_path: Path) -> None:
    average = WeightAverage(0.8)
    watch, _ = fit(store, tmp_path / "one", average, **VALIDATED)
    two = run_ranks("tests.test_weight_average_ranks:_ddp", 2, store=store, folder=str(tmp_path / "two"))
    assert two[0]["weights"] == two[1]["weights"]
    # Adam's first steps magnify the rounding of gradients: about the distance of the runs' own weights.
    assert apart(as_tensors(two[0]), average.state_dict()["weights"]) < 2e-5
    assert list(two[0]["losses"].values()) == pytest.approx(list(watch.losses.values()), rel=1e-5)


def _ddp(store: str, folder: str) -> dict[str, Any]:
    average = WeightAverage(0.8)
    watch, _ = fit(store, folder, average, micro=1, devices=2, strategy="ddp", **VALIDATED)
    weights = average.state_dict()["weights"]
    return {"weights": {name: t.tolist() for name, t in weights.items()}, "losses": watch.losses}


def test_shards(tmp_path: Path) -> None:
    one = fit_toy(tmp_path / "one")
    target = "tests.test_weight_average_ranks:fit_toy"
    two = run_ranks(target, 2, folder=str(tmp_path / "two"), ranks=2, shard=True)
    assert two[0]["kinds"] == two[1]["kinds"] == ["DTensor"]
    assert [a + b for a, b in zip(two[0]["sizes"], two[1]["sizes"], strict=True)] == one["sizes"]
    assert two[0]["updates"] == one["updates"] == 12
    assert two[1]["weights"] == {}  # rank 0 alone writes
    assert apart(as_tensors(two[0]), as_tensors(one)) < 1e-6
    for result in two:  # after a validation the root must gather its raw weights anew
        assert result["train"] == pytest.approx(one["train"], abs=1e-6)
        assert result["val"] == pytest.approx(one["val"], abs=1e-6)
    contents = [read_checkpoint(tmp_path / name / "checkpoints" / "step-6.ckpt") for name in ("one", "two")]
    raw, sharded_raw = (content["state_dict"] for content in contents)
    assert apart(raw, sharded_raw) < 1e-6
    weights, sharded = (averaged_weights(content) or {} for content in contents)
    assert apart(weights, sharded) < 1e-6
    assert sharded.keys() < sharded_raw.keys()  # neither what is frozen nor the buffers
    assert apart(sharded, {name: sharded_raw[name] for name in sharded}) > 1e-3
    # Resumed on two ranks, and in one process.
    path = str(tmp_path / "two" / "checkpoints" / "step-6.ckpt")
    again = run_ranks(target, 2, folder=str(tmp_path / "again"), ranks=2, shard=True, ckpt_path=path)
    assert again[0]["weights"] == two[0]["weights"]
    assert again[0]["val"] == two[0]["val"][2:]
    alone = fit_toy(tmp_path / "alone", ckpt_path=path)
    assert alone["updates"] == 12
    assert apart(as_tensors(alone), as_tensors(one)) < 1e-6


def test_tied_and_wrapped_names() -> None:
    raw = {"net._orig_mod.a": torch.ones(2, dtype=torch.bfloat16), "net._orig_mod.b": torch.ones(2), "c": torch.ones(1)}
    state = {"evaluate": True, "updates": 1, "weights": {"net.a": torch.full((2,), 2.0), "net.b": torch.zeros(2)}}
    content = {"state_dict": raw, "callbacks": {"WeightAverage": state}}
    weights = averaged_weights(content)
    assert weights is not None
    assert {name: t.tolist() for name, t in weights.items()} == {"net._orig_mod.a": [2, 2], "net._orig_mod.b": [0, 0]}
    assert [t.dtype for t in weights.values()] == [torch.bfloat16, torch.float32]
    for change in ({"updates": 0}, {"evaluate": False}):
        assert averaged_weights({**content, "callbacks": {"WeightAverage": {**state, **change}}}) is None
    assert averaged_weights({"state_dict": raw}) is None
    assert averaged_weights({"state_dict": raw, "callbacks": {"Other": state}}) is None


def test_an_average_is_converted_when_it_is_asked_for() -> None:
    class Watched(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            asked.append(name)
            return super().__getitem__(name)

    asked: list[str] = []
    average = Watched(a=torch.full((2,), 1 + 2**-20), b=torch.zeros(2))
    state = {"evaluate": True, "updates": 1, "weights": average}
    raw = {name: torch.ones(2, dtype=torch.bfloat16) for name in "ab"}
    weights = averaged_weights({"state_dict": raw, "callbacks": {"WeightAverage": state}})
    assert weights is not None
    assert (len(weights), weights.dtype("a"), asked) == (2, torch.bfloat16, [])
    assert weights["a"].tolist() == [1, 1]
    assert asked == ["a"]


class Tied(Toy):
    def configure_model(self) -> None:
        super().configure_model()
        assert isinstance(self.net, nn.Sequential)
        self.net[4].weight = self.net[2].weight
        self.net = torch.compile(self.net, backend="eager")


def test_tied_parameters_of_a_compiled_module(tmp_path: Path) -> None:
    average, tied = WeightAverage(0.8), Tied(rows())
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=4,
        callbacks=[average],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    trainer.fit(tied, rows())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert len(average._entries) == 5
    content = read_checkpoint(tmp_path / "x.ckpt")
    saved = content["callbacks"]["WeightAverage"]["weights"]
    assert set(saved) == {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias", "net.4.weight", "net.4.bias"}
    assert saved["net.2.weight"].data_ptr() == saved["net.4.weight"].data_ptr()
    weights = averaged_weights(content)
    assert weights is not None
    assert set(weights) < set(content["state_dict"])
    fresh = copy.deepcopy(tied)
    fresh.load_state_dict({**content["state_dict"], **weights})
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, weights.get(name, content["state_dict"][name]))
