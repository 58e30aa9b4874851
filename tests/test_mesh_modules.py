"""Modules of a user's own under MeshStrategy: as in one process, or refused in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_llm.errors import RunStopped, UserError
from lit_llm.metrics import TokenLoss
from lit_llm.model import Transformer
from lit_llm.parallel import MeshStrategy
from lit_llm.training.saved_state import agree_on_checkpoint
from tests.distributed import run_ranks
from tests.mesh_runs import Watched
from tests.test_step import VOCAB, flat, micro_batches, trainer

MICRO = 4
STEPS = 3


class Own(Watched):
    """Builds the model itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__({}, **options)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Transformer(self.resolve_config(), seed=3)
            self.build()

    def build(self) -> None:
        """What a subclass adds."""


class Heads(Own):
    """Modules beside the Transformer, drawn otherwise on each rank, in a container, trained in ``loss``."""

    def build(self) -> None:
        torch.manual_seed(int(os.environ.get("RANK", "0")))
        self.heads = nn.ModuleList([nn.Linear(VOCAB, 1), nn.ModuleDict({"b": nn.Linear(VOCAB, 3)})])
        self.register_buffer("noise", torch.rand(VOCAB))
        self.transformer.layers[0].extra = nn.Linear(2, 2).requires_grad_(False)  # type: ignore[assignment]

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = super().loss(batch)
        logits = self(batch["input_ids"]).float() * self.noise
        first, second = self.heads[0], self.heads[1]["b"]  # type: ignore[index]
        return total + (first(logits).square().mean() + second(logits).square().mean()) * count, count


class Looks(Watched):
    """A forward between backward and step."""

    def __init__(self) -> None:
        super().__init__({})

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        with torch.no_grad():
            self.model(torch.zeros((1, 3), dtype=torch.int64))  # type: ignore[misc]


class Compiled(Watched):
    """A wrapper around the model."""

    def __init__(self) -> None:
        super().__init__({})

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model = torch.compile(self.model, backend="eager")  # type: ignore[assignment]


class Reference(Own):
    """A second, frozen Transformer, as in distillation."""

    def build(self) -> None:
        self.reference = Transformer(self.resolve_config(), seed=8).requires_grad_(False)

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = super().loss(batch)
        theirs, _ = self.reference(batch["input_ids"], labels=batch["labels"])
        return total + 0.1 * theirs, count


def share(ranks: int, number: int = STEPS * MICRO, seed: int = 0) -> DataLoader[Any]:
    rank = int(os.environ.get("RANK", "0")) if ranks > 1 else 0
    return DataLoader(micro_batches(number, seed=seed)[rank::ranks], batch_size=None)  # type: ignore[arg-type]


def fitted(folder: str, ranks: int, lit: Watched, strategy: Any, **options: Any) -> list[float]:
    """Losses, norms, validation's loss, and sums of the weights, all of one length on all ranks."""
    run = trainer(
        folder,
        devices=ranks,
        strategy=strategy,
        accumulate_grad_batches=MICRO // ranks,
        max_epochs=1,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        **options,
    )
    run.fit(lit, share(ranks), share(ranks, 3, seed=4))
    weights = flat(lit.parameters())
    return [*lit.losses, *lit.norms, float(run.callback_metrics["val/loss"]), float(weights.abs().sum())]


