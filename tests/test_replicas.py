"""ReplicaCheck: a bit that one rank alone has is found and its rank named; what is equal is not reported."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_llm import LitLLM
from lit_llm.callbacks.replicas import ReplicaCheck, _told, checksum
from lit_llm.errors import RunStopped, UserError
from tests.distributed import run_ranks
from tests.test_step import SEQ, VOCAB, micro_batches, trainer
from tests.training import MODEL

STEPS = 4


class Disturb(L.Callback):
    """Turns the lowest bit of one number on some ranks, after a step."""

    def __init__(self, ranks: list[int], step: int, name: str, of_optimizer: bool = False) -> None:
        self.ranks, self.step, self.name, self.of_optimizer = ranks, step, name, of_optimizer

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.global_rank in self.ranks:
            tensor = dict(module.named_parameters())[self.name]
            if self.of_optimizer:
                tensor = trainer.optimizers[0].state[tensor]["exp_avg_sq"]
            local: Any = tensor.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            local.view(torch.int32).view(-1)[-1] ^= 1


class NaNs(L.Callback):
    """One weight becomes NaN everywhere, of another kind on each rank."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == STEPS:
            weight = module.transformer.norm.weight.detach()
            weight.view(torch.int32)[3] = 0x7FC00000 + trainer.global_rank


class Saves(L.Callback):
    """Where a checkpoint would be written, which is behind all other callbacks."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(trainer.global_step)


class Noisy(LitLLM):
    """Drops activations at random, each rank others."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.transformer.layers[0].register_forward_hook(
                lambda module, inputs, output: nn.functional.dropout(output, 0.3, module.training)
            )


Q, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
DDP_CASES: dict[str, dict[str, Any]] = {
    "quiet": {"noisy": True, "optimizer_state": True},
    "tied": {"tied": True},
    "nan": {"other": "nan"},
    "weight": {"disturb": ([1], 3, Q)},
    "not yet": {"disturb": ([1], 3, Q), "every": 5},
    "warn": {"disturb": ([1], 2, NORM), "action": "warn"},
    "optimizer": {"disturb": ([1], 2, NORM, True), "optimizer_state": True, "every": 2},
    "optimizer unseen": {"disturb": ([1], STEPS, NORM, True), "every": 2},
}


def one_run(folder: str, strategy: Any, ranks: int, case: dict[str, Any]) -> dict[str, Any]:
    config = {**MODEL, "tie_word_embeddings": bool(case.get("tied"))}
    kind = Noisy if case.get("noisy") else LitLLM
    module = kind(config=config, vocab_size=VOCAB, seq_len=SEQ, schedule={"warmup_steps": 0, "total_steps": 9})
    check = ReplicaCheck(case.get("every", 1), case.get("action", "stop"), case.get("optimizer_state", False))
    saves, first = Saves(), []
    if "disturb" in case:
        first.append(Disturb(*case["disturb"]))
    if case.get("other") == "nan":
        first.append(NaNs())
    run = trainer(folder, devices=ranks, strategy=strategy, max_steps=STEPS, callbacks=[*first, check, saves])
    said = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run.fit(module, DataLoader(micro_batches(STEPS), batch_size=None))
        except RunStopped as error:
            said = str(error)
    warned = [str(one.message) for one in caught if "replicas" in str(one.message)]
    return {"said": said, "warned": warned, "step": run.global_step, "saved": saves.steps}


def ddp_runs(folder: str, ranks: int) -> dict[str, Any]:
    return {name: one_run(folder, "ddp", ranks, case) for name, case in DDP_CASES.items()}


