"""validate, test and predict on real ranks: all make the same calls, and results come out once and in order."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_llm import LitLLM, TokenDataModule
from lit_llm.callbacks import PredictionWriter
from lit_llm.errors import UserError
from lit_llm.parallel import MeshStrategy
from lit_llm.training.evaluation import EvaluationWatch
from tests.distributed import run_ranks
from tests.test_step import SEQ, VOCAB, micro_batches, trainer
from tests.training import MODEL

PROMPTS = ["alpha beta", "one", "gamma delta one two three alpha", "é", "beta beta beta"]
STRATEGIES: dict[str, Any] = {"ddp": "ddp", "shard": {}, "replicate": {"replicate": 2, "shard": "auto"}}


def strategy(options: Any) -> Any:
    return MeshStrategy(**options) if isinstance(options, dict) else options


def predict(store: str, folder: str, prompts: list[str], options: Any, devices: int, **more: Any) -> list[Any]:
    """The lines of the file; greedy, so that lengths differ with the prompts' stops."""
    lit = LitLLM(config=MODEL, seed=5, generation={"max_new_tokens": 12, "stop": ["a", " t"]})
    data = TokenDataModule(store, seq_len=16, micro_batch_size=2, prompts=prompts)
    output = Path(folder, "predictions.jsonl")
    run = trainer(folder, devices=devices, strategy=strategy(options), callbacks=[PredictionWriter(output)], **more)
    run.predict(lit, datamodule=data, return_predictions=False)
    return [json.loads(line) for line in output.read_text().splitlines()]


class Evaluated(LitLLM):
    """Logs a value of each batch too, which Lightning exchanges over the ranks before the epoch's end."""

    def __init__(self) -> None:
        super().__init__(config=MODEL, vocab_size=VOCAB, seq_len=SEQ, seed=3)
        self.batches = 0
        self.watched: list[Any] = []

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.batches += 1
        watches = [one for one in self.trainer.callbacks if isinstance(one, EvaluationWatch)]
        watching = any(one._peers._run is not None for one in watches)
        self.watched.append((signal.getsignal(signal.SIGTERM), watching))
        self.log("rows", float(len(batch["input_ids"])), on_epoch=True, sync_dist=True, reduce_fx="sum")


def validate(folder: str, batches: list[dict[str, Tensor]], options: Any, devices: int) -> dict[str, Any]:
    lit = Evaluated()
    run = trainer(folder, devices=devices, strategy=strategy(options))
    before, lit.watched = signal.getsignal(signal.SIGTERM), []
    values = run.validate(lit, DataLoader(batches, batch_size=None), verbose=False)[0]
    # SIGTERM ends an evaluation as it would end anything else, and a rank that dies is noticed.
    assert lit.watched == [(before, devices > 1)] * lit.batches
    assert not any(isinstance(one, EvaluationWatch) for one in run.callbacks)
    tested = run.test(lit, DataLoader(batches, batch_size=None), verbose=False)[0]
    return {**values, **tested, "batches": lit.batches}


def sane(folder: str, batches: list[dict[str, Tensor]], options: Any, devices: int) -> float:
    """The loss before training, of batches that on one rank hold no label."""
    lit, logger = Evaluated(), Logged()
    loader = DataLoader(batches, batch_size=None)
    run = trainer(folder, devices=devices, strategy=strategy(options), max_steps=1, num_sanity_val_steps=2)
    run.loggers = [logger]
    run.fit(lit, DataLoader(micro_batches(1), batch_size=None), loader)
    return logger.before


class Logged(L.pytorch.loggers.logger.DummyLogger):
    """Keeps the loss that is logged for step 0."""

    before = -1.0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if self.before < 0:
            self.before = float(metrics["val/loss"])


