"""What a process holds of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import Tensor, nn

if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a part of a tensor that lies on several processes."""
    return torch.distributed.is_available() and isinstance(tensor, DTensor)


def reshard(module: nn.Module) -> None:
    """Frees what is gathered: an evaluation leaves the root's parameters so, whole and in the place of their parts."""
    if torch.distributed.is_available():
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def drop_gradients(module: nn.Module) -> None:
    """Frees gradients that wait in sharded modules for a step that did not come, where ``zero_grad`` sees none."""
    if not torch.distributed.is_available():
        return
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in getattr(part._get_fsdp_state(), "_fsdp_param_groups", []):
                group._partial_reduce_output = None
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None


def local_part(tensor: Tensor) -> Tensor:
    """This process's part, without autograd; the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this process's parts; a meta tensor counts what it would take."""
    return sum(part.numel() * part.element_size() for part in map(local_part, tensors))


def describe_memory(module: nn.Module) -> str:
    """A line on the parameters that this process holds, of how many there are."""
    parameters = list(module.parameters())
    here = sum(local_part(p).numel() for p in parameters)
    whole = sum(p.numel() for p in parameters)
    return f"{here:,} of {whole:,} parameters on each process, {local_bytes(parameters) / 2**20:,.1f} MiB"
