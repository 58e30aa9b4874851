"""How the processes of a run are laid out: the sizes of the mesh, and the mesh itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lit_llm.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Size = int | Literal["auto"]
DIMENSIONS = ("replicate", "shard", "context", "tensor")
"""Of the mesh, the outermost first: neighbours, which share a machine, split what communicates most."""
_DATA = ("replicate", "shard")


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of the mesh's dimensions; their product is the number of processes.

    Args:
        replicate: groups of processes that each hold the whole model; gradients are averaged over them.
        shard: processes over which each group splits parameters, gradients and optimizer state.
        context: processes over which a sequence is split.
        tensor: processes over which each matrix product is split.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """Processes that see different rows."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in DIMENSIONS}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"


def resolve_sizes(world_size: int, *, replicate: Size, shard: Size, context: Size = 1, tensor: Size = 1) -> MeshSizes:
    """The sizes, with the one that is ``auto`` filled in from the number of processes.

    Raises:
        UserError: a size that is no positive number, two that are auto, or a product other than ``world_size``.
    """
    given: dict[str, Size] = {"replicate": replicate, "shard": shard, "context": context, "tensor": tensor}
    for name, size in given.items():
        if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise UserError(f"trainer.strategy.{name} must be a number from 1 on, or auto; got {size!r}")
    open_ones = [name for name, size in given.items() if size == "auto"]
    if len(open_ones) > 1:
        raise UserError(
            f"trainer.strategy: {' and '.join(open_ones)} are auto, which only one size may be; give a number for "
            f"{open_ones[0] if open_ones[0] != 'replicate' or len(open_ones) > 2 else 'shard'}"
        )
    fixed = 1
    for size in given.values():
        fixed *= 1 if size == "auto" else size
    written = " x ".join(f"{name} {size}" for name, size in given.items() if size != 1 or name in _DATA)
    if world_size % fixed or (not open_ones and fixed != world_size):
        raise UserError(
            f"trainer.strategy: {written} needs {'a multiple of ' if open_ones else ''}{fixed} processes, but there "
            f"{'is' if world_size == 1 else 'are'} {world_size} (trainer.devices x trainer.num_nodes); change one of "
            "them" + ("" if open_ones else ", or set one size to auto")
        )
    filled = {name: world_size // fixed if size == "auto" else size for name, size in given.items()}
    return MeshSizes(**filled)


def build_mesh(device_type: str, sizes: MeshSizes) -> DeviceMesh:
    """The mesh over all processes, with every dimension of ``DIMENSIONS``, also those of size 1.

    Process groups are made, so every process must come here.
    """
    from torch.distributed.device_mesh import init_device_mesh

    shape = tuple(getattr(sizes, name) for name in DIMENSIONS)
    return init_device_mesh(device_type, shape, mesh_dim_names=DIMENSIONS)


def sharding_mesh(mesh: DeviceMesh, sizes: MeshSizes) -> DeviceMesh:
    """The part of the mesh that ``fully_shard`` takes: (shard,), or (replicate, shard) for hybrid sharding."""
    return mesh["shard"] if sizes.replicate == 1 else mesh["replicate", "shard"]


def data_place(mesh: DeviceMesh, sizes: MeshSizes) -> int:
    """This process's number among those that see different rows, in 0 ... ``sizes.data`` - 1."""
    return mesh.get_local_rank("replicate") * sizes.shard + mesh.get_local_rank("shard")
