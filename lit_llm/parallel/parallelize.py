"""How a Transformer is split over processes: this file is the definition."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lit_llm.errors import UserError
from lit_llm.parallel.activation_checkpointing import Checkpointing, checkpoint_activations

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    from lit_llm.model import Transformer


@dataclass(frozen=True)
class Sharding:
    """How ``fully_shard`` splits parameters, gradients and optimizer state (ZeRO-3, Rajbhandari et al. 2020).

    Args:
        mesh: (shard,), or (replicate, shard): split over the last dimension, gradients averaged over both.
        reshard_after_forward: True: a block's gathered parameters are freed after its forward and gathered again for
            its backward; False: kept in between (ZeRO-2); a number: split over so many neighbouring processes in
            between, such as those of one machine.
        prefetch: blocks whose parameters are gathered ahead of the one that computes.
        compute_dtype: in which parameters are gathered and multiplied; None: their own.
        cpu_offload: parameters, gradients and optimizer state lie in the memory of the CPU.
        pin_memory: of those, for copies that overlap with compute.
    """

    mesh: DeviceMesh
    reshard_after_forward: bool | int = True
    prefetch: int = 1
    compute_dtype: torch.dtype | None = None
    cpu_offload: bool = False
    pin_memory: bool = True


def parallelize(
    model: Transformer,
    *,
    activation_checkpointing: Checkpointing = "none",
    compile: bool = False,
    sharding: Sharding | None = None,
) -> None:
    """Applies to a Transformer, in place, what the options ask for; the order matters.

    Block names keep their global numbers whatever is applied, so that checkpoints fit each other.
    """
    # 1. Tensor parallelism comes first, since all that follows sees its local shards (not there yet: see MeshStrategy).
    # 2. Checkpointing inside of what is compiled, so that the compiler sees what is computed again.
    checkpoint_activations(list(model.layers), activation_checkpointing)
    # 3. Each block alone: one compilation serves all, and the gathers stay between the compiled pieces.
    if compile:
        model.compile_blocks()
    # 4. Sharding outermost: a block is gathered once before its forward and once before its backward.
    if sharding is not None:
        shard(model, sharding)
    model.parallelized = True


def shard(model: Transformer, sharding: Sharding) -> None:
    """Splits each block's parameters as one unit, and all others (embedding, last norm, head) as the root's.

    The root's unit is gathered from the first forward on until its backward is done. A tied head has no parameter of
    its own, and an untied one lies in the same unit, so the two can't come apart.
    """
    for block in model.layers:
        _fully_shard(block, sharding, reshard_after_forward=sharding.reshard_after_forward)
    _fully_shard(model, sharding, reshard_after_forward=False)
    _prefetch(model, list(model.layers), sharding.prefetch)
    # On a CPU the host waits for a gather where it calls for it, and nothing overlaps, unless told otherwise.
    unshard_async: Any = getattr(model, "_set_unshard_async_op", None)
    if sharding.prefetch and sharding.mesh.device_type == "cpu" and unshard_async is not None:
        unshard_async(True)


def shard_module(module: nn.Module, sharding: Sharding) -> None:
    """Splits a module outside of the Transformer, such as a head of a subclass, as one unit."""
    _fully_shard(module, sharding, reshard_after_forward=False)


def _fully_shard(module: nn.Module, sharding: Sharding, *, reshard_after_forward: bool | int) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Gradients are added up over processes, and over micro-batches before, in float32. Inputs are left as they are: the
    # rotary tables among them are float32, and activations follow the parameters by themselves.
    precision = MixedPrecisionPolicy(
        param_dtype=sharding.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=sharding.pin_memory) if sharding.cpu_offload else OffloadPolicy()
    fully_shard(
        module,
        mesh=sharding.mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=functools.partial(_placement, shards=sharding.mesh.size(-1)),
        mp_policy=precision,
        offload_policy=offload,
    )


def _placement(parameter: nn.Parameter, shards: int) -> Shard | None:
    """Along which dimension a parameter is split; None: the first.

    A stack of experts along the first that divides, since the first alone would leave processes beyond the number of
    experts with nothing. Other parameters take what does not divide, but not along another dimension than the first.
    """
    from torch.distributed.tensor import Shard

    dimension = next((one for one, size in enumerate(parameter.shape) if size % shards == 0), 0)
    return Shard(dimension) if parameter.ndim == 3 and dimension else None


def _prefetch(root: Any, blocks: Sequence[Any], number: int) -> None:
    """Names, for each unit, those to be gathered while it computes: the next in forward, those before in backward."""
    if number < 1:
        return
    root.set_modules_to_forward_prefetch(blocks[:number])
    root.set_modules_to_backward_prefetch(blocks[::-1][:number])
    for place, block in enumerate(blocks):
        following, previous = blocks[place + 1 : place + 1 + number], blocks[:place][::-1][:number]
        if following:
            block.set_modules_to_forward_prefetch(following)
        if previous:
            block.set_modules_to_backward_prefetch(previous)


def check_reshard(value: Any, shard_size: int) -> bool | int:
    """The option ``reshard_after_forward``.

    Raises:
        UserError: a number that does not divide ``shard_size``, or is 1 (which is False).
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, int) or not 1 < value <= shard_size or shard_size % value:
        raise UserError(
            f"trainer.strategy.reshard_after_forward must be true, false or a divisor of shard {shard_size} above 1; "
            f"got {value!r}"
        )
    return value