def cut_short(folder: str, ranks: int, strategy: Any) -> list[float]:
    """An exception within a window, and then another fit of the same module."""
    lit = Watched({})
    options = {"devices": ranks, "accumulate_grad_batches": MICRO // ranks, "max_epochs": 1}
    first = trainer(folder, strategy=strategy(), callbacks=[Breaks()], **options)
    with pytest.raises(RuntimeError, match="on purpose"):
        first.fit(lit, share(ranks))
    return fitted(folder, ranks, lit, strategy())


class Breaks(L.Callback):
    """Fails within the second window, behind a backward that is not the window's last."""

    def on_after_backward(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.global_step == 1:
            raise RuntimeError("on purpose")


USES: dict[str, Any] = {
    "heads": lambda folder, ranks, strategy: fitted(folder, ranks, Heads(), strategy()),
    "looks": lambda folder, ranks, strategy: fitted(folder, ranks, Looks(), strategy()),
    "compiled": lambda folder, ranks, strategy: fitted(folder, ranks, Compiled(), strategy()),
    "reference": lambda folder, ranks, strategy: fitted(folder, ranks, Reference(), strategy()),
    "cut short": cut_short,
}


def refusal(folder: str, ranks: int, lit: L.LightningModule, strategy: Any) -> str:
    try:
        trainer(folder, devices=ranks, strategy=strategy, max_steps=1).fit(lit, share(ranks))
    except UserError as error:
        return str(error)
    return "not refused"


class Late(Watched):
    """Adds a parameter to a split block."""

    def __init__(self) -> None:
        super().__init__({})

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.transformer.layers[0].late = nn.Linear(2, 2)  # type: ignore[assignment]


class Tied(Own):
    """One parameter in two children."""

    def build(self) -> None:
        self.out = nn.Linear(32, VOCAB, bias=False)
        self.out.weight = self.transformer.embed_tokens.weight


class Hooked(Own):
    """A hook on a gradient."""

    def build(self) -> None:
        self.transformer.embed_tokens.weight.register_hook(lambda gradient: gradient * 0)


class Remembers(Own):
    """An optimizer over parameters from before the split."""

    def build(self) -> None:
        self.kept = list(self.transformer.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.kept)


class Refers(Own):
    """Second names of what the model has."""

    def __init__(self) -> None:
        super().__init__()
        self.early: nn.Module | None = None

    def build(self) -> None:
        self.early = self.transformer.layers[1].mlp
        self.last, self.all = self.transformer.norm, nn.ModuleList([self.transformer.layers[0]])


class Scalar(Own):
    """A parameter without a dimension."""

    def build(self) -> None:
        self.gain = nn.Module()
        self.gain.scale = nn.Parameter(torch.tensor(1.0))


class Listed(Own):
    """Parameters without a module."""

    def build(self) -> None:
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(4))])


class Mixed(Own):
    """Two dtypes in one module."""

    def build(self) -> None:
        self.router = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))


class Frozen(Own):
    """A frozen parameter of its own, in the optimizer."""

    def build(self) -> None:
        self.gain = nn.Parameter(torch.ones(4), requires_grad=False)


def uneven_heads(folder: str, ranks: int, strategy: Any) -> list[float]:
    """A rank without any batch, and a module beside the Transformer."""
    rank, lit = int(os.environ.get("RANK", "0")), Heads()
    batches = micro_batches(2) if rank == 0 else []
    run = trainer(folder, devices=ranks, strategy=strategy())
    return [run.validate(lit, DataLoader(Some(batches), batch_size=None), verbose=False)[0]["val/loss"]]


class Some(torch.utils.data.IterableDataset[Any]):
    """Batches of which nobody knows how many there are."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class Picks(Heads):
    """An optimizer by class."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind([p for p in self.parameters() if p.ndim == 2 and p.requires_grad], lr=1e-3)


