"""What sharding costs and saves: bytes of each rank, gathered parameters at once, collectives, and their order."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lit_llm import ModelConfig
from lit_llm.errors import UserError
from lit_llm.parallel import MeshStrategy, local_bytes
from lit_llm.parallel.dry_run import dry_run
from tests.distributed import run_ranks
from tests.mesh_runs import Watched
from tests.test_step import micro_batches, trainer

MODEL = {"num_hidden_layers": 6, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
MICRO = 4


class Collectives(TorchDispatchMode):
    """Counts the collectives, and the bytes that are gathered at once: of parameters, and of all buffers for them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.parameters = self.buffers = 0
        parts = [part for part in model.modules() if hasattr(part, "_get_fsdp_state")]
        self._groups = [group for part in parts for group in part._get_fsdp_state()._fsdp_param_groups]
        self._flat: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "allgather_base" in name:
            self._flat.append(weakref.ref(args[0].untyped_storage()))
        if func.namespace == "c10d":
            self.counts[name] += 1
        found = func(*args, **(kwargs or {}))
        self._measure()
        return found

    def _measure(self) -> None:
        flat = {s._cdata: s.nbytes() for ref in self._flat if (s := ref()) is not None}
        parameters = buffers = 0
        for group in self._groups:
            outputs = [whole.untyped_storage() for one in group.fsdp_params for whole in one.all_gather_outputs]
            here = sum(storage.nbytes() for storage in outputs)
            on_its_way = group._all_gather_result
            buffers += here
            parameters += here or (0 if on_its_way is None else on_its_way.all_gather_output.nbytes)
        self.parameters = max(self.parameters, parameters)
        self.buffers = max(self.buffers, buffers + sum(flat.values()))


class Counted(Watched):
    """Counts during the forward and backward passes of the second step."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.mode: Any = None
        self.found: dict[str, Any] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == MICRO:
            self.mode = Collectives(self.transformer)
            self.mode.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 * MICRO - 1:
            self.mode.__exit__(None, None, None)
            mode = self.mode
            self.found = {"counts": dict(mode.counts), "peak": mode.parameters, "buffers": mode.buffers}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.gradient_bytes = local_bytes(p.grad for p in self.parameters() if p.grad is not None)


def costs(folder: str, ranks: int, strategy: dict[str, Any], checkpointing: Any = "none") -> dict[str, Any]:
    lit = Counted(MODEL, activation_checkpointing=checkpointing)
    mine = micro_batches(2 * MICRO * ranks)[int(os.environ.get("RANK", 0)) :: ranks]
    fit = trainer(folder, devices=ranks, strategy=MeshStrategy(**strategy), accumulate_grad_batches=MICRO, max_epochs=1)
    fit.fit(lit, DataLoader(mine, batch_size=None))
    state = fit.optimizers[0].state.values()
    return {
        **lit.found,
        "parameters": local_bytes(lit.parameters()),
        "gradients": lit.gradient_bytes,
        "optimizer": local_bytes(t for one in state for t in one.values() if t.ndim),
    }


class Named(Watched):
    """Marks the compute of each block in the profiler's trace, and records the third step."""

    def on_train_start(self) -> None:
        super().on_train_start()
        for number, block in enumerate(self.transformer.layers):
            block.compute = _marked(block.compute, f"compute {number}")  # type: ignore[method-assign]
        self.profiler: Any = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.profiler = profile(activities=[ProfilerActivity.CPU])
            self.profiler.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.profiler.__exit__(None, None, None)


def _marked(function: Any, name: str) -> Any:
    def call(*args: Any) -> Any:
        with record_function(name):
            return function(*args)

    return call


