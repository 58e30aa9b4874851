"""Steps that are not taken: the same decision on all ranks, nothing changed by them, said and saved."""

from __future__ import annotations

import math
import os
import random
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lit_llm import LitLLM
from lit_llm.errors import RunStopped, UserError
from lit_llm.training.guard import GOOD, NON_FINITE, SPIKE, Guard, GuardConfig
from tests.distributed import run_ranks
from tests.test_step import SEQ, VOCAB, flat, micro_batches, trainer
from tests.training import MODEL

# The decision


def judge(guard: Guard, loss: float, norm: float) -> list[float]:
    return guard.judge(torch.tensor(loss), torch.tensor(norm)).tolist()


def test_spikes_are_judged_as_a_plain_list_would() -> None:
    draw = random.Random(1)
    guard = Guard(GuardConfig(spike_factor=4.0, spike_window=16, max_skips=3))
    accepted: list[tuple[float, float]] = []
    in_a_row, kinds = 0, []
    for step in range(300):
        loss, norm = 4 - step / 200 + draw.gauss(0, 0.1), draw.expovariate(1.0) + 1
        if step % 37 == 36:
            loss += draw.choice([3.0, math.nan, math.inf, -math.inf])
        if 200 <= step < 210:
            norm = 60.0  # a new level, which must be accepted in the end
        window = accepted[-16:]
        expected = GOOD
        if not (math.isfinite(loss) and math.isfinite(norm)):
            expected = NON_FINITE
        elif len(window) >= 8:
            for column, value in ((0, loss), (1, norm)):
                values = [pair[column] for pair in window]
                mean = statistics.fmean(values)
                deviation = max(statistics.pstdev(values), 0.01 * abs(mean))
                if value > mean + 4 * deviation:
                    expected = SPIKE
        if expected == SPIKE and in_a_row >= 3:
            expected, accepted = GOOD, []
        if expected == GOOD:
            accepted.append((loss, norm))
        in_a_row = 0 if expected == GOOD else in_a_row + 1
        kind, *_, row, _ = judge(guard, loss, norm)
        assert (kind, row) == (expected, in_a_row), step
        kinds.append(kind)
    assert kinds.count(SPIKE) >= 5
    assert kinds.count(NON_FINITE) >= 3
    assert int(guard.skipped) == len(kinds) - kinds.count(GOOD)


def test_the_deviation_counts_as_a_hundredth_of_the_mean() -> None:
    guard = Guard(GuardConfig(spike_factor=5.0, spike_window=8))
    for _ in range(8):
        assert judge(guard, 2.0, 1.0)[0] == GOOD
    assert judge(guard, 2.09, 1.04)[0] == GOOD
    assert judge(guard, 2.5, 1.0)[0] == SPIKE


def test_state_goes_on_where_it_was() -> None:
    config = GuardConfig(spike_factor=3.0, spike_window=8)
    one, other = Guard(config), Guard(config)
    values = [(3 + 0.1 * math.sin(i), 1 + 0.1 * math.cos(i)) for i in range(40)]
    for loss, norm in values[:13]:
        judge(one, loss, norm)
    judge(one, math.nan, 1.0)
    other.load_state_dict(one.state_dict())
    for loss, norm in [*values[13:], (9.0, 1.0), (3.0, 50.0)]:
        assert judge(one, loss, norm) == judge(other, loss, norm)
    assert int(one.skipped) == int(other.skipped) >= 3
    shorter = Guard(GuardConfig(spike_factor=3.0, spike_window=4))
    shorter.load_state_dict(one.state_dict())
    assert judge(shorter, 9.0, 1.0)[0] == GOOD, "another window begins anew"


@pytest.mark.parametrize(
    "options",
    [{"nonfinite": "no"}, {"spike_factor": 0}, {"spike_factor": "x"}, {"spike_window": 1}, {"max_skips": 0}],
)
def test_options_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"model.guard.{next(iter(options))} must be"):
        GuardConfig(**options)


# In a run


