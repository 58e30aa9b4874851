"""Mixtures of experts on real ranks: idle experts (case 56), and router losses that no layout changes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lit_llm.checkpoint import read_checkpoint
from lit_llm.checkpoint.placing import fill_from_whole
from tests.distributed import run_ranks
from tests.mesh_runs import Case as Layout
from tests.mesh_runs import Watched, strategy_of
from tests.test_step import SEQ, VOCAB, flat, micro_batches, trainer

STEPS, MICRO = 4, 4
AUX, Z = 0.5, 0.1
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**SPARSE, "shared_expert_intermediate_size": 16, "norm_topk_prob": False}
THREE = {**SPARSE, "num_experts": 3}
SIX = {**SPARSE, "num_experts": 6}


@dataclasses.dataclass(frozen=True)
class Case(Layout):
    """``apart``: each rank's tokens choose two experts of their own out of six, and the last two are idle."""

    apart: bool = False
    clip: float | None = None


QUICK = {
    "ddp": Case("ddp", model=SPARSE),
    "shard, selective, shared": Case({}, "selective", model=SHARED),
    "shard, 3 experts, full": Case({}, "full", model=THREE),
    "ddp, idle": Case("ddp", model=SIX, apart=True),
    "shard, idle": Case({}, model=SIX, apart=True, clip=0.3),
}
SLOW = {
    "ddp, idle, full": Case("ddp", "full", model=SIX, apart=True),
    "shard, idle, selective": Case({}, "selective", model=SIX, apart=True),
    "replicate": Case({"replicate": 2}, model=THREE),
    "offload, 3 experts": Case({"cpu_offload": True}, model=THREE),
    "reduced at each micro-batch": Case({"reduce_every_micro_batch": True}, model=THREE),
    "shard, bf16": Case({}, model=THREE, precision="bf16-mixed"),
    "ddp, bf16, selective": Case("ddp", "selective", model=SHARED, precision="bf16-mixed"),
    "shard, compiled": Case({}, model=THREE, compile=True),
}
CASES = {**QUICK, **SLOW}
RESUMED = "shard, 3 experts, full"


def batches(case: Case) -> list[dict[str, Tensor]]:
    """Of all ranks, by turns; where they are apart, each rank has a half of the vocabulary."""
    made = micro_batches(STEPS * MICRO)
    if case.apart:
        for number, batch in enumerate(made):
            batch["input_ids"] = batch["input_ids"] % 30 + 30 * (number % 2)
    return made


def send_apart(name: str, weight: Tensor) -> Tensor:
    """The halves of the vocabulary differ in the first feature, and so do the experts that want it."""
    weight = weight.clone()
    if name == "embed_tokens.weight":
        weight[:30, 0], weight[30:, 0] = 1.0, -1.0
    if name.endswith("mlp.gate.weight"):
        weight.zero_()
        weight[:, 0] = torch.tensor([3.0, 2.0, -3.0, -2.0, 0.0, 0.0])
    return weight


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