def all_uses(store: str, folder: str, ranks: int) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    found = {}
    for name, options in STRATEGIES.items():
        found[name] = {
            "five": predict(store, folder, PROMPTS, options, ranks),
            "one": predict(store, folder, PROMPTS[:1], options, ranks),
            "bf16": predict(store, folder, PROMPTS, options, ranks, precision="bf16-true"),
            # Three batches on two ranks: one has two, the other one.
            "validate": validate(folder, micro_batches(3)[rank::ranks], options, ranks),
            "sanity": sane(folder, micro_batches(2, without_labels=1)[rank::ranks], options, ranks),
        }
    return found


@pytest.fixture(scope="module")
def two_ranks(store: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks found under each strategy."""
    folder = str(tmp_path_factory.mktemp("evaluation"))
    return run_ranks("tests.test_mesh_evaluation:all_uses", 2, store=store, folder=folder, ranks=2)


@pytest.mark.parametrize("name", STRATEGIES)
def test_predictions_come_once_in_order(two_ranks: Any, store: str, tmp_path: Path, name: str) -> None:
    alone = predict(store, str(tmp_path), PROMPTS, "auto", 1)
    assert [record["index"] for record in alone] == [0, 1, 2, 3, 4]
    assert len({len(record["tokens"]) for record in alone}) > 1, "ranks have different numbers of forwards to make"
    for rank in two_ranks:
        for number, (mine, theirs) in enumerate(zip(rank[name]["five"], alone, strict=True)):
            assert mine["index"] == number
            assert mine["prompt"] == PROMPTS[number]
            assert (mine["tokens"], mine["finish_reason"]) == (theirs["tokens"], theirs["finish_reason"])
            assert mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-5)
        assert rank[name]["one"][0]["tokens"] == alone[0]["tokens"]
        assert len(rank[name]["one"]) == 1
        assert [record["index"] for record in rank[name]["bf16"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", STRATEGIES)
def test_three_batches_on_two_ranks(two_ranks: Any, tmp_path: Path, name: str) -> None:
    alone = validate(str(tmp_path), micro_batches(3), "auto", 1)
    assert alone["batches"] == 3
    assert sum(rank[name]["validate"]["batches"] for rank in two_ranks) == 3
    for rank in two_ranks:
        for metric in ("val/loss", "test/loss"):
            assert rank[name]["validate"][metric] == pytest.approx(alone[metric], abs=1e-6)
        first = validate(str(tmp_path), micro_batches(1), "auto", 1)
        assert rank[name]["sanity"] == pytest.approx(first["val/loss"], abs=1e-6)
        assert rank[name]["validate"]["rows"] == alone["rows"] == 6.0


# What is refused


def test_lightnings_own_ways_to_shard_are_refused(tmp_path: Path) -> None:
    lit = LitLLM(config=MODEL, vocab_size=VOCAB, seq_len=SEQ)
    subclass = type("Sharded", (L.pytorch.strategies.FSDPStrategy,), {})  # Lightning lets no other be built on a CPU
    run = trainer(str(tmp_path), max_steps=1, devices=1, strategy=subclass())
    lit.trainer = run
    with pytest.raises(UserError, match=r"use strategy=lit_llm.parallel.MeshStrategy\(\)"):
        lit.setup("fit")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor": 2}, "trainer.strategy.tensor 2 is not there yet"),
        ({"context": 4}, "trainer.strategy.context 4 is not there yet"),
        ({"shard": 2}, "replicate 1 x shard 2 needs 2 processes, but there is 1"),
        ({"reshard_after_forward": 3}, "reshard_after_forward must be true, false or a divisor of shard 1"),
        ({"prefetch": -1}, "prefetch must be 0 or more; got -1"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_before_anything_starts(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        trainer(str(tmp_path), devices=1, strategy=MeshStrategy(**options))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_process_is_left_as_it_is(tmp_path: Path) -> None:
    lit = LitLLM(config=MODEL, vocab_size=VOCAB, seq_len=SEQ)
    run = trainer(str(tmp_path), devices=1, strategy=MeshStrategy(), max_steps=2)
    run.fit(lit, DataLoader(micro_batches(2), batch_size=None))
    assert all(type(p) is torch.nn.Parameter for p in lit.parameters())