class PlainLoss(LitLLM):
    """Lightning's own semantics, and a loss that is not finite on rank 1 in the second step."""

    def __init__(self) -> None:
        super().__init__(config=MODEL, vocab_size=VOCAB, seq_len=SEQ)
        self.after: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss_sum, count = self.loss(batch)
        bad = self.trainer.global_step == 1 and self.trainer.global_rank == 1
        return loss_sum / count * (math.nan if bad else 1.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after.append(flat(self.parameters()))


class Troubled(LitLLM):
    """A loss that is multiplied by something at given steps, on given ranks, or whose gradient is."""

    def __init__(
        self,
        factors: dict[int, float],
        ranks: tuple[int, ...] = (0,),
        only_gradient: bool = False,
        build: Callable[[Any], torch.optim.Optimizer] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config=MODEL, vocab_size=VOCAB, seq_len=SEQ, seed=3, **options)
        self.factors, self.ranks, self.only_gradient, self.build = factors, ranks, only_gradient, build
        self.after: list[Tensor] = []
        self.norms: list[float] = []

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        loss_sum, count = super().loss(batch)
        factor = self.factors.get(self.trainer.global_step, 1.0) if self.trainer.global_rank in self.ranks else 1.0
        if not self.only_gradient:
            return loss_sum * factor, count
        loss_sum.register_hook(lambda gradient: gradient * factor)
        return loss_sum, count

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers() if self.build is None else self.build(self.parameters())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = [s for p in self.parameters() for s in self.optimizers().state[p].values() if isinstance(s, Tensor)]
        self.after.append(flat([*self.parameters(), *state]))
        self.norms.append(float(self.trainer.callback_metrics.get("train/grad_norm", -1.0)))


def run(module: LitLLM, folder: Path, steps: int = 6, **options: Any) -> list[str]:
    """Fits and gives the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(str(folder), max_steps=steps, **options).fit(module, DataLoader(micro_batches(steps), batch_size=None))
    return [str(one.message) for one in caught if str(one.message).startswith("step ")]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("only_gradient", [False, True])
@pytest.mark.parametrize("kind", ["fused", "plain", "momentum"])
def test_a_bad_step_changes_nothing(tmp_path: Path, bad: float, only_gradient: bool, kind: str) -> None:
    build = {
        "fused": None,
        "plain": lambda parameters: torch.optim.AdamW(parameters, fused=False),
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    }[kind]
    module = Troubled({2: bad}, only_gradient=only_gradient, build=build)
    (told,) = run(module, tmp_path)
    assert "step 3 skipped: the " in told
    assert ("gradient is not finite" if only_gradient else "loss is not finite on rank 0") in told
    assert torch.equal(module.after[2], module.after[1])
    for earlier, later in [(0, 1), (2, 3), (3, 4)]:
        assert not torch.equal(module.after[earlier], module.after[later])
    assert torch.isfinite(module.after[-1]).all()
    assert (tmp_path / "replays" / "step-3-rank-0.pt").exists()
    assert module.trainer.callback_metrics["train/skipped_steps"] == 1
    labels = [int((b["labels"] >= 0).sum()) for b in micro_batches(6)]
    assert module.trainer.callback_metrics["train/tokens"] == sum(labels) - labels[2]


def test_ignored_means_taken(tmp_path: Path) -> None:
    module = Troubled({2: math.nan}, guard={"nonfinite": "ignore"})
    assert run(module, tmp_path) == []
    assert not torch.isfinite(module.after[-1]).all()


def test_stopping_saves_the_state_before(tmp_path: Path) -> None:
    module = Troubled({2: math.nan}, guard={"nonfinite": "stop"})
    with pytest.raises(RunStopped, match=r"step 3: the loss is not finite on rank 0; replay .*; saved .*step-3.ckpt"):
        run(module, tmp_path, enable_checkpointing=True)
    saved = torch.load(tmp_path / "checkpoints" / "step-3.ckpt", weights_only=True)
    weights = flat(saved["state_dict"].values())
    assert torch.equal(weights, module.after[1][: len(weights)])


def test_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    module = Troubled(dict.fromkeys(range(1, 9), math.nan), guard={"max_skips": 4, "save_batches": 1})
    with pytest.raises(RunStopped, match="step 5: no finite loss and gradient for 4 steps in a row"):
        run(module, tmp_path, steps=10)
    assert len(list((tmp_path / "replays").iterdir())) == 1


def test_a_spike_is_skipped_and_the_distribution_is_in_the_checkpoint(tmp_path: Path) -> None:
    guard = {"spike_factor": 5.0, "spike_window": 8}
    module = Troubled({12: 30.0}, guard=guard)
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=10)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saving]}
    (told,) = run(module, tmp_path, steps=16, **options)
    assert "step 13 skipped: loss" in told
    assert "leaves the running distribution" in told
    # Resumed three steps before the spike, there is no time to learn the distribution anew.
    resumed = Troubled({12: 30.0}, guard=guard)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = trainer(str(tmp_path), max_steps=16)
        again.fit(resumed, DataLoader(micro_batches(16), batch_size=None), ckpt_path=tmp_path / "step=10.ckpt")
    assert any(str(one.message).startswith("step 13 skipped: loss") for one in caught)


def two_ranks(folder: str, nonfinite: str, only_gradient: bool) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    module = Troubled({2: math.nan}, ranks=(1,), only_gradient=only_gradient, guard={"nonfinite": nonfinite})
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp", "max_steps": 6, "enable_checkpointing": True}
    data = DataLoader(micro_batches(24)[rank::2], batch_size=None)
    told = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer(folder, accumulate_grad_batches=2, **options).fit(module, data)
        except RunStopped as error:
            told = str(error)
    told = told or " ".join(str(one.message) for one in caught if "skipped" in str(one.message))
    # Micro-batches 4 and 5 are those of step 2, of which only the latter makes a step.
    folders = sorted(path.name for path in Path(folder, "replays").glob("*"))
    saved = Path(folder, "checkpoints", "step-3.ckpt").exists()
    return {
        "told": told,
        "replays": folders,
        "saved": saved,
        "same": torch.equal(module.after[3], module.after[-1 if told and nonfinite == "stop" else 5]),
    }


CASES = [("skip", False), ("skip", True), ("stop", False)]


def all_cases(folder: str) -> list[dict[str, Any]]:
    """One after the other, as a start takes longer than all of them; the last one ends its run."""
    plain = PlainLoss()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(f"{folder}/plain", devices=2, strategy="ddp", max_steps=3)
        run.fit(plain, DataLoader(micro_batches(3), batch_size=None))
    told = " ".join(str(one.message) for one in caught if "skipped" in str(one.message))
    same = torch.equal(plain.after[0], plain.after[1]) and not torch.equal(plain.after[1], plain.after[2])
    return [
        *(two_ranks(f"{folder}/{index}", *case) for index, case in enumerate(CASES)),
        {"told": told, "same": same},
    ]


@pytest.fixture(scope="module")
def ranks_of_cases(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What both ranks found."""
    return run_ranks("tests.test_guard:all_cases", 2, timeout=100, folder=str(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_nan_on_one_of_two_ranks(ranks_of_cases: list[Any], index: int) -> None:
    nonfinite, only_gradient = CASES[index]
    ranks = [cases[index] for cases in ranks_of_cases]
    assert [rank["same"] for rank in ranks] == [True, True]
    if nonfinite == "stop":
        assert ranks[0]["told"] == ranks[1]["told"]
        assert "step 3: the loss is not finite on rank 1" in ranks[0]["told"]
        assert ranks[0]["saved"]
    else:
        assert "step 3 skipped" in ranks[0]["told"]
        assert ("on rank 1" in ranks[0]["told"]) != only_gradient
    mine = ["step-3-rank-0.pt"] if only_gradient else []
    assert ranks[1]["replays"] in (["step-3-rank-1.pt"], [*mine, "step-3-rank-1.pt"])  # the other may be on its way
    assert [name for name in ranks[0]["replays"] if "rank-0" in name] == mine


def test_nan_in_a_plain_loss_names_its_rank(ranks_of_cases: list[Any]) -> None:
    assert [cases[-1]["same"] for cases in ranks_of_cases] == [True, True]
    assert "step 2 skipped: the loss is not finite on rank 1" in ranks_of_cases[0][-1]["told"]


# float16


class Scaled(MixedPrecision):
    """The real loss scale of float16, with float32 arithmetic, so that it runs on a CPU and compares."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=65536.0))

    def autocast_context_manager(self) -> Any:
        return torch.autocast("cpu", enabled=False)


def test_float16_is_unscaled_before_it_is_measured_and_clipped(tmp_path: Path) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    probe = Troubled({}, build=sgd)
    run(probe, tmp_path, steps=1)
    ten = {0: 10 / probe.norms[0], 2: math.inf}
    plain, scaled = Troubled({**ten, 2: 0.0}, build=sgd), Troubled(ten, build=sgd, only_gradient=True)
    run(plain, tmp_path, steps=4, gradient_clip_val=1.0)
    # The overflow is how a loss scale finds its place: skipped in silence, and no batch saved.
    assert run(scaled, tmp_path, steps=4, gradient_clip_val=1.0, plugins=[Scaled()]) == []
    assert scaled.norms[0] == pytest.approx(10, rel=1e-3)
    torch.testing.assert_close(scaled.after[1], plain.after[1], rtol=1e-5, atol=1e-6)
    assert torch.equal(scaled.after[2], scaled.after[1])
    torch.testing.assert_close(scaled.after[3], plain.after[3], rtol=1e-5, atol=1e-6)
    assert scaled.trainer.precision_plugin.scaler.get_scale() == 32768
    assert not (tmp_path / "replays").exists()
