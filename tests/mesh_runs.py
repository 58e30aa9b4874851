"""Runs under MeshStrategy and ddp on real ranks, beside the same steps written down plainly."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_llm import LitLLM
from lit_llm.parallel import MeshStrategy
from tests.test_step import SEQ, VOCAB, flat, micro_batches, trainer
from tests.training import MODEL

STEPS = 5
CLIP = 0.3


@dataclasses.dataclass(frozen=True)
class Case:
    """One run.

    Args:
        strategy: ``ddp``, or the options of MeshStrategy.
        checkpointing: of activations.
        model: fields that differ from ``tests.training.MODEL``.
        precision: of the Trainer.
        micro_batches: of a global batch, over all ranks.
    """

    strategy: Any
    checkpointing: Any = "none"
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    precision: str = "32-true"
    compile: bool = False
    micro_batches: int = 8
    clip: float | None = CLIP


class Watched(LitLLM):
    """Records losses, norms, and the gradient of each parameter as the optimizer gets it."""

    def __init__(self, model: dict[str, Any], **options: Any) -> None:
        super().__init__(config={**MODEL, **model}, vocab_size=VOCAB, seq_len=SEQ, seed=3, **options)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[Tensor] = []
        self.initial: Tensor | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-6, fused=True)

    def on_train_start(self) -> None:
        super().on_train_start()
        self.initial = flat(self.parameters())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(flat(p.grad for p in self.parameters() if p.grad is not None))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.norms.append(float(self.trainer.callback_metrics["train/grad_norm"]))
        self.losses.append(float(self.trainer.callback_metrics["train/loss"]))


def strategy_of(case: Case) -> Any:
    return MeshStrategy(**case.strategy) if isinstance(case.strategy, dict) else case.strategy


def run(case: Case, rank: int, world_size: int, folder: str, module: type[Watched] = Watched) -> Watched:
    """Five steps; each rank takes its share of every global batch's micro-batches."""
    mine = micro_batches(STEPS * case.micro_batches)[rank::world_size]
    lit = module(case.model, compile=case.compile, activation_checkpointing=case.checkpointing)
    fit = trainer(
        folder,
        devices=world_size,
        strategy=strategy_of(case),
        accumulate_grad_batches=case.micro_batches // world_size,
        max_epochs=1,
        gradient_clip_val=case.clip,
        precision=case.precision,
    )
    fit.fit(lit, DataLoader(mine, batch_size=None))
    return lit


def plain_run(case: Case) -> dict[str, Any]:
    """The same steps in one process, from all logits of the whole global batch, in float32 and without options."""
    module = Watched(case.model)
    module.configure_model()
    model, optimizer = module.transformer, module.configure_optimizers()
    batches = micro_batches(STEPS * case.micro_batches)
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "initial": flat(model.parameters())}
    for start in range(0, len(batches), case.micro_batches):
        window = batches[start : start + case.micro_batches]
        ids, labels = (torch.cat([b[name] for b in window]) for name in ("input_ids", "labels"))
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        found["losses"].append(float(loss))
        found["gradients"].append(flat(p.grad for p in model.parameters()))
        found["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip or 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return {**found, "weights": flat(model.parameters())}