def gathers(folder: str, ranks: int, prefetch: int) -> dict[str, Any]:
    """Begin and end of each block's compute and begin of its gather, in a forward, in microseconds."""
    lit = Named(MODEL)
    mine = micro_batches(3 * ranks)[int(os.environ["RANK"]) :: ranks]
    fit = trainer(folder, devices=ranks, strategy=MeshStrategy(prefetch=prefetch), max_epochs=1)
    fit.fit(lit, DataLoader(mine, batch_size=None))
    found: dict[str, Any] = {}
    for event in sorted(lit.profiler.events(), key=lambda one: one.time_range.start):
        if event.name.startswith("compute "):
            found[event.name] = [event.time_range.start, event.time_range.end]
        elif event.name.startswith("FSDP::all_gather (") and "layers." in event.name:
            number = event.name.split("layers.")[1].split(")")[0]
            found.setdefault(f"gather {number}", event.time_range.start)  # the first, which is the forward's
    return found


def all_costs(folder: str, ranks: int) -> dict[str, Any]:
    return {
        "shard": costs(folder, ranks, {}),
        "full": costs(folder, ranks, {}, "full"),
        "each": costs(folder, ranks, {"reduce_every_micro_batch": True}),
        "prefetch": gathers(folder, ranks, 1),
        "none": gathers(folder, ranks, 0),
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks counted."""
    return run_ranks("tests.test_mesh_costs:all_costs", 2, folder=str(tmp_path_factory.mktemp("costs")), ranks=2)


def block_and_root_bytes() -> tuple[int, int]:
    lit = Watched(MODEL)
    lit.configure_model()
    block = local_bytes(lit.transformer.layers[0].parameters())
    return block, local_bytes(lit.parameters()) - 6 * block


def check_bytes(rank: dict[str, Any], ranks: int) -> None:
    """All dimensions are even, so the shares are exact."""
    block, root = block_and_root_bytes()
    share = (6 * block + root) / ranks
    assert rank["parameters"] == rank["gradients"] == share
    assert rank["optimizer"] == 2 * share


def test_memory_falls_with_the_shards(two_ranks: Any) -> None:
    for rank in two_ranks:
        check_bytes(rank["shard"], 2)


@pytest.mark.slow
def test_memory_of_four_shards(tmp_path: Any) -> None:
    for rank in run_ranks("tests.test_mesh_costs:costs", 4, folder=str(tmp_path), ranks=4, strategy={}):
        check_bytes(rank, 4)


@pytest.mark.parametrize("name", ["shard", "full"])
def test_at_most_two_blocks_are_gathered_beside_the_root(two_ranks: Any, name: str) -> None:
    block, root = block_and_root_bytes()
    for rank in two_ranks:
        assert rank[name]["peak"] == root + 2 * block
        # torch frees the flat buffer of a gather at the next one, behind which it has been copied from.
        assert rank[name]["buffers"] <= root + 3 * block


def test_accumulation_communicates_once(two_ranks: Any) -> None:
    units = 7  # six blocks and the root
    for rank in two_ranks:
        counts = {name: rank[name]["counts"]["_reduce_scatter_base_"] for name in ("shard", "full", "each")}
        assert counts == {"shard": units, "full": units, "each": units * MICRO}


def test_the_next_block_is_gathered_while_one_computes(two_ranks: Any) -> None:
    for rank in two_ranks:
        for number in range(5):
            ends = rank["prefetch"][f"compute {number}"][1]
            assert rank["prefetch"][f"gather {number + 1}"] < ends
            assert rank["none"][f"gather {number + 1}"] > rank["none"][f"compute {number}"][1]


def test_a_layout_without_its_machines() -> None:
    config = ModelConfig.preset("llama-3-8b")
    found = dry_run(config, 64, replicate=2)
    assert found.parameters == 8_030_261_248
    # Norms of 4,096 and all matrices split evenly over 32.
    assert found.parameter_bytes == found.parameters * 4 // 32
    block = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096
    assert found.gathered_bytes == 2 * (2 * block + 2 * 128256 * 4096 + 4096)
    with pytest.raises(UserError, match="needs a multiple of 3 processes"):
        dry_run(config, 64, replicate=3)


@pytest.mark.slow
def test_70b_on_128_processes() -> None:
    found = dry_run(ModelConfig.preset("llama-3-70b"), 128, rank=127)
    assert found.parameters == 70_553_706_496
    assert found.parameter_bytes == found.parameters * 4 // 128
