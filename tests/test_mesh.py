"""DDP and sharding on real ranks: losses, norms, gradients and initial weights against one process."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from lit_llm.errors import UserError
from lit_llm.parallel.mesh import MeshSizes, resolve_sizes
from tests.distributed import run_ranks
from tests.mesh_runs import Case, plain_run, run
from tests.test_step import flat

TIED = {"tie_word_embeddings": True}
SEVEN = {"num_hidden_layers": 7}
QUICK = {
    "ddp": Case("ddp", "full"),
    "shard": Case({}, model=SEVEN),
    "shard, selective, tied": Case({}, "selective", model=TIED),
    "shard, every second block, kept gathered": Case({"reshard_after_forward": False, "prefetch": 0}, 2),
    "shard, reduced at each micro-batch": Case({"reduce_every_micro_batch": True}, "full", clip=None),
    "replicate": Case({"replicate": 2}),
    "offload": Case({"cpu_offload": True}),
    "bf16": Case({}, precision="bf16-mixed"),
    "ddp bf16": Case("ddp", precision="bf16-mixed"),
}
FOUR = {
    f"{name}, {mode}, {'tied' if tied else 'untied'}, accumulation {micro // 4}, clip {clip}": Case(
        strategy, mode, model=TIED if tied else {}, micro_batches=micro, clip=clip
    )
    for name, strategy in (("ddp", "ddp"), ("shard 4", {}), ("replicate 2 x shard 2", {"replicate": 2, "shard": 2}))
    for mode in ("none", "full", "selective", 2)
    for tied in (False, True)
    for micro, clip in ((4, None), (8, 0.3))
} | {
    "reshard to 2 of 4": Case({"reshard_after_forward": 2}, micro_batches=8),
    "replicate, reduced at each micro-batch": Case(
        {"replicate": 2, "reduce_every_micro_batch": True}, micro_batches=12
    ),
    "prefetch 2, 7 blocks": Case({"prefetch": 2}, model=SEVEN, micro_batches=4),
}
COMPILED = {
    "ddp": Case("ddp", compile=True),
    "shard": Case({}, compile=True),
    "shard, full": Case({}, "full", compile=True),
    "shard, selective, tied": Case({}, "selective", compile=True, model=TIED),
    "replicate": Case({"replicate": 2}, compile=True),
}
TABLES = {"QUICK": QUICK, "FOUR": FOUR, "COMPILED": COMPILED}


def rank_runs(folder: str, table: str, ranks: int) -> dict[str, Any]:
    """All cases of a table, one after the other; rank 0 keeps the tensors."""
    rank = int(os.environ["RANK"])
    found = {}
    for number, (name, case) in enumerate(TABLES[table].items()):
        lit = run(case, rank, ranks, folder)
        weights = flat(lit.parameters())
        if rank == 0:
            tensors = {"gradients": lit.gradients, "initial": lit.initial, "weights": weights}
            torch.save(tensors, f"{folder}/{table}-{number}.pt")
        found[name] = {"losses": lit.losses, "norms": lit.norms}
    return found


def check(folder: Any, table: str, name: str, ranks: list[dict[str, Any]]) -> None:
    case, number = TABLES[table][name], list(TABLES[table]).index(name)
    got, expected = torch.load(folder / f"{table}-{number}.pt"), plain_run(case)
    assert torch.equal(got["initial"], expected["initial"]), "initial weights, bit for bit"
    exact = case.precision == "32-true"
    tolerance = 1e-5 if exact else 2e-2  # bf16 has 8 bits
    for rank in ranks:
        np.testing.assert_allclose(rank[name]["losses"], expected["losses"], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(rank[name]["norms"], expected["norms"], rtol=tolerance, atol=tolerance)
    for step, (mine, theirs) in enumerate(zip(got["gradients"], expected["gradients"], strict=True)):
        assert len(mine) == len(theirs)
        limit = (1e-5 if step else 1e-6) if exact else 1e-2
        assert float((mine - theirs).abs().max()) <= limit


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both ranks logged in each quick case, and the folder with rank 0's tensors."""
    folder = tmp_path_factory.mktemp("two")
    return folder, run_ranks("tests.test_mesh:rank_runs", 2, folder=str(folder), table="QUICK", ranks=2)


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_equal_one_process(two_ranks: Any, name: str) -> None:
    folder, ranks = two_ranks
    check(folder, "QUICK", name, ranks)


@pytest.mark.slow
def test_four_ranks_equal_one_process(tmp_path: Any) -> None:
    ranks = run_ranks("tests.test_mesh:rank_runs", 4, timeout=280, folder=str(tmp_path), table="FOUR", ranks=4)
    for name in FOUR:
        check(tmp_path, "FOUR", name, ranks)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_blocks_have_the_gradients_of_plain_ones(tmp_path: Any) -> None:
    ranks = run_ranks("tests.test_mesh:rank_runs", 2, timeout=800, folder=str(tmp_path), table="COMPILED", ranks=2)
    for name in COMPILED:
        check(tmp_path, "COMPILED", name, ranks)


@pytest.mark.parametrize(
    ("world_size", "given", "expected"),
    [
        (8, {"replicate": 1, "shard": "auto"}, MeshSizes(shard=8)),
        (8, {"replicate": 2, "shard": "auto"}, MeshSizes(replicate=2, shard=4)),
        (8, {"replicate": "auto", "shard": 2}, MeshSizes(replicate=4, shard=2)),
        (1, {"replicate": 1, "shard": "auto"}, MeshSizes()),
        (128, {"replicate": 2, "shard": "auto", "tensor": 8}, MeshSizes(replicate=2, shard=8, tensor=8)),
    ],
)
def test_sizes(world_size: int, given: dict[str, Any], expected: MeshSizes) -> None:
    assert resolve_sizes(world_size, **given) == expected
    assert expected.world_size == world_size


@pytest.mark.parametrize(
    ("world_size", "given", "said"),
    [
        (
            8,
            {"replicate": 3, "shard": "auto"},
            "replicate 3 x shard auto needs a multiple of 3 processes, but there are 8",
        ),
        (8, {"replicate": 2, "shard": 2}, "replicate 2 x shard 2 needs 4 processes, but there are 8"),
        (1, {"replicate": 1, "shard": 2}, "shard 2 needs 2 processes, but there is 1"),
        (8, {"replicate": "auto", "shard": "auto"}, "replicate and shard are auto"),
        (8, {"replicate": 0, "shard": "auto"}, "replicate must be a number from 1 on"),
        (8, {"replicate": 1, "shard": True}, "shard must be a number"),
    ],
)
def test_sizes_that_do_not_fit(world_size: int, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match="trainer.strategy") as caught:
        resolve_sizes(world_size, **given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