class Routed(Watched):
    """With the router's losses; records which experts this rank's tokens chose, and gradients by name."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.model, activation_checkpointing=case.checkpointing, compile=case.compile)
        self.case = case
        self.chosen: set[int] = set()
        self.named: list[dict[str, Tensor]] = []

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        options = {"labels": batch["labels"], "router_aux_loss": AUX, "router_z_loss": Z}
        return self(batch["input_ids"], **options)

    def on_train_start(self) -> None:
        if self.case.apart:
            with torch.no_grad():
                for name, parameter in self.transformer.named_parameters():
                    fill_from_whole(parameter, send_apart(name, whole(parameter)))
        for block in self.transformer.layers:
            block.mlp.experts.register_forward_pre_hook(lambda _, args: self.chosen.update(args[1].unique().tolist()))
        super().on_train_start()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.named.append({n: whole(p.grad) for n, p in self.transformer.named_parameters() if p.grad is not None})


def one_run(case: Case, folder: str, out: str, checkpoint: str | None = None) -> dict[str, Any]:
    rank, module = int(os.environ["RANK"]), Routed(case)
    fit = trainer(
        folder,
        devices=2,
        strategy=strategy_of(case),
        accumulate_grad_batches=MICRO // 2,
        max_epochs=1 if checkpoint is None else 2,
        gradient_clip_val=case.clip,
        precision=case.precision,
    )
    fit.fit(module, DataLoader(batches(case)[rank::2], batch_size=None), ckpt_path=checkpoint)
    named = {name: whole(parameter) for name, parameter in module.transformer.named_parameters()}
    local = [(n, p.to_local().numel()) for n, p in module.transformer.named_parameters() if isinstance(p, DTensor)]
    if rank == 0 or "ddp" in out:
        tensors = {"gradients": module.gradients, "named": module.named, "weights": named, "initial": module.initial}
        torch.save(tensors, f"{out}-{rank}.pt")
    if checkpoint is None and CASES[RESUMED] is case:
        fit.save_checkpoint(f"{folder}/saved.ckpt")
    sums = [{n: float(g.abs().sum()) for n, g in grads.items() if "experts." in n} for grads in module.named]
    return {
        "losses": module.losses,
        "norms": module.norms,
        "chosen": sorted(module.chosen),
        "experts": sums,
        "local": local,
    }


def all_runs(folder: str, table: str) -> dict[str, Any]:
    cases = {"QUICK": QUICK, "SLOW": SLOW}[table]
    found = {name: one_run(case, folder, f"{folder}/{name}") for name, case in cases.items()}
    if RESUMED in cases:
        found["resumed"] = one_run(CASES[RESUMED], folder, f"{folder}/resumed", f"{folder}/saved.ckpt")
    return found


def router_term(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """A layer's, row after row: what :class:`lit_llm.model.moe.MoE` documents."""
    total = logits.new_zeros(())
    for row, marks in zip(logits, labels, strict=True):
        used = row[marks != -100]
        if not len(used):
            continue
        probabilities = used.softmax(dim=-1)
        slots = nn.functional.one_hot(probabilities.topk(k).indices, row.shape[-1]).sum(dim=(0, 1)) / len(used)
        total = total + len(used) * AUX * row.shape[-1] * (slots * probabilities.mean(dim=0)).sum()
        total = total + Z * used.logsumexp(dim=-1).square().sum()
    return total