def mesh_runs(folder: str) -> dict[str, Any]:
    """Of four ranks: [0, 1] and [2, 3] hold one model each."""
    from lit_llm.parallel import MeshStrategy

    norm = ([2], 2, NORM)
    shards = {"replicate": 2, "shard": 2}
    return {
        "quiet": one_run(folder, MeshStrategy(**shards), 4, {"noisy": True, "optimizer_state": True}),
        "quiet tied": one_run(folder, MeshStrategy(**shards), 4, {"tied": True}),
        "weight": one_run(folder, MeshStrategy(**shards), 4, {"disturb": norm}),
        "optimizer": one_run(folder, MeshStrategy(**shards), 4, {"disturb": (*norm, True), "optimizer_state": True}),
        "two": one_run(folder, MeshStrategy(**shards), 4, {"disturb": ([1, 2], 2, NORM)}),
        "all of a group": one_run(folder, MeshStrategy(**shards), 4, {"disturb": ([0, 2], 2, NORM)}),
        "sharded": one_run(folder, MeshStrategy(shard=4), 4, {"disturb": norm}),
        "ddp": one_run(folder, "ddp", 4, {"disturb": ([2], 3, Q)}),
        "ddp two": one_run(folder, "ddp", 4, {"disturb": ([0, 3], 3, Q)}),
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The cases under ddp on two ranks."""
    return run_ranks("tests.test_replicas:ddp_runs", 2, folder=str(tmp_path_factory.mktemp("pair")), ranks=2)


@pytest.mark.parametrize("name", ["quiet", "tied", "nan", "not yet", "optimizer unseen"])
def test_nothing_is_said_of_equal_replicas(pair: Any, name: str) -> None:
    for rank in pair:
        assert rank[name] == {"said": None, "warned": [], "step": STEPS, "saved": list(range(1, STEPS + 1))}


def test_one_bit_of_one_weight_stops_both_ranks_before_the_step_is_saved(pair: Any) -> None:
    for rank in pair:
        found = rank["weight"]
        assert (found["step"], found["saved"]) == (3, [1, 2])
        assert found["said"].startswith(f"step 3: the replicas 0, 1 hold different values, first in {Q} (checksum ")
        assert "on rank 0, " in found["said"]
        assert "which of them is right can't be told; all were equal at step 2; " in found["said"]
        assert found["said"].endswith("resume from a checkpoint of step 2 or before")
        assert "\n" not in found["said"]
    assert pair[0]["weight"]["said"] == pair[1]["weight"]["said"]


def test_warn_trains_on(pair: Any) -> None:
    assert pair[0]["warn"]["step"] == STEPS
    assert [said.split(":")[0] for said in pair[0]["warn"]["warned"]] == ["step 2", "step 3", "step 4"]
    assert f"first in {NORM}" in pair[0]["warn"]["warned"][0]


def test_the_optimizers_memory_is_compared_if_asked(pair: Any) -> None:
    """Before the weights themselves come apart."""
    for rank in pair:
        assert rank["optimizer"]["said"].startswith("step 2: ")
        assert f"first in exp_avg_sq of {NORM} (" in rank["optimizer"]["said"]
        assert "resume from an earlier checkpoint" in rank["optimizer"]["said"]


@pytest.mark.slow
def test_four_ranks(tmp_path: Any) -> None:
    ranks = run_ranks("tests.test_replicas:mesh_runs", 4, folder=str(tmp_path), timeout=240)
    assert all(rank[name]["said"] == ranks[0][name]["said"] for rank in ranks for name in rank)
    for rank in ranks:
        for name in ("quiet", "quiet tied", "all of a group", "sharded"):
            assert (rank[name]["said"], rank[name]["step"]) == (None, STEPS), name
        one, two = rank["weight"]["said"], rank["two"]["said"]
        assert one.startswith(f"step 2: the replicas 0, 2 hold different values, first in {NORM} (checksum ")
        assert f"exp_avg_sq of {NORM}" in rank["optimizer"]["said"]
        assert "the replicas 0, 2 hold" in two
        assert "; the replicas 1, 3 hold" in two
        assert rank["ddp"]["said"] == (
            f"step 3: rank 2 of the replicas 0, 1, 2, 3 differs from the others, first in {Q}; all were equal at step "
            "2; resume from a checkpoint of step 2 or before"
        )
        assert "can't be told" in rank["ddp two"]["said"], "two against two"
    assert ranks[0]["sharded"]["warned"] == ["ReplicaCheck has nothing to compare: MeshStrategy has no replicas"]
    assert ranks[0]["quiet"]["warned"] == []


def test_the_minority_is_named() -> None:
    parts = {rank: (["a", "b", "c"], [1, 7 if rank in (1, 4) else 2, 5 + (rank == 4)]) for rank in range(5)}
    said = _told({0: 10, 1: 11, 2: 10, 3: 10, 4: 12}, parts)
    assert said == "rank 1, 4 of the replicas 0, 1, 2, 3, 4 differs from the others, first in b"
    assert "on rank 2" in _told({0: 1, 1: 2, 2: 3}, {r: (["a"], [r]) for r in range(3)})


# The checksum


def plainly(tensor: Tensor) -> int:
    """Over Python's integers."""
    flat = tensor.reshape(-1)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    total = 0
    for place, bits in enumerate(flat.view(kind).tolist()):
        mixed = _signed(place * -7046029254386353131)
        mixed = _signed((mixed ^ (mixed >> 29)) * -4417276706812531889)
        total += bits * ((mixed ^ (mixed >> 32)) | 1)
    return _signed(total)


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_checksum_is_exact_over_integers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_llm.callbacks.replicas._CHUNK", 7)
    tensor = (torch.randn(5, 6, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    assert int(checksum(tensor)) == plainly(tensor)
    assert int(checksum(tensor.T)) == plainly(tensor.T.contiguous())
    assert int(checksum(tensor[1:, 1:])) == plainly(tensor[1:, 1:].contiguous())


def test_checksum_sees_every_bit_and_every_place() -> None:
    tensor = torch.randn(20, generator=torch.Generator().manual_seed(0))
    seen = {int(checksum(tensor))}
    for place in range(20):
        for bit in range(32):
            other = tensor.clone()
            other.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
            seen.add(int(checksum(other)))
    assert len(seen) == 1 + 20 * 32
    assert int(checksum(tensor.flip(0))) not in seen
    assert int(checksum(tensor[:0])) == 0


def test_checksum_takes_all_nan_for_one() -> None:
    one, other = torch.zeros(4), torch.zeros(4)
    one.view(torch.int32)[2], other.view(torch.int32)[2] = 0x7FC00000, -0x3FFFFF
    assert torch.isnan(other[2])
    assert int(checksum(one)) == int(checksum(other)) != int(checksum(torch.zeros(4)))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"every_n_steps": 0}, "every_n_steps must be at least 1"), ({"action": "fix"}, "action must be stop or warn")],
)
def test_options_that_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ReplicaCheck(**options)


def test_one_process_has_nothing_to_check(tmp_path: Any) -> None:
    found = one_run(str(tmp_path), "auto", 1, {"disturb": ([0], 2, NORM)})
    assert (found["said"], found["step"], found["warned"]) == (None, STEPS, [])
