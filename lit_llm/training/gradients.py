"""The gradients of a step, all together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_llm.parallel.report import is_sharded, local_part


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients that an optimizer's step will use."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def scale_gradients(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiplies all of them by a scalar tensor, in place and, for half precision, in float32."""
    parts = [local_part(gradient) for gradient in gradients]
    if parts:
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        torch._foreach_mul_(parts, factor.to(parts[0].device, wide))


def total_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """2-norm of all gradients together, a scalar of at least float32 on ``device``; of sharded ones over all shards.

    Gradients may lie on different meshes, or on none: one reduction for each kind of split.
    """
    if not gradients:
        return torch.zeros((), device=device)
    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        kind = (gradient.device_mesh, gradient.placements) if is_sharded(gradient) else None
        kinds.setdefault(kind, []).append(gradient)
    norms = [_norm(some) for some in kinds.values()]
    if len(norms) == 1:
        return norms[0].to(device)
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))


def _norm(gradients: list[Tensor]) -> Tensor:
    # Of half-precision gradients, norms in half precision would have 8 bits.
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    parts = [local_part(gradient) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts, 2, dtype=dtype)))
    first = gradients[0]
    if is_sharded(first):
        squares = norm.square()
        for dimension, placement in enumerate(first.placements):
            if not placement.is_replicate():
                dist.all_reduce(squares, group=first.device_mesh.get_group(dimension))
        norm = squares.sqrt()
    return norm