def plain_run(case: Case, epochs: int = 1) -> dict[str, Any]:
    """The same steps in one process, each from the logits of the whole global batch."""
    module = Routed(case)
    module.configure_model()
    model, optimizer = module.transformer, module.configure_optimizers()
    logits: list[Tensor] = []
    with torch.no_grad():
        for name, parameter in model.named_parameters() if case.apart else ():
            parameter.copy_(send_apart(name, parameter))
    for block in model.layers:
        block.mlp.gate.register_forward_hook(lambda _, args, out: logits.append(out))
    found: dict[str, Any] = {"losses": [], "gradients": [], "initial": flat(model.parameters())}
    made = batches(case) * epochs
    for start in range(0, len(made), MICRO):
        ids, labels = (torch.cat([b[key] for b in made[start : start + MICRO]]) for key in ("input_ids", "labels"))
        logits.clear()
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss + sum(router_term(one, labels, 2) for one in logits) / len(model.layers)
        loss = loss / (labels != -100).sum()
        loss.backward()
        found["losses"].append(loss.item())
        found["gradients"].append(flat(p.grad for p in model.parameters()))
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {**found, "weights": flat(model.parameters())}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What both ranks found, and the folder with their tensors."""
    folder = tmp_path_factory.mktemp("moe")
    return folder, run_ranks("tests.test_moe_distributed:all_runs", 2, folder=str(folder), table="QUICK")


def check(got: dict[str, Any], losses: list[list[float]], expected: dict[str, Any], first: int = 0) -> None:
    for of_rank in losses:
        np.testing.assert_allclose(of_rank, expected["losses"][first:], atol=1e-5, rtol=1e-5)
    assert len(got["gradients"]) == len(expected["gradients"][first:]) == STEPS
    for mine, theirs in zip(got["gradients"], expected["gradients"][first:], strict=True):
        assert float((mine - theirs).abs().max()) <= 1e-5


def check_case(name: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    got, expected = torch.load(folder / f"{name}-0.pt"), plain_run(CASES[name])
    assert torch.equal(got["initial"], expected["initial"]), "initial weights, bit for bit"
    losses = [rank[name]["losses"] for rank in ranks]
    if CASES[name].precision == "32-true":
        check(got, losses, expected)
        return
    for of_rank in losses:  # bf16 has 8 bits, and a token may choose otherwise
        np.testing.assert_allclose(of_rank, expected["losses"], rtol=1e-2)
    for mine, theirs in zip(got["gradients"], expected["gradients"], strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) <= 0.1


def check_idle(name: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    assert [rank[name]["chosen"] for rank in ranks] == [[0, 1], [2, 3]]
    got = [torch.load(path) for path in sorted(folder.glob(f"{name}-?.pt"))]
    assert len(got) == (2 if "ddp" in name else 1)
    for step in range(STEPS):
        for parameter, gradient in got[0]["named"][step].items():
            if "experts." in parameter:
                assert [bool(one.any()) for one in gradient] == [True] * 4 + [False] * 2
            assert all(torch.equal(other["named"][step][parameter], gradient) for other in got)
    for parameter, weight in got[0]["weights"].items():
        assert all(torch.equal(other["weights"][parameter], weight) for other in got)
    assert ranks[0][name]["experts"] == ranks[1][name]["experts"]
    assert ranks[0][name]["norms"] == ranks[1][name]["norms"]


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_equal_one_process(two_ranks: Any, name: str) -> None:
    """Losses, router terms among them, and gradients."""
    check_case(name, *two_ranks)


@pytest.mark.parametrize("name", [name for name, case in QUICK.items() if case.apart])
def test_idle_experts(two_ranks: Any, name: str) -> None:
    """Steps complete; experts that one rank alone uses learn, those that none uses have zeros, equal on both."""
    check_idle(name, *two_ranks)


@pytest.mark.slow
def test_more_layouts(tmp_path: Path) -> None:
    ranks = run_ranks("tests.test_moe_distributed:all_runs", 2, timeout=280, folder=str(tmp_path), table="SLOW")
    for name, case in SLOW.items():
        check_case(name, tmp_path, ranks)
        if case.apart:
            check_idle(name, tmp_path, ranks)


def test_three_experts_are_split_evenly_over_two_ranks(two_ranks: Any) -> None:
    """Within each expert, since the experts don't divide; and their checkpoint is whole."""
    folder, ranks = two_ranks
    weights = torch.load(folder / f"{RESUMED}-0.pt")["weights"]
    stacks = {name: weight for name, weight in weights.items() if "experts." in name}
    assert len(stacks) == 4
    for rank in ranks:
        local = dict(rank[RESUMED]["local"])
        assert all(local[name] == weight.numel() // 2 for name, weight in stacks.items())
    saved = read_checkpoint(folder / "saved.ckpt")["state_dict"]
    assert {name.removeprefix("model.") for name in saved} == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(saved[f"model.{name}"], weight)


def test_a_split_mixture_goes_on_from_its_checkpoint(two_ranks: Any) -> None:
    folder, ranks = two_ranks
    got, expected = torch.load(folder / "resumed-0.pt"), plain_run(CASES[RESUMED], epochs=2)
    check(got, [rank["resumed"]["losses"] for rank in ranks], expected, first=STEPS)


def test_the_cases_have_what_they_need() -> None:
    assert (VOCAB, SEQ) == (61, 12)  # 60 ids in two halves
    assert {len(batches(case)) for case in CASES.values()} == {STEPS * MICRO}
