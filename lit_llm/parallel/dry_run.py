"""A layout tried without its machines: nothing is allocated and nothing sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lit_llm.errors import UserError
from lit_llm.model import ModelConfig, Transformer
from lit_llm.parallel.mesh import MeshSizes, Size, build_mesh, resolve_sizes, sharding_mesh
from lit_llm.parallel.parallelize import Sharding, parallelize
from lit_llm.parallel.report import local_bytes


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What one process of a layout holds.

    Args:
        sizes: of the mesh.
        parameters: of the whole model.
        parameter_bytes: of this process's float32 parameters; gradients take as many, AdamW's state twice as many.
        gathered_bytes: of the largest units gathered at once: the root and two blocks, in the compute dtype.
    """

    sizes: MeshSizes
    parameters: int
    parameter_bytes: int
    gathered_bytes: int


def dry_run(
    config: ModelConfig,
    world_size: int,
    *,
    replicate: Size = 1,
    shard: Size = "auto",
    rank: int = 0,
    compute_dtype: torch.dtype | None = torch.bfloat16,
) -> DryRun:
    """Builds and splits a model as process ``rank`` of ``world_size`` would, on the meta device.

    Raises:
        UserError: sizes that do not fit, or a process that has joined others already.
    """
    sizes = resolve_sizes(world_size, replicate=replicate, shard=shard)
    with _pretended_processes(world_size, rank), torch.device("meta"):
        model = Transformer(config)
        parameters = model.num_parameters()
        largest = max(local_bytes(block.parameters()) for block in model.layers)
        root = local_bytes(model.parameters()) - sum(local_bytes(block.parameters()) for block in model.layers)
        narrow = 1.0 if compute_dtype is None else compute_dtype.itemsize / 4
        mesh = build_mesh("cpu", sizes)
        parallelize(model, sharding=Sharding(sharding_mesh(mesh, sizes), compute_dtype=compute_dtype))
        return DryRun(sizes, parameters, local_bytes(model.parameters()), round((root + 2 * largest) * narrow))


@contextmanager
def _pretended_processes(world_size: int, rank: int) -> Generator[None]:
    if dist.is_initialized():
        raise UserError("a dry run pretends to be one of many processes, but this one has joined real ones already")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