def rank_uses(folder: str, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, use in USES.items():
        found[f"shard {name}"] = use(folder, ranks, MeshStrategy)
        found[f"replicate {name}"] = use(folder, ranks, lambda: MeshStrategy(replicate=ranks))
    found["uneven heads"] = uneven_heads(folder, ranks, MeshStrategy)
    found["refers"] = fitted(folder, ranks, Refers(), MeshStrategy())
    for kind in (Late, Tied, Hooked, Remembers, Scalar, Listed, Mixed, Frozen):
        found[kind.__name__] = refusal(folder, ranks, kind(), MeshStrategy())
    for kind in (torch.optim.Adafactor, torch.optim.Muon):
        found[kind.__name__] = refusal(folder, ranks, Picks(kind), MeshStrategy())
    lit = Watched({})
    fitted(folder, ranks, lit, MeshStrategy())
    fitted(folder, ranks, lit, MeshStrategy())  # the same layout, of another strategy
    found["other layout"] = refusal(folder, ranks, lit, MeshStrategy(replicate=ranks))
    found["ddp"] = refusal(folder, ranks, lit, "ddp")
    found["differ"] = _differ(ranks)
    return found


def _differ(ranks: int) -> str:
    class Seen:
        world_size = ranks
        ckpt_path = f"step-{os.environ['RANK']}.ckpt"

    try:
        agree_on_checkpoint(Seen)
    except RunStopped as stopped:
        return str(stopped)
    return "not told"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks found."""
    folder = str(tmp_path_factory.mktemp("modules"))
    return run_ranks("tests.test_mesh_modules:rank_uses", 2, folder=folder, ranks=2)


@pytest.mark.parametrize("name", USES)
def test_a_users_own_module_trains_as_in_one_process(two_ranks: Any, tmp_path: Path, name: str) -> None:
    alone = USES[name](str(tmp_path), 1, lambda: "auto")
    assert len(alone) >= 2 * STEPS + 2
    for rank in two_ranks:
        for layout in ("shard", "replicate"):
            assert rank[f"{layout} {name}"] == pytest.approx(alone, rel=2e-6, abs=1e-5)


def test_second_names_and_a_rank_without_batches(two_ranks: Any, tmp_path: Path) -> None:
    refers = fitted(str(tmp_path), 1, Refers(), "auto")
    heads = uneven_heads(str(tmp_path), 1, lambda: "auto")
    for rank in two_ranks:
        assert rank["refers"] == pytest.approx(refers, rel=2e-6, abs=1e-5)
        assert rank["uneven heads"] == pytest.approx(heads, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Late", "parameter model.layers.0.late.weight came after the model was split"),
        ("Tied", "weight of Linear is also embed_tokens.weight of another child"),
        ("Hooked", "the hook on the gradient of model.embed_tokens.weight would never run"),
        ("Remembers", "AdamW has a parameter of shape (61, 32) that is none of the model's"),
        ("Scalar", "Scalar: Module has the parameter scale of no dimension"),
        ("Listed", "Listed: ParameterList has no forward"),
        ("Mixed", "Mixed: Sequential mixes parameters of bfloat16, float32"),
        ("Frozen", "AdamW has gain, which lies in no module of its own"),
        ("Adafactor", "Adafactor can't step the parts of split parameters"),
        ("Muon", "Muon can't step heads.0.weight of 1 rows on 2 shards"),
        ("other layout", "the model is split 2 by another strategy before, and can't be split 2 x 1 now"),
        ("ddp", "the model is split by MeshStrategy, so DDPStrategy can't use it"),
        ("differ", "rank 0 from step-0.ckpt and rank 1 from step-1.ckpt"),
    ],
)
def test_what_would_go_wrong_is_refused(two_ranks: Any, name: str, said: str) -> None:
    for rank in two_ranks:
        assert said in rank[name]
        assert "\n" not in rank[name]


def test_options_hold_for_a_model_of_ones_own(tmp_path: Path) -> None:
    lit = Own(activation_checkpointing="full")
    trainer(str(tmp_path), devices=1, max_steps=1).fit(lit, share(1))
    assert all(block.recompute is not None for block in lit.transformer.layers)


def test_sums_of_losses_stay_wide() -> None:
    metric = TokenLoss().to(torch.bfloat16)
    for _ in range(1000):
        metric.update(torch.tensor(3.0), torch.tensor(1), torch.tensor([1]))
    values = metric.compute()
    assert values["loss"] == 3.0
    metric.reset()
    assert metric.loss_sum.dtype == torch.float64
